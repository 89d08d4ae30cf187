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
    return np.max(np.asarray([row[:steps] for row in times_ns], dtype=np.float64), axis=0) / 1e6


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


def compare(before_ms: npt.ArrayLike, after_ms: npt.ArrayLike, min_gain: float) -> Comparison:
    """Faster means: by at least ``min_gain``, and by more than twice the standard error."""
    before, after = timing(before_ms), timing(after_ms)
    if not before.steps or not after.steps or before.median_ms <= 0:
        return Comparison(1.0, 0.0, False)
    ratio = after.median_ms / before.median_ms
    noise = 2 * ratio * float(np.hypot(before.error_ms / before.median_ms, after.error_ms / max(after.median_ms, 1e-9)))
    return Comparison(ratio, noise, ratio < 1 - max(min_gain, noise))
