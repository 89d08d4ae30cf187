"""What DistributedDataParallel does inside a step, read off its own events.

k-th ``AccumulateGrad`` of the backward pass = k-th gradient ready; a ``c10d::`` call inside one
launches the bucket it completes; ``copy_bucket_to_grad`` is the first use of a reduced gradient,
bucket after bucket. On gloo the all-reduce runs on worker threads, and the main thread's waiting
for it is a silence that leaves no event: here it becomes a dependency.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from dpro.graph.draft import DraftOp, Local
from dpro.graph.graph import OpKind
from dpro.graph.threads import ACCUMULATE, COPY_BACK, ENQUEUE_PREFIX
from dpro.trace.model import EventKind, RankTrace

CHANNEL = "group/gloo"


def add_gradients(trace: RankTrace, local: Local, rows: list[int]) -> None:
    """Put OUT markers into the main chain, mark IN ops, and list the buckets (collectives come later).

    Only for host-side DDP, where the gradients are accumulated on the main thread.
    """
    names = {i: name for i, name in enumerate(trace.names)}
    ready = [r for r in rows if names[int(trace.name[r])] == ACCUMULATE]
    launches = [r for r in rows if _is_enqueue(names[int(trace.name[r])])]
    ends = trace.end[ready].tolist()
    starts = trace.start[ready].tolist()
    if not ready or not _on_host(trace):
        return
    # Without a synchronisation after it (accumulation micro-steps) a gradient is no OUT.
    inside: list[tuple[int, int]] = []  # (position in ready, launch row)
    for launch in launches:
        at = bisect_right(starts, int(trace.start[launch])) - 1
        if at >= 0 and trace.start[launch] < ends[at]:
            inside.append((at, launch))
    if not inside:
        return
    count = len(trace.tensors) or _gradients_per_pass(ready, inside)
    final = inside[-1][0]
    base = max(0, final + 1 - count)
    inside = [(at - base, launch) for at, launch in inside if at >= base]
    ready = ready[base : final + 1]
    order = _tensor_order(trace, len(ready))
    chain = local.chains[local.main]
    opened = {row: op for op in reversed(chain) for row in op.rows[:1]}
    first_launch = {at: launch for at, launch in reversed(inside)}
    markers: list[tuple[int, DraftOp]] = []
    for k, row in enumerate(ready):
        launch_row = first_launch.get(k)
        instant = int(trace.end[row]) if launch_row is None else int(trace.start[launch_row])
        marker = DraftOp("gradient ready", OpKind.OUT, local.main, instant, instant, 0, tensor=order[k])
        local.outs[order[k]] = marker
        markers.append((instant, marker))
    _insert(chain, markers)
    previous = 0
    for at, launch in inside:
        op = opened.get(launch)
        if op is None:
            continue
        op.kind = OpKind.LOCAL
        bucket = len(local.buckets)
        told = [i for i, t in enumerate(trace.tensors) if t.bucket == bucket]
        members = told or [order[k] for k in range(previous, at + 1)]
        previous = max(previous, at + 1)
        local.buckets.append((members, op, op))  # the collective replaces the second op later
    _mark_ins(trace, local, rows, int(trace.end[ready[-1]]))


def add_host_collectives(trace: RankTrace, local: Local, begin: int, end: int) -> None:
    """Ops for collectives that run on host worker threads, and who waits for them."""
    host = [not name.startswith("stream/") for name in trace.resources]
    runs: dict[str, list[int]] = {}
    for row in np.flatnonzero(trace.kind == EventKind.COLLECTIVE).tolist():
        if host[trace.resource[row]] and trace.start[row] >= begin:
            runs.setdefault(trace.collectives[row].name.replace("_", ""), []).append(row)
    if not runs:
        return
    chain = local.chains[local.main]
    bucket_of = {id(launch): i for i, (_, launch, _) in enumerate(local.buckets)}
    firsts = _first_ins(local)
    used: dict[str, int] = {}
    for op in [op for op in chain if _is_enqueue(op.name)]:
        what = op.name.removeprefix(ENQUEUE_PREFIX).strip("_").replace("_", "")
        rows, at = runs.get(what, []), used.get(what, 0)
        if at >= len(rows):
            continue
        used[what] = at + 1
        row = rows[at]
        start, finish = max(int(trace.start[row]), op.end), int(trace.end[row])
        run = DraftOp(
            name=trace.names[trace.name[row]],
            kind=OpKind.COLLECTIVE,
            resource=CHANNEL,
            start=min(start, finish),
            end=finish,
            duration=max(0, finish - start),
            preds=[op],
            nbytes=int(trace.nbytes[row]),
            collective=row,
        )
        local.ops.append(run)
        bucket = bucket_of.get(id(op))
        if bucket is not None:
            members, launch, _ = local.buckets[bucket]
            local.buckets[bucket] = (members, launch, run)
        _waits(local, chain, run, firsts.get(bucket) if bucket is not None else None)
    lost = sum(len(rows) - used.get(what, 0) for what, rows in runs.items() if any(trace.end[r] < end for r in rows))
    unlaunched = [r for what, rows in runs.items() for r in rows[used.get(what, 0) :] if trace.end[r] < end]
    if lost and unlaunched and not used:
        for row in unlaunched:  # nobody says who launched them: they stand beside the host's ops
            start, finish = int(trace.start[row]), int(trace.end[row])
            name = trace.names[trace.name[row]]
            run = DraftOp(name, OpKind.COLLECTIVE, CHANNEL, start, finish, finish - start, collective=row)
            run.nbytes = int(trace.nbytes[row])
            run.after(local.first)
            local.last.after(run)
            local.ops.append(run)


def _waits(local: Local, chain: list[DraftOp], run: DraftOp, first_in: DraftOp | None) -> None:
    """Tie a collective to the op that waits for it: the bucket's first IN, else where the host was silent."""
    if first_in is None:
        starts = [op.start for op in chain]
        after = bisect_left(starts, run.end)
        if after == 0:
            return
        first_in = chain[after] if after < len(chain) else local.last
        if chain[after - 1].end > run.end or run.preds[0] is first_in:
            return  # the host was busy when it ended: nobody waited
    if first_in.start >= run.start:
        first_in.after(run)
        if first_in.start < run.end:
            # the worker's own end mark may come after the waiter was woken: that is no wait
            run.end = max(run.start, first_in.start)
            run.duration = run.end - run.start


