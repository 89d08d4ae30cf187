"""Which regions to have compiled: dPRO's Theorem 1 and measured times propose, the replay decides."""

from __future__ import annotations

import time
from typing import Protocol

from dpro.graph.graph import Graph
from dpro.passes.op_fusion import Fusion, OpFusion
from dpro.passes.tensor_fusion import Grouping
from dpro.replay.engine import replay
from dpro.search.judge import Judge, Verdict


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
    """Regions that make the step short, changed from ``start`` on kind by kind as long as it gets shorter; and the step
    that they give, ns.

    A kind is taken in, in place of what shares a layer with it, or left out again; what saves more work comes first.
    One that saves work and makes the step longer (its gradients come too late) stays out. The graph is as before
    afterwards.

    Args:
        judge: of the graph without fusion.
        groups: what is synchronised together.
    """
    edit = OpFusion()
    kinds = list(edit.candidates(graph))
    chosen, best_ns = start, _step_ns(graph, judge, edit, start, groups)
    better = True
    while better:
        better = False
        for more in kinds:
            if judge.out_of_time():
                return chosen, best_ns
            tried = _changed(chosen, more)
            if not tried or edit.legal(graph, tried):
                step_ns = _step_ns(graph, judge, edit, tried, groups)
                if step_ns < best_ns:
                    chosen, best_ns, better = tried, step_ns, True
    return chosen, best_ns


def with_their_gradients(
    graph: Graph, judge: Judge, groups: Grouping, start: Fusion, step_ns: int
) -> tuple[Fusion, Verdict] | None:
    """dPRO's Theorem 3: one kind more (or less) than ``start``, and all gradients of each of its regions as one group.

    The shortest step of those shorter than ``step_ns``, None if there is none: what makes it longer with the groups
    there are may shorten it with these. Judged, not assumed.
    """
    edit, number = OpFusion(), {tensor.name: t for t, tensor in enumerate(graph.tensors)}
    place = {t: at for at, t in enumerate(judge.main)}
    cuts = judge.cuts_of(groups)
    found: tuple[Fusion, Verdict] | None = None
    for more in edit.candidates(graph):
        tried, kept = _changed(start, more), cuts
        for region in more:
            inside = [place[t] for t in map(number.get, region.tensors) if t in place]
            kept = tuple(c for c in kept if not inside or not min(inside) < c <= max(inside))
        if judge.out_of_time() or kept == cuts or not edit.legal(graph, tried):
            continue
        mark = edit.apply(graph, tried)
        try:
            there = judge.elsewhere()
            verdict = there.cut([kept])[0]
        finally:
            graph.undo(mark)
        judge.evaluations += there.evaluations
        if verdict.step_ns < step_ns:
            found, step_ns = (tried, verdict), verdict.step_ns
    return found


def _changed(chosen: Fusion, more: Fusion) -> Fusion:
    """Without ``more`` if all of it is chosen, else with it in place of what it shares layers with."""
    layers = {layer for region in more for layer in region.layers}
    others = tuple(region for region in chosen if layers.isdisjoint(region.layers))
    return others if set(more) <= set(chosen) else (*others, *more)


def _step_ns(graph: Graph, judge: Times, edit: OpFusion, fusion: Fusion, groups: Grouping) -> int:
    mark = edit.apply(graph, fusion)
    try:
        return judge.replayed_ns(groups)
    finally:
        graph.undo(mark)
