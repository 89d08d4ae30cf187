"""DDP's ``batched_grad_copy``: gradients enter their bucket together when it is complete, not one by one.

Knows the copy by its name in the trace. One copy and one division per bucket replace a scaled copy per
gradient: fewer calls, but the bytes are touched twice. What a call and a byte cost is fitted to the captured
copies, so the pass pays off where gradients are many and small.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpro.adapter import Knob
from dpro.cost.sync import fit
from dpro.graph.graph import Graph
from dpro.graph.threads import COPY_IN
from dpro.passes.tensor_fusion import Grouping, captured, ready_order

#: A copy of all gradients of a bucket, then a division of the bucket.
CALLS = 2


class BatchedCopy:
    """A candidate is the :data:`~dpro.passes.tensor_fusion.Grouping` whose buckets are filled at once."""

    name = "batched_copy"
    knobs = frozenset({Knob.BATCHED_COPY})

    def candidates(self, graph: Graph) -> Iterator[Grouping]:
        if self.legal(graph, captured(graph)):
            yield captured(graph)

    def legal(self, graph: Graph, candidate: Grouping) -> bool:
        """Whether every gradient has a copy to save, on every rank, and they take time there."""
        duration = graph.column("duration")
        ranks = copies_in(graph)
        return bool(candidate and ranks) and all(any(duration[op] > 0 for op in c.values()) for c in ranks)

    def apply(self, graph: Graph, candidate: Grouping) -> int:
        """Move each bucket's copies to its last gradient; returns the mark that undoes it."""
        mark = graph.mark()
        duration = graph.column("duration")
        for copies in copies_in(graph):
            nbytes = [graph.tensors[t].nbytes for t in copies]
            line = fit(nbytes, [int(duration[op]) for op in copies.values()])
            order = {t: i for i, t in enumerate(copies)}
            for group in candidate:
                last = max(group, key=order.__getitem__)
                together_ns = CALLS * line.time_ns(sum(graph.tensors[t].nbytes for t in group))
                for t in group:
                    graph.set(copies[t], "duration", together_ns if t == last else 0)
        return mark

    def cost(self, graph: Graph, candidate: Grouping) -> float:
        """What it adds to the host time of all ranks together, ns; negative where it saves."""
        duration = graph.column("duration")
        ops = [op for copies in copies_in(graph) for op in copies.values()]
        before = sum(int(duration[op]) for op in ops)
        mark = self.apply(graph, candidate)
        after = sum(int(graph.column("duration")[op]) for op in ops)
        graph.undo(mark)
        return float(after - before)


def copies_in(graph: Graph) -> list[dict[int, int]]:
    """Per rank, tensor -> its copy op, in ready order; [] if a gradient has none (or copies are batched already)."""
    order = ready_order(graph)
    copies = np.flatnonzero(graph.column("alive") & (graph.column("name") == graph.name(COPY_IN)))
    found: dict[int, list[int]] = {}
    for op, rank in zip(copies.tolist(), graph.column("rank")[copies].tolist(), strict=True):
        found.setdefault(rank, []).append(op)
    ranks = {r for r, _ in graph.out_op}
    if not order or set(found) != ranks or any(len(ops) != len(order) for ops in found.values()):
        return []
    return [dict(zip(order, found[r], strict=True)) for r in sorted(ranks)]
