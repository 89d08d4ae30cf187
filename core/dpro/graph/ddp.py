"""What DistributedDataParallel does inside a step, read off its own events.

k-th ``AccumulateGrad`` of the backward pass = k-th gradient ready; a ``c10d::`` call inside one
launches the bucket it completes; ``copy_bucket_to_grad`` is the first use of a reduced gradient,
bucket after bucket. On gloo the all-reduce runs on worker threads, and the main thread's waiting
for it is a silence that leaves no event: here it becomes a dependency.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from dpro.graph.draft import DraftBucket, DraftOp, Local
from dpro.graph.graph import OpKind
from dpro.graph.threads import ACCUMULATE, COPY_BACK, ENQUEUE_PREFIX, is_enqueue
from dpro.trace.model import EventKind, RankTrace

#: A call that goes on this much longer than its worker needed to begin was not running.
PREEMPTED_NS = 1_000_000
CHANNEL = "group/gloo"
#: Collectives that torch's gloo group runs at once (the threads of ProcessGroupGloo's options).
IN_FLIGHT = 2
VIEW = "aten::as_strided"


def add_gradients(trace: RankTrace, local: Local, rows: list[int]) -> None:
    """Mark OUT and IN ops in the main chain and list the buckets (their collectives come later).

    The OUT op of a bucket's last gradient is the call that launches the bucket, so that its cost sits
    in the duration of that op; the others are zero-length. Only for host-side DDP, where the gradients
    are accumulated on the main thread.

    Args:
        rows: host rows of the main thread in the window.
    """
    if trace.streams:
        return
    names = trace.names
    ready: dict[int, list[int]] = {}
    launches: dict[int, list[int]] = {}
    for row, step, name in zip(rows, trace.step[rows].tolist(), trace.columns["name"][rows].tolist(), strict=True):
        if names[name] == ACCUMULATE:
            ready.setdefault(step, []).append(row)
        elif is_enqueue(names[name]):
            launches.setdefault(step, []).append(row)
    for step in sorted(ready):
        if step in launches:
            _step_gradients(trace, local, ready[step], launches[step])


def _step_gradients(trace: RankTrace, local: Local, ready: list[int], launches: list[int]) -> None:
    """One step of :func:`add_gradients`: its AccumulateGrad rows and its enqueue calls."""
    starts, ends = trace.start[ready].tolist(), trace.end[ready].tolist()
    inside: list[tuple[int, int]] = []  # (place in ready, launch row)
    for launch in launches:
        at = bisect_right(starts, int(trace.start[launch])) - 1
        if at >= 0 and trace.start[launch] < ends[at]:
            inside.append((at, launch))
    if not inside:
        return
    # Accumulation micro-steps come before the pass that synchronises: their gradients are no OUT.
    final = inside[-1][0]
    count = sum(t.ready >= 0 for t in trace.tensors) or final + 1
    base = max(0, final + 1 - count)
    ready = ready[base : final + 1]
    inside = [(at - base, launch) for at, launch in inside if at >= base]
    told = sorted((t.ready, i) for i, t in enumerate(trace.tensors) if t.ready >= 0)
    order = [i for _, i in told] if len(told) == len(ready) else list(range(len(ready)))
    chain = local.chains[local.main]
    opened = {op.rows[0]: op for op in chain if op.rows}
    first_launch = {at: opened[launch] for at, launch in reversed(inside) if launch in opened}
    markers: list[DraftOp] = []
    local.outs.clear()
    for k, row in enumerate(ready):
        op = first_launch.get(k)
        if op is None:
            instant = int(trace.end[row])
            op = DraftOp("gradient ready", OpKind.OUT, local.main, instant, instant, 0)
            markers.append(op)
        op.kind, op.tensor = OpKind.OUT, order[k]
        local.outs[order[k]] = op
    _insert(chain, markers)
    buckets: list[DraftBucket] = []
    previous = 0
    for at, launch in inside:
        if launch not in opened:
            continue
        listed = [i for i, t in enumerate(trace.tensors) if t.bucket == len(buckets) and i in local.outs]
        listed.sort(key=lambda i: trace.tensors[i].ready)
        buckets.append(DraftBucket(listed or [order[k] for k in range(previous, at + 1)], opened[launch]))
        previous = max(previous, at + 1)
    local.buckets += buckets
    _mark_ins(local, buckets, int(trace.end[ready[-1]]))


def _mark_ins(local: Local, buckets: list[DraftBucket], backward_end: int) -> None:
    """First uses of reduced gradients after the backward pass.

    DDP waits for bucket after bucket and then copies each back, a ``copy_bucket_to_grad`` per gradient;
    with gradient_as_bucket_view it makes a view per gradient (``as_strided``) instead. The wait comes
    before everything since the bucket before. Where there is neither, everything is waited for before
    the host goes on.
    """
    chain = local.chains[local.main]
    at = next((i for i, op in enumerate(chain) if op.start >= backward_end and op.kind != OpKind.OUT), len(chain))
    members = [t for bucket in buckets for t in bucket.members]
    places = next((found for name in (COPY_BACK, VIEW) if (found := _uses(chain, at, name, len(members)))), [])
    local.ins.clear()
    if not places:
        instant = chain[at].start if at < len(chain) else local.last.start
        marker = DraftOp("gradients reduced", OpKind.IN, local.main, instant, instant, 0)
        chain.insert(at, marker)
        local.ins.update(dict.fromkeys(members, marker))
        for bucket in buckets:
            bucket.first_in = marker
        return
    for bucket in buckets:
        for number, tensor in enumerate(bucket.members):
            place = places.pop(0)
            op = chain[at] if number == 0 else chain[place]
            op.kind, op.tensor = OpKind.IN, tensor
            local.ins[tensor] = op
            if number == 0:
                bucket.first_in = op
            at = place + 1


def _uses(chain: list[DraftOp], at: int, name: str, count: int) -> list[int]:
    """Places of exactly ``count`` ops of that name, before the optimizer, from ``at`` on; else none."""
    out: list[int] = []
    for i in range(at, len(chain)):
        if chain[i].kind == OpKind.UPDATE or len(out) == count:
            break
        if chain[i].name == name:
            out.append(i)
    return out if len(out) == count else []


def add_host_collectives(trace: RankTrace, local: Local) -> None:
    """Ops for collectives that run on host worker threads, and who waits for them.

    The i-th call that enqueues one is the i-th run of that kind, by start.
    """
    on_host = np.isin(trace.resource, trace.streams, invert=True)
    mine = (trace.kind == EventKind.COLLECTIVE) & on_host & (trace.start >= local.begin)
    runs: dict[str, list[int]] = {}
    for row in np.flatnonzero(mine).tolist():
        runs.setdefault(trace.collectives[row].name.replace("_", ""), []).append(row)
    if not runs:
        return
    chain = local.chains[local.main]
    bucket_of = {id(bucket.launch): bucket for bucket in local.buckets}
    used: dict[str, int] = {}
    for op in [op for op in chain if is_enqueue(op.name)]:
        what = op.name.removeprefix(ENQUEUE_PREFIX).replace("_", "")
        rows, at = runs.get(what, []), used.get(what, 0)
        if at >= len(rows):
            continue
        used[what] = at + 1
        _cut_if_preempted(chain, op, int(trace.start[rows[at]]))
        start, finish = max(int(trace.start[rows[at]]), op.end), int(trace.end[rows[at]])
        run = _run(trace, rows[at], min(start, finish), finish, [op])
        local.ops.append(run)
        bucket = bucket_of.get(id(op))
        if bucket is not None:
            bucket.run = run
        _waits(local, chain, run, bucket.first_in if bucket is not None else None)
    if used:
        return
    # Nobody says who launched them (a trace of the workers alone): they stand beside the host's ops.
    before = local.begin
    for row in sorted(row for rows in runs.values() for row in rows if trace.end[row] <= local.end):
        start, finish = max(int(trace.start[row]), before), int(trace.end[row])
        before = max(before, finish)
        run = _run(trace, row, min(start, finish), finish, [local.first])
        local.last.after(run)
        local.ops.append(run)


def _cut_if_preempted(chain: list[DraftOp], launch: DraftOp, worker_began: int) -> None:
    """A launching call that lost its core launched when its worker began, not when it came back."""
    if launch.end - worker_began <= PREEMPTED_NS:
        return
    instant = max(launch.start, worker_began)
    work = min(launch.duration, instant - launch.start)
    rest = DraftOp("back from launch", OpKind.LOCAL, launch.resource, instant, launch.end, launch.duration - work)
    launch.end, launch.duration = instant, work
    at = chain.index(launch) + 1
    for op in chain[at:]:
        if launch in op.preds:
            op.preds[op.preds.index(launch)] = rest
    rest.preds.append(launch)
    chain.insert(at, rest)


def _run(trace: RankTrace, row: int, start: int, end: int, after: list[DraftOp]) -> DraftOp:
    name, nbytes = trace.names[int(trace.columns["name"][row])], int(trace.nbytes[row])
    return DraftOp(name, OpKind.COLLECTIVE, CHANNEL, start, end, end - start, after, nbytes, collective=row)


def _waits(local: Local, chain: list[DraftOp], run: DraftOp, first_in: DraftOp | None) -> None:
    """Tie a collective to the op that waits for it: the bucket's first IN, else where the host was silent."""
    if first_in is None:
        after = bisect_left([op.start for op in chain], run.end)
        if after == 0:
            return
        first_in = chain[after] if after < len(chain) else local.last
        if chain[after - 1].end > run.end or run.preds[0] is first_in:
            return  # the host was busy when it ended: nobody waited
    if first_in.start < run.start:
        local.warnings.append(f"{run.name} began after its first use: not taken as a dependency")
        return
    first_in.after(run)
    # A worker that lost its core writes its end mark after the thread it woke went on.
    run.end = min(run.end, first_in.start)
    run.duration = run.end - run.start


def _insert(chain: list[DraftOp], markers: list[DraftOp]) -> None:
    """Put zero-length markers into a chain, after everything that ended by their instant."""
    out: list[DraftOp] = []
    at = 0
    for marker in markers:
        while at < len(chain) and chain[at].end <= marker.start and chain[at].start < marker.start:
            out.append(chain[at])
            at += 1
        out.append(marker)
    chain[:] = [*out, *chain[at:]]
