"""Which collective of one rank is which of another: by group, step and order.

Ranks of one group run the same collectives in the same order, and a trace may lack some of them. Inside a
group and a step, what two ranks have in common is therefore their longest common subsequence. Knows nothing
of times: who arrived late is for others to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpro.trace.model import EventKind, RankTrace
from dpro.trace.steps import launch_times


def match_collectives(traces: Sequence[RankTrace]) -> npt.NDArray[np.int64]:
    """Event rows of the collectives that ranks share, int64 [collectives, traces]; -1: that rank has no part in it.

    In each group and step, all are matched with the rank that has the most (of equals: the first).
    Collectives outside every step, which a capture cuts anywhere, are left out.
    """
    found: dict[tuple[str, int], dict[int, list[int]]] = {}
    for index, trace in enumerate(traces):
        events = np.flatnonzero(trace.kind == EventKind.COLLECTIVE)
        # The step that launched it: where a host runs ahead, a kernel starts in any later one.
        for row, step in zip(events.tolist(), trace.step_at(launch_times(trace, events)).tolist(), strict=True):
            if step >= 0:
                found.setdefault((trace.collectives[row].group, step), {}).setdefault(index, []).append(row)
    out: list[npt.NDArray[np.int64]] = []
    for members in found.values():
        names = {i: [traces[i].collectives[row].name for row in rows] for i, rows in members.items()}
        first = max(members, key=lambda i: len(members[i]))
        joined: npt.NDArray[np.int64] = np.full((len(members[first]), len(traces)), -1, dtype=np.int64)
        joined[:, first] = members[first]
        for i, rows in members.items():
            for a, b in common_subsequence(names[first], names[i]) if i != first else ():
                joined[a, i] = rows[b]
        out.append(joined[(joined >= 0).sum(axis=1) > 1])
    return np.concatenate(out) if out else np.empty((0, len(traces)), dtype=np.int64)


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence; of equal items the earliest are taken.

    Row i of the dynamic programme is one integer whose bit j is 0 where item j of ``b`` makes the
    subsequence of ``a[:i]`` and ``b`` longer (Hyyrö, "Bit-parallel LCS-length computation revisited",
    2004): len(a) operations on len(b) bits, whatever the items are.
    """
    if a == b:
        return [(i, i) for i in range(len(a))]
    where: dict[str, int] = {}
    for j, item in enumerate(b):
        where[item] = where.get(item, 0) | 1 << j
    full = (1 << len(b)) - 1
    rows = [full]
    for item in a:
        row, hit = rows[-1], rows[-1] & where.get(item, 0)
        rows.append(((row + hit) | (row - hit)) & full)
    pairs = []
    i, j = len(a), len(b)
    while i and j:
        if rows[i] >> (j - 1) & 1:
            j -= 1
        else:
            i -= 1
            if rows[i] >> (j - 1) & 1:
                j -= 1
                pairs.append((i, j))
    return pairs[::-1]
