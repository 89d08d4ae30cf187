"""A first, honest clock alignment: ranks leave a collective together.

Takes the ends of collectives only, never their starts (starts differ by arrival wait, up to tens of
milliseconds; ends by microseconds). Constant offsets, no drift, no confidence interval: the median
over the collectives that every rank has. Exact when ends are simultaneous; else as good as the
spread it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro.trace.model import EventKind, RankTrace


@dataclass(frozen=True)
class EndsAlignment:
    """``offsets_ns[i]`` is to be added to every time of ``traces[i]``; that of the first is 0."""

    offsets_ns: list[int]
    #: median absolute deviation of the end differences left over, per trace, ns
    spread_ns: list[int]
    #: collectives used per trace (0: nothing in common, offset 0 assumed)
    used: list[int]


def align_on_ends(traces: list[RankTrace]) -> EndsAlignment:
    """Offsets that bring the ends of collectives together, relative to the first trace."""
    offsets, spreads, used = [0], [0], [0]
    reference = _ends(traces[0])
    for trace in traces[1:]:
        mine = _ends(trace)
        common = [key for key in reference if key in mine]
        used.append(len(common))
        if not common:
            offsets.append(0)
            spreads.append(0)
            continue
        difference = np.asarray([reference[key] - mine[key] for key in common], dtype=np.int64)
        offset = int(np.median(difference))
        offsets.append(offset)
        spreads.append(int(np.median(np.abs(difference - offset))))
    used[0] = max(used)
    return EndsAlignment(offsets, spreads, used)


def _ends(trace: RankTrace) -> dict[tuple[str, str, int, int], int]:
    """End of each collective by (group, name, step, place in the step)."""
    seen: dict[tuple[str, str, int], int] = {}
    out = {}
    for row in np.flatnonzero(trace.kind == EventKind.COLLECTIVE).tolist():
        facts = trace.collectives[row]
        group, name, step = facts.group, facts.name, int(trace.step[row])
        place = seen.get((group, name, step), 0)
        seen[group, name, step] = place + 1
        out[group, name, step, place] = int(trace.end[row])
    return out
