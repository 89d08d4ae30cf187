"""Where in a graph a rank's memory is taken and let go: the ops of each segment of its captured step.

Knows marks and times, and what :mod:`dpro.trace.memory` measured; not what a schedule makes of it (``replay``).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from dpro.graph.draft import DraftOp, Local
from dpro.graph.graph import OpKind
from dpro.trace.memory import MEMORY, MemoryProfile, load, marks_of
from dpro.trace.model import RankTrace


@dataclass(frozen=True)
class RankMemory:
    """``host[s]`` and ``device[s]`` are the ops of segment ``s``, in the order in which the host had them run."""

    profile: MemoryProfile
    host: tuple[tuple[int, ...], ...]
    device: tuple[tuple[int, ...], ...]

    def first(self, segment: int, device: bool = False) -> int:
        """The first op of it, or where it has none of a later one; -1: there is none."""
        parts = (self.device if device else self.host)[segment:]
        return next((ops[0] for ops in parts if ops), -1)


def place(trace: RankTrace, local: Local, ids: dict[int, int]) -> RankMemory | None:
    """The segments of the step in ``local``; None where nothing was measured, or the step is unlike the measured one.

    An op in whose midst a mark lies belongs behind it: autograd calls a node's hooks when its own event has begun.

    Args:
        ids: id(draft) -> op.
    """
    measured = load(trace.meta.extra.get(MEMORY))
    if measured is None:
        return None
    marks = [at for at, _ in marks_of(trace, local.begin, local.end)]
    if len(marks) + 1 != measured.segments:
        local.warnings.append("memory was measured in a step of other layers than the one that is replayed")
        return None
    host: list[list[tuple[int, int]]] = [[] for _ in range(measured.segments)]
    device: list[list[tuple[int, int]]] = [[] for _ in range(measured.segments)]
    threads = [ops for name, ops in local.chains.items() if name == local.main or _computes(ops)]
    chained = {id(op) for ops in threads for op in ops}
    for op in local.ops:
        if id(op) not in ids:
            continue
        if id(op) in chained:
            host[bisect_left(marks, max(op.end, op.start + 1))].append((op.start, ids[id(op)]))
        elif "/stream/" in op.resource and op.rows:
            launched = int(trace.start[op.rows[0]])
            device[bisect_left(marks, launched)].append((launched, ids[id(op)]))
    return RankMemory(
        measured,
        tuple(tuple(op for _, op in sorted(ops, key=lambda item: item[0])) for ops in host),
        tuple(tuple(op for _, op in sorted(ops, key=lambda item: item[0])) for ops in device),
    )


def _computes(ops: list[DraftOp]) -> bool:
    return any(op.kind == OpKind.BACKWARD for op in ops)
