"""Gradient accumulation: each rank cuts its batch into micro-batches and synchronises after the last one only.

Knows the ops of the forward and backward pass (``graph.info["memory"]``) and what a pass over a part of the batch was
measured to take (``graph.info["micro"]``); what it is worth in bytes is for :mod:`dpro.replay.memory`. The captured
pass stands for the last micro-batch, one op before it for the others: nobody waits for anything in them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpro.adapter import Knob
from dpro.graph.graph import Graph, OpKind
from dpro.graph.memory import RankMemory
from dpro.graph.threads import COPY_BACK, COPY_IN
from dpro.replay.memory import MICRO_BATCHES
from dpro.trace.memory import MEMORY, MICRO

#: No gradient's work, and not of a batch's size.
_SYNCHRONISES = (COPY_IN, COPY_BACK)


class Accumulate:
    """A candidate is the number of micro-batches, 2 or more."""

    name = "accumulate"
    knobs = frozenset({Knob.ACCUMULATE})

    def candidates(self, graph: Graph) -> Iterator[int]:
        """Those that were timed on every rank, fewest first."""
        timed = [set(times) for times in graph.info.get(MICRO, {}).values()]
        yield from sorted(k for k in set.intersection(*timed) if self.legal(graph, k)) if timed else []

    def legal(self, graph: Graph, candidate: int) -> bool:
        """Whether it was timed on every rank, and the passes of every rank are known."""
        timed, memories = graph.info.get(MICRO, {}), graph.info.get(MEMORY, {})
        return (
            candidate > 1
            and bool(memories)
            and all(candidate in timed.get(rank, {}) and 1 in timed[rank] for rank in memories)
            and all(_passes(graph, memory) for memory in memories.values())
        )

    def apply(self, graph: Graph, candidate: int) -> int:
        """Shorten the captured passes and put the others before them; returns the mark that undoes it."""
        mark = graph.mark()
        pairs = graph.edges()
        for rank, memory in graph.info[MEMORY].items():
            timed: dict[int, int] = graph.info[MICRO][rank]
            ops = _passes(graph, memory)
            share = timed[candidate] / timed[1]
            duration, gap = graph.column("duration")[ops], graph.column("gap")[ops]
            others_ns = round((candidate - 1) * share * int(duration.sum() + gap.sum()))
            graph.set_many(np.array(ops), "duration", duration * share)
            graph.set_many(np.array(ops), "gap", gap * share)
            first = ops[0]
            before = graph.add_op(
                f"{MICRO_BATCHES}{candidate}", OpKind.FORWARD, resource=int(graph.column("resource")[first]),
                duration=others_ns, rank=rank, after=pairs[pairs[:, 1] == first, 0].tolist(),
            )  # fmt: skip
            graph.add_edge(before, first)
        return mark

    def cost(self, graph: Graph, candidate: int) -> float:
        """What it adds to the work of all ranks, ns."""
        total = 0.0
        for rank, memory in graph.info[MEMORY].items():
            timed, ops = graph.info[MICRO][rank], _passes(graph, memory)
            whole = int(graph.column("duration")[ops].sum() + graph.column("gap")[ops].sum())
            total += (candidate * timed[candidate] / timed[1] - 1) * whole
        return total


def _passes(graph: Graph, memory: RankMemory) -> list[int]:
    """The rank's ops, on the host, from the first unit's forward pass to the end of the backward pass."""
    begin = min((unit.forward for unit in memory.profile.units), default=memory.profile.segments)
    kinds = graph.column("kind")
    found = [op for ops in memory.host[begin:] for op in ops if kinds[op] in (OpKind.FORWARD, OpKind.BACKWARD)]
    backward = [at for at, op in enumerate(found) if kinds[op] == OpKind.BACKWARD]
    return [op for op in found[: backward[-1] + 1] if graph.name_of(op) not in _SYNCHRONISES] if backward else []
