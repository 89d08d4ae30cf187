"""What cause and effect allow for the difference of two clocks, offset and drift, exactly.

``d(t)`` is what to add to a time ``t`` of the second clock to read the first; it is taken for a line,
``d(t) = offset + drift · t``. A cause before its effect gives a point that the line must not pass below, or not
above. All lines that do neither are a convex polygon in the plane of (drift, offset), bounded by the hulls of
the two sets of points. Knows no traces; times are float64 ns from references of the caller's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

#: the most that two clocks can differ in rate: Linux slews a clock by 500 ppm at most, and quartz is far better
MAX_DRIFT = 1e-3

#: of which the highest point is taken for a first hull
_PARTS = 256
_ROUNDING_NS = 1e-3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """All lines between two sets of points, and the one in their middle."""

    low: Floats  # [n, 2] (time, value): hull of the points no line may pass below
    high: Floats  # [m, 2]: the same for above
    #: what both sides had to give way, ns, for a line to fit between: 0 where cause and effect agree
    slack: float
    drifts: Floats  # ascending: where a corner of the polygon may be
    floor: Floats  # lowest and highest offset at each of `drifts`
    ceiling: Floats

    def offsets(self, drift: float) -> tuple[float, float]:
        """Lowest and highest offset of a line with this drift (one of the band's)."""
        return float(np.interp(drift, self.drifts, self.floor)), float(np.interp(drift, self.drifts, self.ceiling))

    def middle(self) -> tuple[float, float]:
        """(drift, offset) in the middle: the polygon's centre of mass along drift, half-way up along offset."""
        width = self.ceiling - self.floor
        step, w0, w1 = np.diff(self.drifts), width[:-1], width[1:]
        area = float((step * (w0 + w1)).sum())
        if area > 0:  # exact: width is linear in between
            moment = float((step * (self.drifts[:-1] * (2 * w0 + w1) + self.drifts[1:] * (w0 + 2 * w1))).sum()) / 3
            drift = moment / area
        else:
            drift = float(self.drifts.mean())
        return drift, sum(self.offsets(drift)) / 2

    def farthest(self, drift: float, offset: float, times: Sequence[float]) -> float:
        """How far from the line given any allowed one can be at any of ``times``, ns."""
        off = [
            np.abs(side + self.drifts * t - (offset + drift * t)).max()
            for t in times
            for side in (self.floor, self.ceiling)
        ]
        return float(max(off)) + self.slack


def band(low: Floats, high: Floats) -> Band:
    """The band between points [n, 2] that lines may not pass below and [m, 2] not above; neither set empty.

    Where no line fits, both sets give way by the least that lets one fit (``slack``).
    """
    low = _upper_hull(low)
    high = _upper_hull(high * (1, -1)) * (1, -1)
    slopes = [np.diff(side[:, 1]) / np.diff(side[:, 0]) for side in (low, high)]
    drifts = np.unique(np.clip(np.concatenate([*slopes, [-MAX_DRIFT, 0.0, MAX_DRIFT]]), -MAX_DRIFT, MAX_DRIFT))
    # lowest and highest offset: convex and concave in drift, piecewise linear between the hulls' slopes
    floor = (low[:, 1] - drifts[:, None] * low[:, 0]).max(axis=1)
    ceiling = (high[:, 1] - drifts[:, None] * high[:, 0]).min(axis=1)
    width = ceiling - floor
    best = int(width.argmax())
    slack = max(0.0, -float(width[best]) / 2)
    floor, ceiling, width = floor - slack, ceiling + slack, width + 2 * slack
    allowed = np.flatnonzero(width >= 0)
    if not len(allowed):  # rounding of the slack itself
        allowed = np.array([best])
        width[best] = 0.0
    first, last = int(allowed[0]), int(allowed[-1])
    edges = []
    if first > 0:
        edges.append(_zero(drifts, width, first - 1))
    if last < len(drifts) - 1:
        edges.append(_zero(drifts, width, last))
    kept = np.unique(np.concatenate([drifts[first : last + 1], edges]))
    return Band(low, high, slack, kept, np.interp(kept, drifts, floor), np.interp(kept, drifts, ceiling))


def _zero(drifts: Floats, width: Floats, k: int) -> float:
    """Where the width is 0 between the k-th drift and the next."""
    share = width[k] / (width[k] - width[k + 1])
    return float(drifts[k] + share * (drifts[k + 1] - drifts[k]))


def _upper_hull(points: Floats) -> Floats:
    """Corners of the upper hull, by time, of all that some line of at most ``MAX_DRIFT`` can touch.

    A point below the cone (slopes ±MAX_DRIFT) of another is never touched, and one below the hull of some of the
    points is no corner: that leaves few of millions for the monotone chain.
    """
    points = points[np.lexsort((points[:, 1], points[:, 0]))]
    rising = points[:, 1] + MAX_DRIFT * points[:, 0]
    falling = points[:, 1] - MAX_DRIFT * points[:, 0]
    keep = rising >= np.maximum.accumulate(rising)
    keep &= falling >= np.maximum.accumulate(falling[::-1])[::-1]
    points = points[keep]
    if len(points) > 2 * _PARTS:
        edges = np.linspace(0, len(points), _PARTS + 1).astype(np.int64).tolist()
        highest = [a + int(points[a:b, 1].argmax()) for a, b in pairwise(edges)]
        below = _chain(points[np.unique([0, *highest, len(points) - 1])])
        points = points[points[:, 1] >= np.interp(points[:, 0], below[:, 0], below[:, 1]) - _ROUNDING_NS]
    return _chain(points)


def _chain(points: Floats) -> Floats:
    """Upper hull of points sorted by time, then value: the monotone chain (Andrew, 1979)."""
    hull: list[tuple[float, float]] = []
    for x, y in points.tolist():
        while hull and hull[-1][0] == x:  # sorted: the later one is the higher
            hull.pop()
        while len(hull) > 1 and _turns_left(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return np.array(hull)


def _turns_left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b is on or below the line from a to c."""
    return (b[0] - a[0]) * (c[1] - a[1]) >= (b[1] - a[1]) * (c[0] - a[0])
