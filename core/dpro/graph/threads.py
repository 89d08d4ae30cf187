"""Host threads: from nested profiler events to a chain of ops that do not overlap.

Every instant of a thread belongs to the innermost event that covers it. Those pieces are merged
again where they are cheap, but never across an instant that something else hangs on: a kernel
launch, a synchronisation, a collective being enqueued, a gradient becoming ready. Ranges that only
annotate (ProfilerStep, Optimizer.step) take no time of their own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.graph.draft import DraftOp
from dpro.graph.graph import OpKind
from dpro.trace.model import DEVICE_KINDS, EventKind, RankTrace
from dpro.trace.regions import LAYERS, load_layers, named

#: Framework ops that take at least this long stay ops of their own, so that what-ifs by name reach them.
_OWN_OP_NS = 20_000
BACKWARD_PREFIX = "autograd::engine::evaluate_function"
ACCUMULATE = BACKWARD_PREFIX + ": torch::autograd::AccumulateGrad"
COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
COPY_IN = "torch::distributed::reducer::mul_out"
ENQUEUE_PREFIX = "c10d::"

_HOST_KINDS = (
    EventKind.CPU_OP,
    EventKind.RUNTIME,
    EventKind.SYNC,
    EventKind.EVENT_RECORD,
    EventKind.STREAM_WAIT,
)


Ranges = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Cuts:
    """What splits a thread into ops."""

    rows: set[int]  # never merged with what is before, after or inside them
    whole: set[int]  # one op with everything inside
    names: set[str]  # ops of their own wherever they occur


@dataclass(slots=True)
class _Piece:
    start: int
    end: int
    owner: int  # innermost row
    label: int  # innermost framework op, else owner
    anchor: int  # innermost op that is one of its own, else outermost row
    top: int  # outermost row


def is_enqueue(name: str) -> bool:
    """Whether the op hands a collective to its process group (``c10d::allreduce_``)."""
    return name.startswith(ENQUEUE_PREFIX) and name.endswith("_") and not name.endswith("wait_")


def host_threads(trace: RankTrace, begin: int, end: int) -> dict[int, list[int]]:
    """Host rows that start in [begin, end) by thread (resource index), threads with work only.

    A thread that neither runs framework ops nor launches anything (a watchdog that polls events)
    is left out: nothing ever waits for it.
    """
    inside = np.isin(trace.kind, _HOST_KINDS) & (trace.start >= begin) & (trace.start < end)
    rows = np.flatnonzero(inside)
    device = np.isin(trace.kind, DEVICE_KINDS) & (trace.flow >= 0)
    launches = np.isin(trace.flow, trace.flow[device]) & (trace.kind == EventKind.RUNTIME)
    works = (trace.kind == EventKind.CPU_OP) | launches
    out: dict[int, list[int]] = {}
    for thread in np.unique(trace.resource[rows]).tolist():
        mine = rows[trace.resource[rows] == thread]
        if works[mine].any():
            out[thread] = mine.tolist()
    return out


def chain(trace: RankTrace, rows: list[int], cuts: Cuts, ranges: Ranges, resource: str) -> list[DraftOp]:
    """Ops of one thread in order, not yet joined by edges.

    Args:
        rows: event rows of the thread, sorted by start, longer first.
        ranges: of Optimizer.step on this thread, see :func:`update_ranges`.
    """
    overhead = trace.meta.event_overhead_ns
    base = rows[0]
    names = [trace.names[n] for n in trace.columns["name"][base : rows[-1] + 1].tolist()]
    out: list[DraftOp] = []
    begun: set[int] = set()  # rows already counted for overhead
    spans: list[list[_Piece]] = []
    pieces, absorbed = _pieces(trace, rows, cuts.whole, cuts.names)
    for piece in pieces:
        if spans and _joins(spans[-1][-1], piece, cuts):
            spans[-1].append(piece)
        else:
            spans.append([piece])
    layers = load_layers(trace.meta.extra.get(LAYERS))
    layer_of = trace.link[base : rows[-1] + 1].tolist() if layers else []
    for span in spans:
        # Ops that something hangs on are called by what they are, the others by what they belong to.
        called = span[0].label if span[0].owner in cuts.rows else span[0].anchor
        fresh = {p.owner for p in span} - begun
        begun.update(fresh)
        start, end = span[0].start, span[-1].end
        name = names[called - base]
        events = len(fresh) + sum(absorbed[row] for row in fresh)
        duration = max(0, end - start - round(overhead * events))
        kind = _kind(span[0].start, name, names[span[0].top - base], ranges)
        if layers and 0 <= layer_of[span[0].top - base] < len(layers) and not is_enqueue(name):
            name = named(layers[layer_of[span[0].top - base]], name, kind == OpKind.BACKWARD)
        out.append(DraftOp(name, kind, resource, start, end, duration, rows=[p.owner for p in span]))
    return out


def _joins(last: _Piece, piece: _Piece, cuts: Cuts) -> bool:
    """May the piece go on with the op that ``last`` is in?"""
    if piece.anchor != last.anchor or piece.start > last.end:
        return False
    return piece.owner == last.owner or not (piece.owner in cuts.rows or last.owner in cuts.rows)


def costly_names(trace: RankTrace) -> set[str]:
    """Names of framework ops whose own time is at least 20 µs on average, over the whole trace.

    By name and not by single event, so that every step falls into the same ops.
    """
    total: Counter[int] = Counter()
    count: Counter[int] = Counter()
    name_of = trace.columns["name"].tolist()
    for rows in host_threads(trace, int(trace.start.min()), int(trace.end.max()) + 1).values():
        for row, own_ns in zip(rows, _own_ns(trace, rows), strict=True):
            total[name_of[row]] += own_ns
        count.update(name_of[row] for row in rows)
    return {trace.names[name] for name, ns in total.items() if ns >= _OWN_OP_NS * count[name]}


def _own_ns(trace: RankTrace, rows: list[int]) -> list[int]:
    """For each row how much of its thread's time its pieces would have as their ``label``: sums need no pieces."""
    starts, ends = trace.start[rows].tolist(), trace.end[rows].tolist()
    framework = (trace.kind[rows] == EventKind.CPU_OP).tolist()
    own = [0] * len(rows)
    stack: list[tuple[int, int]] = []  # end, place of the label
    for place, (start, end, is_op) in enumerate(zip(starts, ends, framework, strict=True)):
        while stack and stack[-1][0] <= start:
            stack.pop()
        label = place
        if stack:
            end = min(end, stack[-1][0])
            if is_op:
                own[stack[-1][1]] -= end - start
            else:
                label = stack[-1][1]
        if label == place:
            own[place] += end - start
        if end > start:
            stack.append((end, label))
    return own


