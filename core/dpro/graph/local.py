"""One rank's ops and their dependencies inside a window of time.

Edges: order within a host thread; launch → kernel; order in a stream; event record → stream wait;
device work → the host call that waits for it (synchronise, blocking copies, a full launch queue);
forward thread → backward thread and back. Waiting is taken out of the duration of the op that
waited. What a trace does not say (older ones do not name the stream of a wait) is inferred from
what ended just before, and only as an edge that the measured times obey.

``Meta.contention`` changes no op here: durations are as captured, contention inside.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpro.graph import dataflow, ddp, horovod
from dpro.graph.draft import DraftOp, Local
from dpro.graph.graph import OpKind
from dpro.graph.threads import (
    COPY_BACK,
    COPY_IN,
    Cuts,
    chain,
    host_threads,
    is_enqueue,
    update_ranges,
)
from dpro.trace.model import EventKind, RankTrace
from dpro.trace.steps import device_rows, launch_times

#: Clocks of host and device agree to about this much in one trace.
_TOLERANCE_NS = 2_000
#: CUDA lets about 1,024 launches be outstanding on a stream; then the next call blocks.
_QUEUE_DEPTH = 1_000


def build_local(trace: RankTrace, begin: int, end: int, rank: int, own_names: set[str]) -> Local:
    """Ops of ``trace`` for the window [begin, end) ns of its own clock.

    Host ops belong where they start, device ops where their launch started. Device work launched
    earlier explains why ops of the window started late, but is no part of it: the graph is that of a
    step which finds the device idle.

    Args:
        rank: number used in names.
        own_names: names that stay ops of their own (:func:`~dpro.graph.threads.costly_names`).
    """
    if dataflow.is_dataflow(trace):
        local = dataflow.build(trace, begin, end, rank)
        horovod.add_responses(trace, local)
        dataflow.settle(local, trace.meta.event_overhead_ns)
        return _completed(local)
    threads = host_threads(trace, begin, end)
    main = _main_thread(trace, threads)
    name = f"rank{rank}/{trace.resources[main]}" if main is not None else f"rank{rank}/cpu/main"
    local = Local(
        rank=rank,
        begin=begin,
        end=end,
        main=name,
        first=DraftOp("step begin", OpKind.LOCAL, name, begin, begin, 0),
        last=DraftOp("step end", OpKind.LOCAL, name, end, end, 0),
    )
    device, earlier = _device_rows(trace, begin, end)
    cuts = _cuts(trace, device, own_names)
    for thread, rows in threads.items():
        resource = f"rank{rank}/{trace.resources[thread]}"
        local.chains[resource] = chain(trace, rows, cuts, update_ranges(trace, thread), resource)
    local.chains.setdefault(name, [])
    by_horovod = horovod.is_horovod(trace)
    if by_horovod:
        horovod.add_gradients(trace, local)
    else:
        ddp.add_gradients(trace, local, threads.get(main, []) if main is not None else [])
    for thread_name, ops in local.chains.items():
        for before, op in pairwise(ops):
            op.after(before)
        if thread_name == name:
            if ops:
                ops[0].after(local.first)
            local.last.after(ops[-1] if ops else local.first)
    _hand_over(local)
    _Device(trace, local, device, earlier).build()
    if by_horovod:
        horovod.add_responses(trace, local)
    else:
        ddp.add_host_collectives(trace, local)
    return _completed(local)


def _completed(local: Local) -> Local:
    """``local`` with all of its ops in ``ops``, and its collectives."""
    host = [op for ops in local.chains.values() for op in ops]
    local.ops = [local.first, *host, *local.ops, local.last]
    local.collectives = sorted((op for op in local.ops if op.collective >= 0), key=lambda op: op.start)
    return local


def _cuts(trace: RankTrace, device: list[int], names: set[str]) -> Cuts:
    """Host rows that something hangs on, and those that stay one op with all they hold."""
    enqueues = [i for i, n in enumerate(trace.names) if is_enqueue(n)]
    copies = [i for i, n in enumerate(trace.names) if n in (COPY_BACK, COPY_IN)]
    is_op = trace.kind == EventKind.CPU_OP
    # On the host alone an enqueued collective or a copy to or from a bucket is one thing; beside a device they launch.
    whole = np.zeros(len(trace), "?") if trace.streams else is_op & np.isin(trace.name, [*enqueues, *copies])
    cut = is_op & np.isin(trace.name, enqueues)
    cut |= np.isin(trace.kind, (EventKind.SYNC, EventKind.EVENT_RECORD, EventKind.STREAM_WAIT))
    cut |= (trace.kind == EventKind.RUNTIME) & (trace.flow >= 0) & np.isin(trace.flow, trace.flow[device])
    return Cuts(set(np.flatnonzero(cut).tolist()), set(np.flatnonzero(whole).tolist()), names | {COPY_IN})


def _main_thread(trace: RankTrace, threads: dict[int, list[int]]) -> int | None:
    """The thread that carries the step marks; else the one busy first."""
    marks = np.flatnonzero(trace.kind == EventKind.ANNOTATION).tolist()
    for prefix in ("ProfilerStep", "Optimizer."):
        for i in marks:
            if trace.names[trace.name[i]].startswith(prefix) and int(trace.resource[i]) in threads:
                return int(trace.resource[i])
    return min(threads, key=lambda t: trace.start[threads[t][0]], default=None)


def _device_rows(trace: RankTrace, begin: int, end: int) -> tuple[list[int], set[int]]:
    """Device rows that matter to the window, and which of them were launched before it."""
    rows = device_rows(trace)
    launched = launch_times(trace, rows)
    earlier = (launched < begin) & (trace.end[rows] > begin)
    inside = (launched >= begin) & (launched < end)
    return rows[inside | earlier].tolist(), set(rows[earlier].tolist())


def _hand_over(local: Local) -> None:
    """Join worker threads to the main one where the main thread is silent because it waits for them.

    ``backward()`` leaves no event on the calling thread: it is a silence filled by the autograd
    thread. Where a worker's ops fill at least half of a silence, the first follows what the main
    thread did before and the main thread goes on after the last.
    """
    main = [local.first, *local.chains[local.main], local.last]
    starts = [op.start for op in main]
    for thread, ops in local.chains.items():
        if thread == local.main:
            continue
        groups: dict[int, list[DraftOp]] = {}
        for op in ops:
            after = bisect_left(starts, op.end - _TOLERANCE_NS)
            if 0 < after < len(main) and main[after - 1].end <= op.start + _TOLERANCE_NS:
                groups.setdefault(after, []).append(op)
        for after, group in groups.items():
            before, then = main[after - 1], main[after]
            if 2 * sum(op.end - op.start for op in group) >= then.start - before.end:
                group[0].after(before)
                then.after(group[-1])


@dataclass(slots=True)
class _Launch:
    """A device op with the host call that launched it (None: not seen)."""

    op: DraftOp
    row: int
    call: int  # time of the call, own start where unknown
    host: DraftOp | None


class _Device:
    """Puts device ops into a :class:`Local` and ties them to the host."""

    def __init__(self, trace: RankTrace, local: Local, rows: list[int], earlier: set[int]) -> None:
        self.trace, self.local, self.earlier = trace, local, earlier
        self.split: set[int] = set()  # host ops whose call is already an instant of its own
        self.streams: dict[int, list[_Launch]] = {}
        #: host row -> its op; only rows that opened an op can be launched from or waited on
        self.host: dict[int, DraftOp] = {}
        for ops in local.chains.values():
            for op in ops:
                for row in op.rows:
                    self.host.setdefault(row, op)
        # Stream by stream, so that the same step always gives the same ops in the same order.
        self.rows = sorted(rows, key=lambda row: (trace.resource[row], row))

    def build(self) -> None:
        self._make_ops()
        self._stream_waits()
        self._host_waits()
        self._full_queue()

    def _make_ops(self) -> None:
        trace, local = self.trace, self.local
        calls = np.flatnonzero(np.isin(trace.kind, (EventKind.RUNTIME, EventKind.SYNC)))
        call_of = dict(zip(trace.flow[calls].tolist(), calls.tolist(), strict=True))
        call_of.pop(-1, None)
        last: dict[int, DraftOp] = {}
        called = trace.start.tolist()
        keys = ("resource", "flow", "start", "end", "kind", "name", "nbytes")
        columns = [trace.columns[key][self.rows].tolist() for key in keys]
        for row, stream, flow, start, end, event, name, nbytes in zip(self.rows, *columns, strict=True):
            call = call_of.get(flow)
            host = self.host.get(call) if call is not None else None
            before = last.get(stream)
            start = max(start, before.end if before else local.begin)
            end = max(start, end)
            is_collective = event == EventKind.COLLECTIVE
            kind = host.kind if host is not None else OpKind.FORWARD
            if is_collective or event == EventKind.MEMCPY:
                kind = OpKind.COLLECTIVE if is_collective else OpKind.LOCAL
            op = DraftOp(
                name=trace.names[name],
                kind=kind,
                resource=f"rank{local.rank}/{trace.resources[stream]}",
                start=start,
                end=end,
                duration=end - start,
                nbytes=nbytes,
                collective=row if is_collective else -1,
                rows=[] if call is None else [call],
            )
            op.after(before)
            if host is not None:
                # The kernel may run before the call returns: it follows what the call followed.
                op.after(*host.preds)
            last[stream] = op
            launched = called[call] if call is not None else start
            self.streams.setdefault(stream, []).append(_Launch(op, row, launched, host))
            if row not in self.earlier:
                local.ops.append(op)
        self.called = {s: [x.call for x in items] for s, items in self.streams.items()}

    def _last_before(self, stream: int, instant: int) -> DraftOp | None:
        """Last op on a stream whose launch came before ``instant``."""
        calls = self.called.get(stream)
        if not calls:
            return None
        at = bisect_left(calls, instant)
        return self.streams[stream][at - 1].op if at else None

    def _next_after(self, stream: int, instant: int) -> DraftOp | None:
        calls = self.called.get(stream)
        if not calls:
            return None
        at = bisect_right(calls, instant)
        return self.streams[stream][at].op if at < len(calls) else None

    def _stream_waits(self) -> None:
        """The next op on the waiting stream follows what the awaited event had recorded."""
        trace = self.trace
        record = np.flatnonzero(trace.kind == EventKind.EVENT_RECORD)
        recorded = dict(zip(trace.flow[record].tolist(), trace.start[record].tolist(), strict=True))
        by_thread: dict[str, list[tuple[int, int]]] = {}
        for stream, items in self.streams.items():
            for item in items:
                if item.host is not None:
                    by_thread.setdefault(item.host.resource, []).append((item.call, stream))
        for calls in by_thread.values():
            calls.sort()
        for row in np.flatnonzero(trace.kind == EventKind.STREAM_WAIT).tolist():
            host = self.host.get(row)
            if host is None:
                continue
            at = int(trace.start[row])
            target, source = int(trace.peer[row]), int(trace.link[row])
            if target < 0:  # not told: the stream this thread launches on next
                calls = by_thread.get(host.resource, [])
                following = bisect_right(calls, (at, -1))
                if following == len(calls):
                    continue
                target = calls[following][1]
            op = self._next_after(target, at)
            if op is None:
                continue
            if source >= 0:
                when = recorded.get(int(trace.flow[row]), at) if trace.flow[row] >= 0 else at
                sources = [self._last_before(source, when)]
            else:
                sources = [self._latest_by(op.start, at, leave_out=target)]
            op.after(*(s for s in sources if s is not None and s.end <= op.start + _TOLERANCE_NS))

    def _latest_by(self, instant: int, launched_before: int, leave_out: int = -1) -> DraftOp | None:
        """Among the last launched ops of the streams, the one that ended last before ``instant``."""
        found = [self._last_before(s, launched_before) for s in self.streams if s != leave_out]
        ended = [op for op in found if op is not None and op.end <= instant + _TOLERANCE_NS]
        return max(ended, key=lambda op: op.end, default=None)

    def _host_waits(self) -> None:
        """Synchronising calls and blocking copies end after the device work they wait for."""
        trace = self.trace
        for row in np.flatnonzero(trace.kind == EventKind.SYNC).tolist():
            host = self.host.get(row)
            if host is None:
                continue
            at, until = int(trace.start[row]), int(trace.end[row])
            name = trace.names[trace.name[row]]
            if "Device" in name or "Ctx" in name:
                awaited = [self._last_before(s, at) for s in self.streams]
            elif trace.peer[row] >= 0 and "Stream" in name:
                awaited = [self._last_before(int(trace.peer[row]), at)]
            else:
                awaited = [self._latest_by(until, at)]
            self._wait(host, [op for op in awaited if op is not None and op.end <= until + _TOLERANCE_NS])
        for items in self.streams.values():
            for item in items:
                if item.host is None or trace.kind[item.row] != EventKind.MEMCPY:
                    continue
                blocking = "DtoH" in item.op.name or "Pageable" in item.op.name
                if blocking and item.op.end <= item.host.end + _TOLERANCE_NS:
                    self._wait(item.host, [item.op])

    def _wait(self, host: DraftOp, awaited: list[DraftOp]) -> None:
        """Make a host op end after device ops; what it waited is no work of its own.

        The call itself becomes an instant before it, so that the host's gap before the call stays
        where the wait turns out shorter.
        """
        awaited = [op for op in awaited if host not in op.preds and op not in host.preds]
        if not awaited:
            return
        if id(host) not in self.split:
            self.split.add(id(host))
            call = DraftOp(f"{host.name} (call)", OpKind.LOCAL, host.resource, host.start, host.start, 0)
            call.preds, host.preds = host.preds, [call]
            self.local.ops.append(call)
        host.after(*awaited)
        host.wait_until(max(op.end for op in awaited))

    def _full_queue(self) -> None:
        """Calls that block because the launch queue is full follow the device op that made room."""
        items = sorted((x for xs in self.streams.values() for x in xs), key=lambda x: x.call)
        if len(items) < _QUEUE_DEPTH:
            return
        calls = [x.call for x in items]
        ended = sorted((x.op.end, i) for i, x in enumerate(items))
        finish = [end for end, _ in ended]
        records = np.flatnonzero(np.isin(self.trace.kind, (EventKind.EVENT_RECORD, EventKind.STREAM_WAIT))).tolist()
        blocked = [x.host for x in items] + [self.host.get(row) for row in records]
        for host in blocked:
            if host is None:
                continue
            outstanding = bisect_left(calls, host.start) - bisect_right(finish, host.start)
            at = bisect_right(finish, host.end) - 1
            if outstanding < _QUEUE_DEPTH or at < 0 or finish[at] <= host.start:
                continue
            freed = items[ended[at][1]]
            if freed.call < host.start:
                self._wait(host, [freed.op])
