"""Clocks of workers that only a parameter server joins: what one of them pulled holds what the others had pushed.

A pull ends after every worker's push of that partition began, which bounds the difference of two workers' clocks from
both sides, as messages between them would. A band is as wide as a partition takes from worker to worker, so the
smallest decide. Knows stage rows (:mod:`dpro.trace.byteps`), no server and no link.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro.clock.pairs import Evidence
from dpro.trace.byteps import PULL, PUSH
from dpro.trace.model import RankTrace

#: step, gradient, partition, how many of them in that step before it
_Round = tuple[int, int, int, int]


def relayed(traces: Sequence[RankTrace], clock_of: Sequence[int]) -> dict[tuple[int, int], Evidence]:
    """Evidence by (first, second) clock, first < second; ``clock_of`` gives each trace's clock."""
    pushed = [_times(trace, PUSH, "start") for trace in traces]
    pulled = [_times(trace, PULL, "end") for trace in traces]
    low: dict[tuple[int, int], list[tuple[int, int]]] = {}
    high: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for a in range(len(traces)):
        for b in range(len(traces)):
            pair = clock_of[a], clock_of[b]
            if pair[0] < pair[1]:
                for key in pushed[a].keys() & pulled[b].keys():
                    end = pulled[b][key]
                    low.setdefault(pair, []).append((end, pushed[a][key] - end))
                for key in pushed[b].keys() & pulled[a].keys():
                    begin = pushed[b][key]
                    high.setdefault(pair, []).append((begin, pulled[a][key] - begin))
    return {
        pair: Evidence(low=np.array(sorted(low[pair]), np.int64), high=np.array(sorted(high[pair]), np.int64))
        for pair in low.keys() & high.keys()
    }


def _times(trace: RankTrace, name: str, column: str) -> dict[_Round, int]:
    if name not in trace.names:
        return {}
    rows = np.flatnonzero((trace.name == trace.names.index(name)) & (trace.step >= 0))
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    keys = zip(*(trace.columns[key][rows].tolist() for key in ("step", "tensor", "flow")), strict=True)
    out: dict[_Round, int] = {}
    count: dict[tuple[int, int, int], int] = {}
    for (step, tensor, part), at in zip(keys, trace.columns[column][rows].tolist(), strict=True):
        number = count[step, tensor, part] = count.get((step, tensor, part), -1) + 1
        out[step, tensor, part, number] = at
    return out
