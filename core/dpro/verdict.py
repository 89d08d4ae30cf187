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


@dataclass(frozen=True)
class Window:
    """Step times, ms, of consecutive steps under one setting; ``at`` is the step in their middle."""

    at: float
    times_ms: Sequence[float]


def slowest_rank(times: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Per step the slowest rank's time. ``times`` is [ranks][steps], in any unit; cut to the shortest."""
    steps = min((len(row) for row in times), default=0)
    if not steps:
        return np.zeros(0)
    slowest: npt.NDArray[np.float64] = np.max([row[:steps] for row in times], axis=0)
    return slowest


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


def compare(before: Sequence[Window], after: Sequence[Window], min_gain: float) -> Comparison:
    """Is the job faster in the windows ``after`` than it would have been with the settings of ``before``?

    A machine that drifts must fool nobody: every window after is held against the time *before*
    interpolated to the same place in the job, so a steady drift cancels exactly where windows
    before lie on both sides. ``ratio`` is the mean over the windows after. ``noise`` is two standard
    errors, from the spread inside the windows or between windows of equal settings, whichever is
    larger (a machine that others use is unlike itself from one window to the next). Faster means: by
    more than ``min_gain`` and by more than the noise, and by some in every window.
    """
    old = [(w.at, timing(w.times_ms)) for w in sorted(before, key=lambda w: w.at) if len(w.times_ms)]
    new = [(w.at, timing(w.times_ms)) for w in after if len(w.times_ms)]
    if not old or not new or any(t.median_ms <= 0 for _, t in old):
        return Comparison(1.0, 0.0, False)
    places = [at for at, _ in old]
    expected = np.interp([at for at, _ in new], places, [t.median_ms for _, t in old])
    ratios = np.asarray([t.median_ms for _, t in new]) / expected
    ratio = float(np.mean(ratios))
    inside = float(np.hypot(_relative_error([t for _, t in old]), _relative_error([t for _, t in new])))
    between = float(np.hypot(_between(ratios), _between([t.median_ms for _, t in old])))
    noise = 2 * ratio * max(inside, between)
    return Comparison(ratio, noise, bool(ratio < 1 - max(min_gain, noise) and np.all(ratios < 1)))


def _between(medians: npt.ArrayLike) -> float:
    """Standard error of the mean of windows, as a share of it, from how far they lie apart."""
    sample = np.asarray(medians, dtype=np.float64)
    return float(np.std(sample, ddof=1) / np.sqrt(len(sample)) / np.mean(sample)) if len(sample) > 1 else 0.0


def _relative_error(timings: Sequence[Timing]) -> float:
    """Standard error of the mean of independent medians, as a share of it."""
    errors = [t.error_ms / max(t.median_ms, 1e-9) for t in timings]
    return float(np.sqrt(np.sum(np.square(errors)))) / len(errors)
