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
from statistics import median

import numpy as np

from dpro.clock.identity import CLOCK_ID
from dpro.graph.ddp import CHANNEL
from dpro.graph.draft import DraftBucket, DraftOp, Local
from dpro.graph.graph import OpKind
from dpro.trace import horovod_wire
from dpro.trace.horovod import GROUP, SUBMIT, WAIT, bounds, collective_row, spans
from dpro.trace.model import Collective, EventKind, RankTrace, TraceBuilder


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

    Ranks hand in gradients in orders of their own, so that what they make of their wires may differ. In a step in which
    it does, all are told by one of them, a timeline if there is one, else whoever tells of most gradients: which went
    together, and when, where a rank did not see the same number of bytes itself (:class:`_Teacher`).
    """
    if not all(map(is_horovod, traces)):
        return traces
    members = max(len(traces), *(t.meta.world_size for t in traces))  # of a large job a few traces may be given
    wires = iter(horovod_wire.together([t for t in traces if not _rows(t)], members))
    seen = [t if _rows(t) else next(wires) for t in traces]
    if not any(map(_rows, seen)):
        return traces
    if all(_contents(trace) == _contents(seen[0]) for trace in seen):
        return seen
    timelines = [i for i, trace in enumerate(traces) if _rows(trace)]
    by_step = [_by_step(trace) for trace in seen]

    def coverage(i: int, step: int) -> int:
        return sum(len(seen[i].collectives[row].tensors) for row in by_step[i][step])

    chosen = [
        max(timelines or range(len(seen)), key=lambda i: coverage(i, step)) for step in range(min(map(len, by_step)))
    ]
    out = []
    for i, trace in enumerate(traces):
        if i in timelines:
            out.append(trace)
            continue
        builder, number = TraceBuilder(trace.meta), 0
        teachers = {j: _Teacher(seen[j], by_step[j], seen[i], by_step[i]) for j in set(chosen)}
        for step, j in enumerate(chosen):
            for facts, start, end, nbytes in teachers[j].tell(step):
                facts = facts if timelines else replace(facts, sequence=number)
                collective_row(builder, facts, start, end, nbytes)
                number += 1
        out.append(trace.joined(builder.freeze([])))
        handed_in = len(spans(trace, SUBMIT))
        missed = sum(coverage(j, step) < handed_in for step, j in enumerate(chosen))
        if missed and not timelines:
            out[-1].warnings.append(horovod_wire.untold(missed))
    return out


class _Teacher:
    """Tells a pupil what the responses of a step were, with the pupil's own times where both saw as many bytes each.

    Else the teacher's times are moved to the pupil's clock: by how far apart the ends are that both saw, or by what
    must be (:func:`~dpro.trace.horovod.bounds`). Nothing is reduced before it was handed in, and the main thread, which
    spins while it waits, goes on within microseconds of a response's end.
    """

    def __init__(self, teacher: RankTrace, told: list[list[int]], pupil: RankTrace, own: list[list[int]]) -> None:
        self._teacher, self._told, self._pupil, self._own = teacher, told, pupil, own
        numbers = {tensor.name: i for i, tensor in enumerate(pupil.tensors)}
        self._members = {
            row: tuple(
                numbers[n] for t in teacher.collectives[row].tensors if (n := teacher.tensors[t].name) in numbers
            )
            for row in _rows(teacher)
        }
        apart = [
            int(pupil.end[mine]) - int(teacher.end[row])
            for step in range(min(len(told), len(own)))
            if self._alike(step)
            for row, mine in zip(told[step], own[step], strict=True)
        ]
        self._offset = round(median(apart)) if apart else self._offset_by_cause()

    def tell(self, step: int) -> list[tuple[Collective, int, int, int]]:
        """Facts, start, end and bytes of every response."""
        rows = self._told[step]
        own = self._own[step] if step < len(self._own) and self._alike(step) else []
        out = []
        for place, row in enumerate(rows):
            facts = replace(self._teacher.collectives[row], tensors=self._members[row])
            start, end = int(self._teacher.start[row]) + self._offset, int(self._teacher.end[row]) + self._offset
            if own:
                start, end = int(self._pupil.start[own[place]]), int(self._pupil.end[own[place]])
            out.append((facts, start, end, int(self._teacher.nbytes[row])))
        return out

    def _alike(self, step: int) -> bool:
        told, own = self._teacher.nbytes[self._told[step]], self._pupil.nbytes[self._own[step]]
        return len(told) == len(own) > 0 and bool((told == own).all())

    def _offset_by_cause(self) -> int:
        teacher, pupil, rows = self._teacher, self._pupil, _rows(self._teacher)
        spans = [(int(teacher.start[row]), int(teacher.end[row])) for row in rows]
        low, high = bounds(pupil, spans, [list(self._members[row]) for row in rows])
        clock = pupil.meta.extra.get(CLOCK_ID) or pupil.meta.host
        same = bool(clock) and clock == (teacher.meta.extra.get(CLOCK_ID) or teacher.meta.host)
        return 0 if same and low <= 0 <= high else high


def _contents(trace: RankTrace) -> list[set[str]]:
    """Names of the gradients in every response."""
    return [{trace.tensors[t].name for t in trace.collectives[row].tensors} for row in _rows(trace)]


def _rows(trace: RankTrace) -> list[int]:
    return [row for row, facts in sorted(trace.collectives.items()) if facts.group == GROUP]


def _by_step(trace: RankTrace) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(trace.steps)]
    rows = _rows(trace)
    for row, step in zip(rows, trace.step_at(trace.start[rows]).tolist(), strict=True):
        if step >= 0:
            found[step].append(row)
    return found
