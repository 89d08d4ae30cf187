"""The best way to fuse and cut gradients on a line of stages, exactly.

Knows stages that serve in order (:class:`dpro.search.pipeline.Line`) and nothing of graphs. What is best follows from
states that no other beats: whoever finds every stage free no later ends no later, so of two ways to send the same
gradients one whose state is nowhere earlier can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dpro.search.pipeline import IDLE, Line, State

#: (first gradient, one after the last, bytes of a part at most), in order.
Runs = tuple[tuple[int, int, int], ...]


def best_runs(
    line: Line,
    ready_ns: Sequence[int],
    bounds: Callable[[int, int], Sequence[int]],
    sizes: Callable[[int, int, int], Sequence[int]],
) -> tuple[Runs, int]:
    """Runs of gradients whose last part is back first, and when that is, ns.

    Args:
        ready_ns: when each gradient is ready, never earlier than the one before.
        bounds: what parts of gradients [first, end) may be at most, bytes.
        sizes: bytes of the parts of gradients [first, end) under a bound.
    """
    n = len(ready_ns)
    fronts: list[dict[State, Runs]] = [{IDLE: ()}]
    for end in range(1, n + 1):
        found: dict[State, Runs] = {}
        for first in range(end):
            for bound in bounds(first, end):
                parts = sizes(first, end, bound)
                for state, before in fronts[first].items():
                    after = line.run(state, ready_ns[end - 1], parts)
                    if after not in found:
                        found[after] = (*before, (first, end, bound))
        fronts.append(_undominated(found))
    state, runs = min(fronts[n].items(), key=lambda item: item[0][-1])
    return runs, state[-1]


def _undominated(found: dict[State, Runs]) -> dict[State, Runs]:
    kept: dict[State, Runs] = {}
    rows = np.empty((0, len(IDLE)), dtype=np.int64)
    for state in sorted(found):  # no later one is better than an earlier one everywhere
        if not (rows <= np.array(state)).all(axis=1).any():
            kept[state] = found[state]
            rows = np.vstack([rows, state])
    return kept
