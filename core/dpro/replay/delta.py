"""Delta replay: after a few edits only what can change is run again.

Knows a graph and the place in its journal where its schedule is known (dPRO calls the like "partial replay", section
4.3; a partial replay leaves the rest out, this one keeps it). The answer is always that of :func:`~dpro.replay.engine.
replay`: where the native core cannot tell (``delta.cpp`` says where), or has as much to look at as a whole replay, that
is what runs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro import _native
from dpro.graph.graph import Graph
from dpro.replay.engine import Replay, native_arrays, replay

#: With more than this share of the ops to look at, a whole replay is as fast.
_LIMIT_SHARE = 0.25
_LEAST_LIMIT = 256
_COLUMNS = ("resource", "duration", "gap", "priority")


class DeltaReplay:
    """The schedule of ``graph`` as it is now, to which later edits are compared.

    Edits since then may be undone and others made, as long as none from before is undone.

    Raises:
        CycleError: some ops wait for themselves.
        ValueError: a negative duration or gap.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._mark = graph.mark()
        self._played = replay(graph)
        arrays = graph.arrays()
        self._resources = arrays.resources
        self._native = _native.Delta(*native_arrays(arrays), self._played.start, self._played.end, self._played.cause)
        #: op -> row of the base; -1 of dead ones
        self._row = np.full(len(graph.column("kind")), -1, dtype=np.int32)
        self._row[arrays.ids] = np.arange(len(arrays.ids), dtype=np.int32)
        self._rows = len(arrays.ids)
        self._limit = max(_LEAST_LIMIT, int(_LIMIT_SHARE * self._rows))
        #: replays that had to be whole ones
        self.whole = 0

    @property
    def looked_at(self) -> int:
        """Ops that the last delta replay had to look at."""
        return int(self._native.looked_at)

    def makespan_ns(self) -> int:
        """Of the graph as it is now; errors as :func:`~dpro.replay.engine.replay`."""
        if self._run() is None:
            self.whole += 1
            return replay(self._graph).makespan_ns
        return int(self._native.makespan)

    def replay(self) -> Replay:
        """All times of the graph as it is now, as :func:`~dpro.replay.engine.replay` gives them."""
        added = self._run()
        if added is None:
            self.whole += 1
            return replay(self._graph)
        ids = self._graph.arrays().ids
        ops = np.concatenate([np.flatnonzero(self._row >= 0), added])  # by row
        place = np.full(len(self._graph.column("kind")), -1, dtype=np.int32)
        place[ids] = np.arange(len(ids), dtype=np.int32)
        fresh = np.zeros(len(added), dtype=np.int64)
        start, end, cause = (
            np.concatenate([getattr(self._played, key), fresh]).astype(np.int64) for key in ("start", "end", "cause")
        )
        rows, started, ended, caused_by = self._native.times()
        start[rows] = started
        end[rows] = ended
        cause[rows] = caused_by
        here = np.flatnonzero(place[ops] >= 0)
        order = here[np.argsort(place[ops[here]])]
        caused = np.where(cause[order] >= 0, place[ops[cause[order]]], -1).astype(np.int32)
        return Replay(start[order], end[order], caused, int(self._native.makespan))

    def _run(self) -> npt.NDArray[np.int64] | None:
        """The new ops, in the order of their rows; None where a whole replay is to tell."""
        graph = self._graph
        changes = graph.changes(self._mark)
        if len(graph.resource_names) > self._resources:
            return None
        kinds = graph.column("alive")
        added = changes.first_op + np.flatnonzero(kinds[changes.first_op :])
        row = self._row
        if len(added):
            row = np.full(len(kinds), -1, dtype=np.int32)
            row[: len(self._row)] = self._row[: len(row)]
            row[added] = self._rows + np.arange(len(added), dtype=np.int32)
        changed = np.array(changes.changed, dtype=np.int64)
        given = np.concatenate([changed, added])
        src, dst = graph.edges_since(changes.first_edge)
        resource, duration, gap, priority = (graph.column(key)[given] for key in _COLUMNS)
        known = self._native.run(
            row[changed],
            resource,
            duration,
            gap,
            priority,
            row[np.array(changes.removed, dtype=np.int64)],
            row[src],
            row[dst],
            self._limit,
        )
        return added if known else None
