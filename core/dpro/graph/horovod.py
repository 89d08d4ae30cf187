"""What Horovod does inside a step, read off a capture's rows.

A gradient is handed in (``horovod::submit``) right after it is accumulated; Horovod's background thread
takes what all ranks have handed in, once a cycle, and reduces it as one response after another; the main
thread waits for gradient after gradient (``horovod::wait``) before the optimizer goes on. A response thus
starts when its last member is there on the last rank and the one before it is through.

What went into a response is told by the coordinator's timeline, if it keeps one, or by the bytes on the wire. As
responses run in the same order everywhere, :func:`with_responses` can tell a rank that sees neither.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import numpy as np

from dpro.clock.identity import CLOCK_ID
from dpro.graph.ddp import CHANNEL
from dpro.graph.draft import DraftBucket, DraftOp, Local
from dpro.graph.graph import OpKind
from dpro.trace import horovod_wire
from dpro.trace.horovod import GROUP, SUBMIT, WAIT, bounds, collective_row
from dpro.trace.model import EventKind, RankTrace, TraceBuilder


def is_horovod(trace: RankTrace) -> bool:
    """Whether the trace shows gradients handed in to Horovod."""
    return SUBMIT in trace.names


def add_gradients(trace: RankTrace, local: Local) -> None:
    """Put OUT and IN markers of the gradients into the main chain (their responses come later).

    An OUT is where the op ends in which the gradient was handed in, an IN where the wait for it ended; members
    of one group share theirs. All are zero-length: handing in costs the same whatever goes together.
    """
    chain = local.chains[local.main]
    starts = [op.start for op in chain]
    placed: list[tuple[int, int, DraftOp]] = []  # (place in chain, order, marker)
    local.outs.clear()
    local.ins.clear()
    shared: dict[tuple[OpKind, int, int], DraftOp] = {}
    for order, (name, tensor, start, end) in enumerate(_spans(trace, local)):
        is_out = name == SUBMIT
        kind = OpKind.OUT if is_out else OpKind.IN
        # a wait has no op inside, but clocks differ by microseconds: its middle is clear of what is around
        at = bisect_right(starts, end if is_out else (start + end) // 2)
        instant = end
        if is_out and at and chain[at - 1].end > end:
            instant = chain[at - 1].end
        if at < len(chain):
            instant = min(instant, chain[at].start)
        key = (kind, start, end)
        if key not in shared:
            shared[key] = DraftOp(_NAMES[kind], kind, local.main, instant, instant, 0, tensor=tensor)
            placed.append((at, order, shared[key]))
        (local.outs if is_out else local.ins)[tensor] = shared[key]
    for at, _, marker in sorted(placed, key=lambda p: p[:2], reverse=True):
        chain.insert(at, marker)


_NAMES = {OpKind.OUT: "gradient handed in", OpKind.IN: "gradient reduced"}


def add_responses(trace: RankTrace, local: Local) -> None:
    """Ops for the responses, each after the last of its members' OUT and before the first of their IN."""
    mine = (trace.kind == EventKind.COLLECTIVE) & (trace.start >= local.begin) & (trace.start < local.end)
    place = {id(op): i for i, op in enumerate(local.chains[local.main])}
    before: DraftOp | None = None
    for row in np.flatnonzero(mine).tolist():
        facts = trace.collectives[row]
        if facts.group != GROUP:
            continue
        members = [t for t in facts.tensors if t in local.outs and t in local.ins]
        if not members:
            continue  # not of gradients: what waited for it is a gap of its own
        launch = max((local.outs[t] for t in members), key=lambda op: place[id(op)])
        first_in = min((local.ins[t] for t in members), key=lambda op: place[id(op)])
        start, end = max(int(trace.start[row]), launch.end), int(trace.end[row])
        end = max(min(end, first_in.start), launch.end)
        start = min(start, end)
        run = DraftOp(
            facts.name, OpKind.COLLECTIVE, CHANNEL, start, end, end - start, [launch], int(trace.nbytes[row]),
            collective=row,
        )  # fmt: skip
        if before is not None and before.end > run.start:
            run.start = min(before.end, run.end)
            run.duration = run.end - run.start
        before = run
        first_in.after(run)
        for waiting in (local.ins[t] for t in members):
            if not waiting.resource:  # else the thread's order implies it
                waiting.after(run)
        local.ops.append(run)
        ready = sorted(members, key=lambda t: place[id(local.outs[t])])
        local.buckets.append(DraftBucket(ready, launch, first_in, run))


def _spans(trace: RankTrace, local: Local) -> list[tuple[str, int, int, int]]:
    """(name, gradient, start, end) of the window's submits and waits, in the order in which they ended."""
    wanted = [i for i, name in enumerate(trace.names) if name in (SUBMIT, WAIT)]
    inside = np.isin(trace.name, wanted) & (trace.start >= local.begin) & (trace.start < local.end)
    rows = np.flatnonzero(inside & (trace.kind == EventKind.ANNOTATION) & (trace.tensor >= 0))
    columns = [trace.columns[key][rows].tolist() for key in ("name", "tensor", "start", "end")]
    found = [(trace.names[name], *rest) for name, *rest in zip(*columns, strict=True)]
    return sorted(found, key=lambda span: (span[3], span[2]))


def with_responses(traces: list[RankTrace]) -> list[RankTrace]:
    """Traces in which every rank has its COLLECTIVE rows: from its timeline, else from its wire.

    A rank that has neither, or sees other responses than the first that has, is told by that one: its rows, moved
    to the rank's clock by what must be (:func:`~dpro.trace.horovod.bounds`). Nothing is reduced before it was
    handed in, and the main thread, which spins while it waits, goes on within microseconds of a response's end.
    """
    if not all(map(is_horovod, traces)):
        return traces
    members = max(len(traces), *(t.meta.world_size for t in traces))  # of a large job a few traces may be given
    seen = [t if _rows(t) else horovod_wire.with_responses(t, members) for t in traces]
    leader = next((t for t in seen if _rows(t)), None)
    if leader is None:
        return traces
    known = _contents(leader)
    return [new if _contents(new) == known else _told(old, leader) for new, old in zip(seen, traces, strict=True)]


def _contents(trace: RankTrace) -> list[set[str]]:
    """Names of the gradients in every response."""
    return [{trace.tensors[t].name for t in trace.collectives[row].tensors} for row in _rows(trace)]


def _rows(trace: RankTrace) -> list[int]:
    return [row for row, facts in sorted(trace.collectives.items()) if facts.group == GROUP]


def _told(trace: RankTrace, leader: RankTrace) -> RankTrace:
    numbers = {tensor.name: i for i, tensor in enumerate(trace.tensors)}
    rows = _rows(leader)
    facts = [leader.collectives[row] for row in rows]
    members = [[numbers[leader.tensors[t].name] for t in f.tensors if leader.tensors[t].name in numbers] for f in facts]
    spans = [(int(leader.start[row]), int(leader.end[row])) for row in rows]
    low, high = bounds(trace, spans, members)
    clock = trace.meta.extra.get(CLOCK_ID) or trace.meta.host
    same = bool(clock) and clock == (leader.meta.extra.get(CLOCK_ID) or leader.meta.host)
    offset = 0 if same and low <= 0 <= high else high
    builder = TraceBuilder(trace.meta)
    for row, fact, tensors, (start, end) in zip(rows, facts, members, spans, strict=True):
        told = replace(fact, tensors=tuple(tensors))
        collective_row(builder, told, start + offset, end + offset, int(leader.nbytes[row]))
    return trace.joined(builder.freeze([]))
