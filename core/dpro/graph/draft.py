"""Ops of one rank before they join the global graph.

A draft op keeps *when it was measured* beside what it is, because the one rule that fixes a gap
needs it: gap = measured start minus the latest measured end among its predecessors. Whatever
dependency is known thus takes its share of the waiting, and only what nothing explains stays gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dpro.graph.graph import OpKind


@dataclass(slots=True, eq=False)
class DraftOp:
    """One op; ``start``/``end`` are measured (rank clock, ns), ``duration`` is what it costs itself."""

    name: str
    kind: OpKind
    resource: str
    start: int
    end: int
    duration: int
    preds: list[DraftOp] = field(default_factory=list)
    nbytes: int = -1
    tensor: int = -1
    #: index of the COLLECTIVE event this op stands for, -1 none
    collective: int = -1
    #: part of the gap that lies before the graph begins, ns
    skipped: int = 0
    #: of those that could run, a resource takes the smallest
    priority: int = 0
    #: op before it on its resource, where that is a queue: waiting for it is neither a dependency nor a gap
    behind: DraftOp | None = None
    #: event rows (host calls) that start inside, first is the one that opened it
    rows: list[int] = field(default_factory=list)

    def after(self, *ops: DraftOp | None) -> None:
        """Add predecessors, each once."""
        for op in ops:
            if op is not None and op is not self and op not in self.preds:
                self.preds.append(op)

    def wait_until(self, instant: int) -> None:
        """What passed before ``instant`` was waiting for a predecessor, not work of this op."""
        if instant > self.start:
            began = min(instant, self.end)
            self.duration = min(self.duration, self.end - began)
            self.start = began

    def gap(self, origin: int) -> int:
        """ns between readiness and start as measured; ``origin`` is the start of the window."""
        ready = max((op.end for op in self.preds), default=origin)
        if self.behind is not None:
            ready = max(ready, self.behind.end)
        return max(0, self.start - ready - self.skipped)


@dataclass(eq=False)
class DraftBucket:
    """Gradients (tensor ids, ready order) that are synchronised together in one step."""

    members: list[int]
    launch: DraftOp
    #: first host op that runs only when the bucket is reduced
    first_in: DraftOp | None = None
    #: the collective, where it was seen
    run: DraftOp | None = None


@dataclass
class Local:
    """One rank's ops between two instants.

    ``first`` and ``last`` are zero-length ops at the start and the end of the window on the main
    host thread; every device op that was launched inside is there even if it ran past the end.
    Predecessors that are not in ``ops`` belong to the time before: they only explain gaps.
    """

    rank: int
    begin: int
    end: int
    main: str
    first: DraftOp
    last: DraftOp
    ops: list[DraftOp] = field(default_factory=list)
    #: host ops per thread in order, markers included
    chains: dict[str, list[DraftOp]] = field(default_factory=dict)
    #: ops that stand for collectives, in order of start
    collectives: list[DraftOp] = field(default_factory=list)
    #: tensor -> op of kind OUT, IN (of the last step in the window)
    outs: dict[int, DraftOp] = field(default_factory=dict)
    ins: dict[int, DraftOp] = field(default_factory=dict)
    #: in launch order, over all steps of the window
    buckets: list[DraftBucket] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
