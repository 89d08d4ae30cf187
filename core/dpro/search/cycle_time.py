"""Which cycle time Horovod's thread should have, with its own fusion or with the best groups; the replay decides."""

from __future__ import annotations

from dataclasses import dataclass

from dpro.graph.graph import Graph
from dpro.passes.cycle_time import CycleTime, delayed
from dpro.passes.tensor_fusion import Grouping, captured, ready_order
from dpro.search.judge import Judge


@dataclass(frozen=True)
class Cycle:
    """A cycle time, the groups that go with it (None: Horovod's own fusion), and the step it gives."""

    cycle_ns: int
    groups: Grouping | None
    step_ns: int


def best_cycles(graph: Graph, judge: Judge, groups: Grouping | None) -> list[Cycle]:
    """The best cycle time without groups and the best with ``groups`` (None: without alone), best first.

    ``judge`` knows the graph under the captured cycle time. What Horovod's own fusion makes of single gradients is
    told by a rule, under the captured cycle and under another alike: the captured step is scaled by the ratio. These
    are a dozen replays, made even when the time is up.
    """
    singles = tuple((t,) for t in ready_order(graph))
    own = judge.replayed_ns(captured(graph)) / judge.step_ns(singles)
    edit, model, captured_ns = CycleTime(), graph.info["sync"], graph.info.get("cycle_ns", 0)
    best: dict[bool, Cycle] = {}
    for cycle_ns in edit.candidates(graph):
        mark = edit.apply(graph, cycle_ns)
        try:
            graph.info["sync"] = delayed(model, graph, cycle_ns)
            graph.info["cycle_ns"] = cycle_ns
            there = judge.elsewhere()
            found = [Cycle(cycle_ns, None, round(there.step_ns(singles) * own))]
            if groups is not None:
                found.append(Cycle(cycle_ns, groups, there.step_ns(groups)))
            judge.evaluations += there.evaluations
        finally:
            graph.undo(mark)
            graph.info.update(sync=model, cycle_ns=captured_ns)
        for cycle in found:
            former = best.get(cycle.groups is None)
            if former is None or cycle.step_ns < former.step_ns:
                best[cycle.groups is None] = cycle
    return sorted(best.values(), key=lambda cycle: cycle.step_ns)
