"""Which regions to have compiled: dPRO's Theorem 1 and measured times propose, the replay decides."""

from __future__ import annotations

import time
from typing import Protocol

from dpro.graph.graph import Graph
from dpro.passes.op_fusion import Fusion, OpFusion
from dpro.passes.tensor_fusion import Grouping
from dpro.replay.engine import replay


class Times(Protocol):
    """Says how long a step is; :class:`dpro.search.judge.Judge` does."""

    def out_of_time(self) -> bool:
        """Whether the time is up."""

    def replayed_ns(self, grouping: Grouping) -> int:
        """Of the graph as it is now, with ``grouping`` synchronised together."""


class Unsynchronised:
    """:class:`Times` of a job in which nothing is synchronised, until ``deadline_s`` (of ``time.monotonic()``)."""

    def __init__(self, graph: Graph, deadline_s: float) -> None:
        self._graph, self._deadline_s = graph, deadline_s
        self.evaluations = 0

    def out_of_time(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def replayed_ns(self, grouping: Grouping) -> int:
        self.evaluations += 1
        return replay(self._graph).makespan_ns


def best_fusion(graph: Graph, judge: Times, groups: Grouping, start: Fusion = ()) -> tuple[Fusion, int]:
    """``start`` and further regions, kind by kind as long as the step gets shorter; and the step that they give, ns.

    Of runs that share layers the one that saves more work comes first. A kind that saves work and makes the step longer
    (its gradients come too late) is left out. The graph is as before afterwards.

    Args:
        judge: of the graph without fusion.
        groups: what is synchronised together.
    """
    edit = OpFusion()
    chosen, best_ns = start, _step_ns(graph, judge, edit, start, groups)
    for more in edit.candidates(graph):
        if judge.out_of_time():
            break
        tried = (*chosen, *(region for region in more if region not in chosen))
        if len(tried) > len(chosen) and edit.legal(graph, tried):
            step_ns = _step_ns(graph, judge, edit, tried, groups)
            if step_ns < best_ns:
                chosen, best_ns = tried, step_ns
    return chosen, best_ns


def _step_ns(graph: Graph, judge: Times, edit: OpFusion, fusion: Fusion, groups: Grouping) -> int:
    mark = edit.apply(graph, fusion)
    try:
        return judge.replayed_ns(groups)
    finally:
        graph.undo(mark)
