"""Is a plan really faster? Pure functions over step times; no clock, no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Timing:
    """Median step time and its standard error, ms, over ``steps`` timed steps."""

    median_ms: float
    error_ms: float
    steps: int


@dataclass(frozen=True)
class Comparison:
    """``ratio`` is time after / time before; ``noise`` is two standard errors of that ratio."""

    ratio: float
    noise: float
    faster: bool


def slowest_rank(times_ns: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Per step the slowest rank's time, ms. ``times_ns`` is [ranks][steps]; cut to the shortest."""
    steps = min((len(row) for row in times_ns), default=0)
    if not steps:
        return np.zeros(0)
    slowest: npt.NDArray[np.float64] = np.asarray([row[:steps] for row in times_ns], dtype=np.float64).max(axis=0)
    return slowest / 1e6


def timing(times_ms: npt.ArrayLike) -> Timing:
    """Median and its standard error from the median absolute deviation.

    1.4826·MAD estimates the standard deviation of a normal sample, 1.2533·σ/√n the standard
    error of its median; both are robust to the odd checkpoint or stalled step.
    """
    sample = np.asarray(times_ms, dtype=np.float64)
    if not len(sample):
        return Timing(0.0, 0.0, 0)
    median = float(np.median(sample))
    deviation = 1.4826 * float(np.median(np.abs(sample - median)))
    return Timing(median, 1.2533 * deviation / float(np.sqrt(len(sample))), len(sample))


def compare(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], min_gain: float) -> Comparison:
    """Windows of step times, ms: [windows][steps], taken in turns (before, after, before, after).

    Faster means three things: by at least ``min_gain``; by more than twice the standard error; and
    in every window, so that the slowest window after still beats the fastest before. The last one
    is what a machine that drifts cannot fake: while it only gets faster (or only slower), windows
    of equal settings taken in turns can't separate.
    """
    old, new = timing(_flat(before)), timing(_flat(after))
    if not old.steps or not new.steps or old.median_ms <= 0:
        return Comparison(1.0, 0.0, False)
    ratio = new.median_ms / old.median_ms
    noise = 2 * ratio * float(np.hypot(old.error_ms / old.median_ms, new.error_ms / max(new.median_ms, 1e-9)))
    apart = max(timing(w).median_ms for w in after if w) < min(timing(w).median_ms for w in before if w)
    return Comparison(ratio, noise, apart and ratio < 1 - max(min_gain, noise))


def _flat(windows: Sequence[Sequence[float]]) -> list[float]:
    return [ms for window in windows for ms in window]