def _pieces(trace: RankTrace, rows: list[int], whole: set[int], own: set[str]) -> tuple[list[_Piece], Counter[int]]:
    """Exclusive pieces in time order, and how many events were absorbed by each whole row.

    A child that ends after its parent (rounding) is cut there.
    """
    starts, ends = trace.start[rows].tolist(), trace.end[rows].tolist()
    framework = (trace.kind[rows] == EventKind.CPU_OP).tolist()
    out: list[_Piece] = []
    absorbed: Counter[int] = Counter()
    own_ids = {i for i, name in enumerate(trace.names) if name in own}
    name_ids = trace.columns["name"][rows].tolist()
    stack: list[tuple[int, int, int, int]] = []  # row, end, label, anchor
    clock = 0

    def emit(until: int) -> None:
        nonlocal clock
        row, _, label, anchor = stack[-1]
        if until > clock:
            out.append(_Piece(clock, until, row, label, anchor, stack[0][0]))
            clock = until

    for row, start, end, is_op, name in zip(rows, starts, ends, framework, name_ids, strict=True):
        while stack and stack[-1][1] <= start:
            emit(stack[-1][1])
            stack.pop()
        if stack:
            if stack[-1][0] in whole:
                absorbed[stack[-1][0]] += 1
                continue
            emit(start)
            end = min(end, stack[-1][1])
            label = row if is_op else stack[-1][2]
            anchor = row if name in own_ids else stack[-1][3]
        else:
            label = anchor = row
        clock = max(clock, start)
        stack.append((row, end, label, anchor))
        if end <= start:  # zero length: keep it as an instant, things may hang on it
            out.append(_Piece(start, start, row, label, anchor, stack[0][0]))
            stack.pop()
    while stack:
        emit(stack[-1][1])
        stack.pop()
    return out, absorbed


def update_ranges(trace: RankTrace, thread: int) -> Ranges:
    """Starts and ends of the optimizer's own work on one thread, in order.

    That is an Optimizer.step range, the outermost ones, less the forward and backward pass that run inside
    it where the step is given a closure (Lightning does so always).
    """
    on_thread = trace.resource == thread
    mine = (trace.kind == EventKind.ANNOTATION) & on_thread & _named(trace, ("Optimizer.step",))
    before = on_thread & _named(trace, (BACKWARD_PREFIX, COPY_BACK))
    pass_starts, pass_ends = trace.start[before].tolist(), trace.end[before].tolist()
    starts: list[int] = []
    ends: list[int] = []
    for start, end in zip(trace.start[mine].tolist(), trace.end[mine].tolist(), strict=True):
        if ends and start < ends[-1]:
            continue
        inside = pass_ends[bisect_left(pass_starts, start) : bisect_left(pass_starts, end)]
        starts.append(max(inside, default=start))
        ends.append(end)
    return starts, ends


def _named(trace: RankTrace, prefixes: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    return np.isin(trace.name, [i for i, name in enumerate(trace.names) if name.startswith(prefixes)])


def _kind(start: int, name: str, top: str, ranges: Ranges) -> OpKind:
    if name.startswith(ENQUEUE_PREFIX):
        return OpKind.LOCAL
    if top.startswith(BACKWARD_PREFIX):
        return OpKind.BACKWARD
    at = bisect_right(ranges[0], start) - 1
    if at >= 0 and start < ranges[1][at]:
        return OpKind.UPDATE
    return OpKind.FORWARD