def _is_enqueue(name: str) -> bool:
    return name.startswith(ENQUEUE_PREFIX) and name.endswith("_") and not name.endswith("wait_")


def _on_host(trace: RankTrace) -> bool:
    return not any(name.startswith("stream/") for name in trace.resources)


def _gradients_per_pass(ready: list[int], inside: list[tuple[int, int]]) -> int:
    """Gradients of the pass that synchronises when the tensor table is unknown: back to the pass before.

    All passes are alike, so the launches' count per pass divides; with one pass it is everything.
    """
    return len(ready) if inside[0][0] < len(ready) // 2 or len(inside) == 1 else inside[-1][0] + 1


def _tensor_order(trace: RankTrace, count: int) -> list[int]:
    """k-th ready -> tensor index."""
    told = sorted((t.ready, i) for i, t in enumerate(trace.tensors) if t.ready >= 0)
    if len(told) == count:
        return [i for _, i in told]
    return list(range(count))


def _insert(chain: list[DraftOp], markers: list[tuple[int, DraftOp]]) -> None:
    """Put zero-length markers into a chain, after everything that ended by their instant."""
    out: list[DraftOp] = []
    at = 0
    for instant, marker in markers:
        while at < len(chain) and (chain[at].end <= instant and chain[at].start < instant):
            out.append(chain[at])
            at += 1
        out.append(marker)
    chain[:] = [*out, *chain[at:]]


def _mark_ins(trace: RankTrace, local: Local, rows: list[int], after: int) -> None:
    """IN ops: a copy per gradient, else the first op after the backward pass for all of them."""
    chain = local.chains[local.main]
    copies = [op for op in chain if op.name == COPY_BACK and op.start >= after - 1_000]
    members = [t for tensors, _, _ in local.buckets for t in tensors]
    if len(copies) == len(members):
        for tensor, op in zip(members, copies, strict=True):
            op.kind, op.tensor = OpKind.IN, tensor
            local.ins[tensor] = op
        return
    following = next((op for op in chain if op.start >= after and op.kind != OpKind.BACKWARD), None)
    if following is None:
        following = local.last
    marker = DraftOp("reduced gradients", OpKind.IN, local.main, following.start, following.start, 0)
    chain.insert(chain.index(following) if following is not local.last else len(chain), marker)
    for tensor in members:
        local.ins[tensor] = marker


def _first_ins(local: Local) -> dict[int, DraftOp]:
    """Per bucket the IN op that comes first on the host."""
    out = {}
    for i, (members, _, _) in enumerate(local.buckets):
        found = [local.ins[t] for t in members if t in local.ins]
        if found:
            out[i] = min(found, key=lambda op: op.start)
    return out
