"""The search for how much to have on its way at once, and in what parts (ByteScheduler, SOSP 2019); the replay judges.

ByteScheduler looks for both by Bayesian optimisation over steps that it runs. Here a grid is replayed, then a finer one
around its best. Small parts let pushes and pulls begin side by side sooner; each costs hosts something that a capture
does not tell. So two are proposed, and the clock decides: the best one should that be nothing, and the fewest parts of
those that are as good should it be something.

Deterministic; stops early, with what it has, when its time is up; leaves the graph as it found it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO, Ps
from dpro.passes.in_flight import Flow, InFlight, pieces
from dpro.passes.tensor_fusion import ready_order
from dpro.passes.tensor_partition import captured, uniform
from dpro.plan import Plan
from dpro.replay.engine import replay
from dpro.trace.byteps import DEFAULT_PARTITION_BYTES, aligned

LEAST_BYTES = 128 << 10
#: Parts on their way at once, on the grid and around its best.
_PARTS = (2, 3, 4, 6, 8, 12, 16)
#: Sizes of a part, on the grid, are so far apart; around its best this far.
_SPACING, _FINER = 2.0, 2**0.5
#: Parts of all gradients in one replay: more take seconds to make.
_MOST_PARTS = 1_000
#: Flows whose steps differ by less from that of the best are as good.
_AS_GOOD = 0.02
_MIB = 2**20


@dataclass(frozen=True)
class FlowVerdict:
    """A flow, the replayed step under it, and how many parts it makes."""

    flow: Flow
    step_ns: int
    parts: int

    @property
    def name(self) -> str:
        part, most = (n / _MIB for n in self.flow)
        return f"{most:.3g} MiB on their way at once, in {self.parts} parts of {part:.3g} MiB"

    def plan(self, graph: Graph, fingerprint: dict[str, str], baseline_ns: int) -> Plan:
        """The plan that has it in force, on a job with ``baseline_ns`` without."""
        pushed = {tensor for tensor, _ in captured(graph)}
        return Plan(
            fingerprint=dict(fingerprint),
            partitions={graph.tensors[t].name: n for t, n in uniform(graph, self.flow.part_bytes)},
            in_flight_bytes=self.flow.in_flight_bytes,
            push_order=[graph.tensors[t].name for t in ready_order(graph) if t in pushed],
            predicted_ms=self.step_ns / 1e6,
            baseline_ms=baseline_ns / 1e6,
        )


@dataclass
class _Search:
    graph: Graph
    deadline_s: float
    seen: dict[Flow, FlowVerdict] = field(default_factory=dict)

    def judge(self, flow: Flow) -> None:
        edit = InFlight()
        if flow in self.seen or time.monotonic() >= self.deadline_s or not edit.legal(self.graph, flow):
            return
        count = len(pieces(self.graph, flow.part_bytes))
        if count > _MOST_PARTS:
            return
        mark = edit.apply(self.graph, flow)
        try:
            self.seen[flow] = FlowVerdict(flow, replay(self.graph).makespan_ns, count)
        finally:
            self.graph.undo(mark)

    def best(self) -> FlowVerdict | None:
        return min(self.seen.values(), key=lambda v: (v.step_ns, v.parts, v.flow), default=None)


def best_flows(graph: Graph, deadline_s: float, more: int = 0) -> tuple[list[FlowVerdict], int]:
    """The flow with the fewest parts of those that are as good as the best, the best if it is another one, and up to
    ``more`` of the next best; and how many were replayed.

    A part is no larger than the job's own bound, by which BytePS would cut it.
    """
    known: Ps = graph.info[INFO]
    largest = max((graph.tensors[tensor].nbytes for tensor, _ in captured(graph)), default=0)
    most = min(aligned(largest), known.job_bytes or DEFAULT_PARTITION_BYTES)
    search = _Search(graph, deadline_s)
    count = max(1, int(np.log(max(1.0, most / LEAST_BYTES)) / np.log(_SPACING)) + 1)
    for size in (aligned(round(most / _SPACING**k)) for k in range(count)):
        for parts in _PARTS:
            search.judge(Flow(size, parts * size))
    best = search.best()
    if best is None:
        return [], 0
    part, at_once = best.flow
    for size in (aligned(round(part * factor)) for factor in (1 / _FINER, 1, _FINER)):
        for factor in (0.7, 0.85, 1, 1.2, 1.4):
            if size <= most:
                search.judge(Flow(size, max(size, aligned(round(at_once * factor)))))
    best = search.best()
    assert best is not None
    as_good = [v for v in search.seen.values() if v.step_ns <= best.step_ns * (1 + _AS_GOOD)]
    fewest = min(as_good, key=lambda v: (v.parts, v.step_ns, v.flow))
    next_best = sorted(search.seen.values(), key=lambda v: (v.step_ns, v.parts, v.flow))
    first = [fewest, *([best] if best != fewest else [])]
    return [*first, *[v for v in next_best if v not in first][:more]], len(search.seen)
