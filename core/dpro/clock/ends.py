"""A first, honest clock alignment: ranks leave a collective together.

Takes the ends of collectives, never their starts, as simultaneous (starts differ by arrival wait, up
to tens of milliseconds; ends by microseconds). Constant offsets, no drift, no confidence interval:
the median over the collectives that two ranks share, kept within what cause and effect allow (nobody
leaves a collective before everybody arrived). Ranks of one host have one clock, and its readings are
better than any estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.clock.match import match_collectives
from dpro.trace.model import RankTrace


@dataclass(frozen=True)
class EndsAlignment:
    """``offsets_ns[i]`` is to be added to every time of ``traces[i]``; that of the first is 0."""

    offsets_ns: list[int]
    #: median absolute deviation of the end differences left over, per trace, ns
    spread_ns: list[int]
    #: collectives used per trace (0: nothing in common, offset 0 assumed)
    used: list[int]
    #: event rows of all collectives that traces share, see :func:`~dpro.clock.match.match_collectives`
    shared: npt.NDArray[np.int64]


def align_on_ends(traces: list[RankTrace]) -> EndsAlignment:
    """Offsets that bring the ends of collectives together, relative to the first trace."""
    offsets, spreads, used = [0], [0], [0]
    shared = match_collectives(traces)
    for index, trace in enumerate(traces[1:], 1):
        common = shared[(shared[:, 0] >= 0) & (shared[:, index] >= 0)]
        used.append(len(common))
        if not len(common):
            offsets.append(0)
            spreads.append(0)
            continue
        theirs, ours = _spans(traces[0], common[:, 0]), _spans(trace, common[:, index])
        same_host = bool(trace.meta.host) and trace.meta.host == traces[0].meta.host
        offset = _offset(theirs, ours, same_host)
        offsets.append(offset)
        spreads.append(int(np.median(np.abs(theirs[:, 1] - ours[:, 1] - offset))))
    used[0] = max(used)
    return EndsAlignment(offsets, spreads, used, shared)


def _offset(theirs: npt.NDArray[np.int64], ours: npt.NDArray[np.int64], same_host: bool) -> int:
    """What to add to ``ours``; both are starts and ends of the same collectives, int64 [n, 2]."""
    low = int((theirs[:, 0] - ours[:, 1]).max())
    high = int((theirs[:, 1] - ours[:, 0]).min())
    if same_host and low <= 0 <= high:  # else a name shared by hosts, or a shifted clock
        return 0
    offset = int(np.median(theirs[:, 1] - ours[:, 1]))
    return min(max(offset, low), high) if low <= high else offset


def _spans(trace: RankTrace, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Starts and ends, int64 [n, 2]."""
    return np.stack([trace.start[rows], trace.end[rows]], axis=1)
