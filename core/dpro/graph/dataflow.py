"""One rank's ops where a framework runs a graph: TensorFlow's executor, MXNet's engine.

A captured op is a CPU_OP row named by its node; ``meta.extra["dataflow"]`` says on which nodes a node depends. The
threads of an executor take whatever is ready, so that an op's place on its thread means little once gradients are
waited for. Two kinds of ops, therefore:

* What needs no reduced gradient runs in the captured order of its thread, besides its dependencies.
* What does (updates, and all that follows from them) has its dependencies alone; its thread is a queue.

What the graph says nothing of keeps its place behind the op before it.

Nothing blocks a thread: a gradient is handed in by an op of its own (the row that holds ``horovod::submit``), and what
reads the reduced one is started when it is there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from statistics import median

import numpy as np

from dpro.graph.draft import DraftOp, Local
from dpro.graph.graph import OpKind
from dpro.trace.horovod import SUBMIT, WAIT
from dpro.trace.model import EventKind, RankTrace

DATAFLOW = "dataflow"
#: Where a node's name says that it belongs to the backward pass: Keras, tf.gradients, MXNet.
_BACKWARD = re.compile(r"(^|/)gradient(_tape|s)/|_backward")
#: A dependency ended at most so long after what follows began: clocks of two threads' events, read one after the other.
_TOLERANCE_NS = 2_000
#: A thread that has something to run takes it up in less.
_IDLE_NS = 50_000
_Occurrences = dict[str, list[DraftOp]]


def is_dataflow(trace: RankTrace) -> bool:
    """Whether the trace is of a framework that runs a graph."""
    return isinstance(trace.meta.extra.get(DATAFLOW), dict)


def build(trace: RankTrace, begin: int, end: int, rank: int) -> Local:
    """Ops of ``trace`` that start in [begin, end) ns; gradients' OUT and IN markers among them, responses not yet.

    A marker is on no resource: handing in is the work of an op beside it, and nobody has to come by to take a gradient.
    """
    threads = _threads(trace, begin, end)
    busy = {thread: sum(int(trace.end[row] - trace.start[row]) for row in rows) for thread, rows in threads.items()}
    main = f"rank{rank}/" + (trace.resources[max(busy, key=busy.__getitem__)] if busy else "cpu/main")
    first = DraftOp("step begin", OpKind.LOCAL, main, begin, begin, 0)
    last = DraftOp("step end", OpKind.LOCAL, main, end, end, 0)
    local = Local(rank, begin, end, main, first, last)
    for thread, rows in threads.items():
        resource = f"rank{rank}/{trace.resources[thread]}"
        local.chains[resource] = [_op(trace, row, resource) for row in rows]
    local.chains.setdefault(main, [])
    found = [op for ops in local.chains.values() for op in ops]
    found.sort(key=lambda op: (op.start, op.end))
    occurrences: _Occurrences = {}
    for op in found:
        occurrences.setdefault(op.name, []).append(op)
    handed_in, first_use = _add_gradients(trace, local)
    needs = _needs(trace.meta.extra[DATAFLOW], occurrences)
    for op in found:
        for name in needs.get(op.name, ()):
            before = _latest(occurrences[name], op)
            if before is not None:
                op.after(*(handed_in.get(id(before)) or [before]))
        op.after(*first_use.get(id(op), ()))
    _order(local, found, {name for name, nodes in needs.items() if nodes})
    _add_markers(local)
    followed = {id(p) for ops in local.chains.values() for op in ops for p in op.preds}
    local.last.after(*(op for ops in local.chains.values() for op in ops if id(op) not in followed), first)
    return local


def settle(local: Local, overhead_ns: float) -> None:
    """Tell what an op waited for from what its thread did meanwhile; to be called when responses are known.

    Args:
        overhead_ns: of recording an op.

    An IN that is known by its first user is put where its response was delivered: there its user began to wait for its
    turn. And a thread that had an op to run since before its last one ended was not idle in between: that is time of
    the thread's (taking the next op, waiting for a core), no latency, which would pass while the thread runs others.
    """
    _deliver(local)
    for resource, chain in local.chains.items():
        ops = sorted((op for op in chain if op.resource == resource), key=lambda op: (op.start, op.end))
        ready = [max((p.end for p in op.preds), default=local.begin) for op in ops]
        _yield(ops, ready)
        soonest = list(accumulate(reversed(ready), min))[::-1]  # of each op and those that ran after it
        for i, op in enumerate(ops):
            before = op.behind
            if before is None or before is local.first or not soonest[i] <= before.end < op.start:
                continue
            held = next(k for k in range(i, len(ops)) if ready[k] <= before.end)
            waited = op.start - before.end
            if held == i:
                op.start = before.end
                op.duration = max(0, op.end - op.start - round(overhead_ns))
            else:
                ops[held].duration += waited
                op.skipped += op.gap(local.begin)


def _yield(ops: list[DraftOp], ready: list[int]) -> None:
    """Whether what waits for a gradient runs as soon as the thread is free, or when nothing else is left, is seen.

    MXNet's queue is first in, first out; TensorFlow's thread first goes on with what its last op set free.

    Args:
        ops: of a thread, by start.
        ready: when each could have run.
    """
    late = [op.kind == OpKind.UPDATE for op in ops]
    others = [op.start for op, is_late in zip(ops, late, strict=True) if not is_late]
    could = overtaken = 0
    for op, since, is_late in zip(ops, ready, late, strict=True):
        first = bisect_right(others, since)
        if is_late and first < len(others):
            could += 1
            overtaken += bisect_right(others, op.start) > first + 1  # one may have been in the queue before it
    if 2 * overtaken > could:
        for op in (op for op, is_late in zip(ops, late, strict=True) if is_late):
            op.priority = 1


def _deliver(local: Local) -> None:
    """Delivery of a response is what its first user waited for, where it waited for nothing else (its thread, another
    gradient); elsewhere it is taken to last as long as usual. Not sooner than a thread ended to idle, though, on which
    what uses it ran later: it would have run then."""
    users: dict[int, DraftOp] = {}
    for op in (op for ops in local.chains.values() for op in ops):
        for marker in (p for p in op.preds if p.kind == OpKind.IN):
            users.setdefault(id(marker), op)
    found: list[tuple[int, int, bool, list[DraftOp]]] = []  # through, first used, whether that one was idle, INs
    for bucket in local.buckets:
        markers = sorted((local.ins[t] for t in bucket.members), key=lambda marker: marker.start)
        through = bucket.run.end if bucket.run is not None else markers[0].start
        user = users.get(id(markers[0]))
        if user is None or user.start != markers[0].start:
            continue
        idle = all(p is None or p is markers[0] or p.end <= through for p in (*user.preds, user.behind))
        found.append((through, user.start, idle, markers))
    usual_ns = round(median([used - through for through, used, idle, _ in found if idle] or [0]))
    idle_at = {resource: _idle(local, resource) for resource in local.chains}
    for through, used, idle, markers in found:
        delivered = used if idle else max(through, min(used, through + usual_ns))
        for marker in markers:
            user, at = users.get(id(marker)), min(marker.start, delivered)
            if user is not None and user.start == marker.start:
                others = max((p.end for p in user.preds if p is not marker), default=local.begin)
                at = max([at, *(end for start, end in idle_at[user.resource] if others <= start and end <= user.start)])
            marker.start = marker.end = at


def _idle(local: Local, resource: str) -> list[tuple[int, int]]:
    """When a thread had nothing to run of what needs no gradient, and ran nothing: (from, until), ns."""
    ops = sorted((op for op in local.chains[resource] if op.resource == resource), key=lambda op: (op.start, op.end))
    never = 1 << 62
    ready = [max((p.end for p in op.preds), default=local.begin) if op.kind != OpKind.UPDATE else never for op in ops]
    soonest = list(accumulate(reversed(ready), min))[::-1]
    return [
        (before.end, op.start)
        for before, op, since in zip(ops, ops[1:], soonest[1:], strict=False)
        if before.end + _IDLE_NS < op.start and since > before.end
    ]


def skip_ahead(local: Local, ahead_ns: int) -> None:
    """Take the first ``ahead_ns`` of the window out of all gaps and durations: other ranks had not begun."""
    until = local.begin + ahead_ns
    for op in (op for ops in local.chains.values() for op in ops):
        gap = op.gap(local.begin)
        op.skipped += min(gap, max(0, until - (op.start - gap)))
        if op.start < until:
            op.duration = op.duration * max(0, op.end - until) // max(1, op.end - op.start)


def _threads(trace: RankTrace, begin: int, end: int) -> dict[int, list[int]]:
    """Rows by thread, in order; of nested ones the outermost."""
    inside = (trace.kind == EventKind.CPU_OP) & (trace.start >= begin) & (trace.start < end)
    out: dict[int, list[int]] = {}
    over: dict[int, int] = {}
    for row in np.flatnonzero(inside).tolist():
        thread = int(trace.resource[row])
        if trace.start[row] >= over.get(thread, begin):
            out.setdefault(thread, []).append(row)
            over[thread] = int(trace.end[row])
    return out


def _op(trace: RankTrace, row: int, resource: str) -> DraftOp:
    name, start, end = trace.names[trace.name[row]], int(trace.start[row]), int(trace.end[row])
    kind = OpKind.BACKWARD if _BACKWARD.search(name) else OpKind.FORWARD
    duration = max(0, end - start - round(trace.meta.event_overhead_ns))
    return DraftOp(name, kind, resource, start, end, duration, rows=[row])


def _add_gradients(trace: RankTrace, local: Local) -> tuple[dict[int, list[DraftOp]], dict[int, list[DraftOp]]]:
    """Makes ``outs`` and ``ins``.

    Returns, by ``id`` of an op: IN markers of gradients that it handed in, and of those that it is the first to use.
    """
    names = {i: name for i, name in enumerate(trace.names) if name in (SUBMIT, WAIT)}
    inside = np.isin(trace.name, list(names)) & (trace.start >= local.begin) & (trace.start < local.end)
    handed_in: dict[int, list[DraftOp]] = {}
    first_use: dict[int, list[DraftOp]] = {}
    carriers: dict[int, DraftOp] = {}
    for row in np.flatnonzero(inside & (trace.kind == EventKind.ANNOTATION) & (trace.tensor >= 0)).tolist():
        tensor, end = int(trace.tensor[row]), int(trace.end[row])
        if names[int(trace.name[row])] == SUBMIT:
            chain = local.chains.get(f"rank{local.rank}/{trace.resources[trace.resource[row]]}", [])
            at = bisect_right([op.start for op in chain], int(trace.start[row])) - 1
            carrier = chain[at] if at >= 0 and chain[at].end >= trace.start[row] else None
            instant = carrier.end if carrier is not None else end
            marker = DraftOp("gradient handed in", OpKind.OUT, "", instant, instant, 0, tensor=tensor)
            local.outs[tensor] = marker
            if carrier is not None:
                marker.after(carrier)
                carriers[tensor] = carrier
        else:
            local.ins[tensor] = DraftOp("gradient reduced", OpKind.IN, "", end, end, 0, tensor=tensor)
    starts: dict[int, DraftOp] = {}
    for ops in local.chains.values():
        starts.update({op.start: op for op in ops})
    for tensor, marker in local.ins.items():
        if tensor in carriers:
            handed_in.setdefault(id(carriers[tensor]), []).append(marker)
        if (user := starts.get(marker.start)) is not None:
            first_use.setdefault(id(user), []).append(marker)
    return handed_in, first_use


def _needs(dataflow: dict[str, list[str]], occurrences: _Occurrences) -> dict[str, list[str]]:
    """Node -> nodes that were seen to run on which it depends, through those that were not."""
    out: dict[str, list[str]] = {}
    for name in occurrences:
        seen: set[str] = set()
        found: dict[str, None] = {}
        left = _inputs(dataflow, name)
        while left:
            node = left.pop()
            if node in occurrences:
                found[node] = None
            elif node not in seen:
                seen.add(node)
                left += _inputs(dataflow, node)
        out[name] = list(found)
    return out


def _inputs(dataflow: dict[str, list[str]], name: str) -> list[str]:
    """Of a stored trace, which may hold anything."""
    told = dataflow.get(name)
    return [node for node in told if isinstance(node, str)] if isinstance(told, list) else []


def _latest(ops: list[DraftOp], before: DraftOp) -> DraftOp | None:
    """The last run of a node that ``before`` can have waited for; a node in a loop runs more than once."""
    return next((op for op in reversed(ops) if op is not before and op.end <= before.start + _TOLERANCE_NS), None)


def _order(local: Local, found: Iterable[DraftOp], known: set[str]) -> None:
    """Tie what needs no reduced gradient to its thread's order; what waits for a thread has no gap for it.

    Args:
        found: all ops, by start.
        known: names of nodes whose dependencies are known.
    """
    late: set[int] = set()
    for op in found:
        if any(p.kind == OpKind.IN or id(p) in late for p in op.preds):
            late.add(id(op))
            op.kind = OpKind.UPDATE
    for ops in local.chains.values():
        chained, behind = local.first, local.first
        for op in ops:
            if op.name not in known and not op.preds:
                op.after(behind)
            elif id(op) not in late:
                op.after(chained)
            if id(op) not in late:
                chained = op
            op.behind, behind = behind, op


def _add_markers(local: Local) -> None:
    """Markers into the main chain, by time: there whoever looks for the order of hand-ins finds it."""
    chain = local.chains[local.main]
    markers = [*local.outs.values(), *local.ins.values()]
    for marker in markers:
        if not marker.preds and marker.kind == OpKind.OUT:
            marker.after(local.first)
    # an OUT goes behind what ends when it does, an IN before what begins then
    chain = [*chain, *markers]
    chain.sort(key=lambda op: op.end if op.kind == OpKind.OUT else op.start)
    local.chains[local.main] = chain
