"""What a parameter server job (BytePS) does inside a step, read off its stage rows.

A gradient is cut into partitions, each with a key and by that a server. A worker copies a partition out, pushes it,
asks for the sum once the push is acknowledged, pulls it and copies it in; the server adds up what all workers pushed.
Two threads of a worker copy, a thread of the server adds, a link direction carries one message at a time. All are
queues: who waits for whom, and in which order a server adds, is the replay's to say (:mod:`dpro.graph.ps_ops`).

A worker's messages to a server keep their order, so that asking waits for what was handed to the link before (ps-lite
over ZeroMQ: one pipe, and pushes are handed over as soon as they are copied out). Where a capture shows pulls that were
over by then, asking waits for nothing.

Source: dPRO (MLSys 2022) section 4.1; BytePS 0.2 (``core_loops.cc``, ``server.cc``) and ps-lite (``zmq_van.h``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpro.graph.ddp import CHANNEL
from dpro.graph.draft import DraftBucket, DraftOp, Local
from dpro.graph.graph import Graph, OpKind
from dpro.graph.ps_layout import layout_of
from dpro.graph.ps_ops import INFO, Added, Key, Part, Ps, add_ops, last_pushes, resources
from dpro.graph.ps_pace import QUICK, Message, link_pace, pace
from dpro.graph.ps_wire import with_servers
from dpro.trace import byteps
from dpro.trace.byteps import COPY_IN, COPY_OUT, PULL, PUSH
from dpro.trace.model import RankTrace

#: A thread that copies so many times slower than the quickest one waits while it does.
_SLOWEST_COPY = 4
#: At least this share of the pulls that can have waited for earlier pushes must have, for that to be the rule.
_ORDERLY_SHARE = 0.5
#: Rows are in whole µs.
_RESOLUTION_NS = 2_000
_NEVER = -(2**62)


def is_ps(trace: RankTrace) -> bool:
    """Whether the trace shows partitions that were pushed."""
    return PUSH in trace.names


def apart(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], list[RankTrace]]:
    """The workers' traces and the servers'."""
    servers = [trace for trace in traces if trace.meta.source == byteps.SERVER]
    return [trace for trace in traces if trace.meta.source != byteps.SERVER], servers


def read_parts(trace: RankTrace) -> tuple[list[Part], int]:
    """A worker's partitions that were pushed and pulled, by start; how many pushes have no pull."""
    wanted = {i: name for i, name in enumerate(trace.names) if name in byteps.ROWS.values()}
    rows = np.flatnonzero(np.isin(trace.name, list(wanted)) & (trace.tensor >= 0) & (trace.flow >= 0))
    stages: dict[str, dict[Key, list[tuple[int, int, int]]]] = {name: {} for name in byteps.ROWS.values()}
    columns = [trace.columns[key][rows].tolist() for key in ("name", "tensor", "flow", "start", "end", "nbytes")]
    for name, tensor, number, start, end, nbytes in zip(*columns, strict=True):
        stages[wanted[name]].setdefault((tensor, number), []).append((start, end, nbytes))
    parts: list[Part] = []
    lost = 0
    for key, pushes in stages[PUSH].items():
        outs, pulls, backs = (sorted(stages[name].get(key, [])) for name in (COPY_OUT, PULL, COPY_IN))
        pushes.sort()
        begins = [_NEVER, *(start for start, _, _ in pushes), -_NEVER]
        for k, (start, end, nbytes) in enumerate(pushes):
            after, until = begins[k], begins[k + 2]
            pull = next((p for p in pulls if end - _RESOLUTION_NS <= p[0] < until), None)
            if pull is None:
                lost += 1
                continue
            out = next((o for o in reversed(outs) if after < o[0] and o[1] <= start + _RESOLUTION_NS), (start, start))
            back = next((b for b in backs if pull[1] - _RESOLUTION_NS <= b[0] < until), (pull[1], pull[1]))
            parts.append(Part(*key, nbytes, out[:2], (start, end), pull[:2], back[:2]))
    return sorted(parts, key=lambda part: (part.out, part.key)), lost


class Partitions:
    """The partitions of a capture, step by step. ``traces``: the workers', all on one clock with the ``servers``'."""

    def __init__(self, traces: Sequence[RankTrace], servers: Sequence[RankTrace] = ()) -> None:
        self.traces = traces
        self.warnings: list[str] = []
        self._steps: dict[int, list[list[Part]]] = {}  # per worker
        self._bounds: dict[int, int] = {}
        sizes: dict[Key, int] = {}
        ranks = [t.meta.rank if t.meta.rank >= 0 else i for i, t in enumerate(traces)]
        for worker, trace in enumerate(traces):
            read, lost = read_parts(trace)
            if lost:
                self.warnings.append(f"rank {ranks[worker]}: {lost} push(es) without a pull left out")
            steps = trace.step_at(np.array([part.out[0] for part in read], dtype=np.int64)).tolist()
            for step, part in zip(steps, read, strict=True):
                self._steps.setdefault(step, [[] for _ in traces])[worker].append(part)
                self._bounds[part.tensor] = max(self._bounds.get(part.tensor, 1), part.nbytes)
                sizes[part.key] = max(0, part.nbytes)
        self._steps.pop(-1, None)
        self._job_bytes = byteps.settings(traces[0]).job_bytes
        self._layout = layout_of(traces, ranks, sizes)
        for step, parts in self._steps.items() if servers else ():
            self._steps[step] = with_servers(parts, traces, servers, self._layout)
        self._messages = self._find_messages()
        paces = {link: link_pace(messages) for link, messages in self._messages.items()}
        self._told = {link: found for link, found in paces.items() if found is not None}
        self._paces = self._find_paces()
        if not self._are_orderly():
            self._layout = self._layout.disorderly()

    def add_drafts(self, locals_: Sequence[Local], step: int) -> set[int]:
        """Give every worker a draft for each gradient: all that lies between its OUT and its IN; their ids."""
        made: set[int] = set()
        for worker, local in enumerate(locals_):
            over: dict[int, int] = {}
            for part in self._parts(step, worker):
                over[part.tensor] = max(over.get(part.tensor, _NEVER), part.back[1])
            found = [tensor for tensor in over if tensor in local.outs]
            for tensor in sorted(found, key=lambda t: (local.outs[t].end, t)):
                handed_in, first_in = local.outs[tensor], local.ins.get(tensor)
                start = handed_in.end
                end = max(start, over[tensor] if first_in is None else min(over[tensor], first_in.start))
                run = DraftOp("push_pull", OpKind.LOCAL, CHANNEL, start, end, 0, [handed_in], tensor=tensor)
                if first_in is not None:
                    first_in.after(run)
                    if (
                        not first_in.resource
                    ):  # nobody has to come by: what then passes is a queue's, or of other gradients
                        first_in.start = first_in.end = end
                local.ops.append(run)
                local.buckets.append(DraftBucket([tensor], handed_in, first_in, run))
                made.add(id(run))
        return made

    def add(self, graph: Graph, locals_: Sequence[Local], step: int) -> Added:
        """Ops for the drafts of a step. ``graph.info`` gets what the job is like and what its links did."""
        runs = {
            (worker, bucket.members[0]): bucket.run
            for worker, local in enumerate(locals_)
            for bucket in local.buckets
            if bucket.run is not None
        }
        parts = [
            [
                _within(part, runs[worker, part.tensor].end)
                for part in self._parts(step, worker)
                if (worker, part.tensor) in runs
            ]
            for worker in range(len(locals_))
        ]
        graph.info[INFO] = known = Ps(self._layout, self._bounds, self._told, job_bytes=self._job_bytes)
        graph.info["messages"] = self._facts()
        return add_ops(graph, parts, runs, known, self._paces)

    def _parts(self, step: int, worker: int) -> list[Part]:
        return self._steps[step][worker] if step in self._steps else []

    # -- what the capture says of its links --------------------------------------------------------

    def _find_messages(self) -> dict[str, list[Message]]:
        """What went over each link direction, by its end. A pull can go when it was asked for and all have pushed."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for parts in self._steps.values():
            lasts = last_pushes(parts)
            for worker, mine in enumerate(parts):
                for part in mine:
                    there, back = self._layout.links[worker, self._layout.server(*part.key)]
                    found.setdefault(there, []).append((part.push[1], part.push[0], part.nbytes))
                    ready = min(part.pull[1], max(part.pull[0], lasts[part.key]))
                    found.setdefault(back, []).append((part.pull[1], ready, part.nbytes))
        out: dict[str, list[Message]] = {}
        for link, ends in found.items():
            ends.sort()
            frees = [_NEVER, *(end for end, _, _ in ends)]
            out[link] = [Message(free, *message) for free, message in zip(frees, ends, strict=False)]
        return out

    def _find_paces(self) -> dict[str, float]:
        """ns per byte of every link direction and every copying thread, where sizes are known."""
        copies: dict[str, list[tuple[int, int]]] = {}
        for parts in self._steps.values():
            for rank, mine in zip(self._layout.ranks, parts, strict=True):
                out, into = resources(rank)
                for part in (part for part in mine if part.nbytes > 0):
                    copies.setdefault(out, []).append((part.nbytes, part.out[1] - part.out[0]))
                    copies.setdefault(into, []).append((part.nbytes, part.back[1] - part.back[0]))
        paces = {thread: pace(pairs) for thread, pairs in copies.items()}
        slowest = _SLOWEST_COPY * min(paces.values(), default=0.0)
        paces = {thread: min(found, slowest) for thread, found in paces.items()}
        for link, messages in self._messages.items():
            if link in self._told:
                paces[link] = self._told[link].ns_per_byte
            elif known := [(m.nbytes, m.end - max(m.free, m.ready)) for m in messages if m.nbytes > 0]:
                paces[link] = pace(known)
        return paces

    def _are_orderly(self) -> bool:
        """Whether pulls waited for the pushes that the worker had begun to the same server before it asked.

        A push is through some time before its acknowledgement is back: that much is left out.
        """
        waited = could = 0
        for parts in self._steps.values():
            for worker, mine in enumerate(parts):
                pipes: dict[int, list[Part]] = {}
                for part in mine:
                    pipes.setdefault(self._layout.server(*part.key), []).append(part)
                for server, pipe in pipes.items():
                    there, back = (self._paces.get(link, 0.0) for link in self._layout.links[worker, server])
                    spare = [p.push[1] - p.push[0] - there * max(0, p.nbytes) for p in pipe]
                    slack = max(0.0, float(np.quantile(spare, QUICK))) + _RESOLUTION_NS
                    pipe.sort(key=lambda p: p.push)
                    starts = [p.push[0] for p in pipe]
                    ends = np.maximum.accumulate([p.push[1] for p in pipe]).tolist()
                    for part in pipe:
                        before = bisect_right(starts, part.pull[0] - _RESOLUTION_NS) - 1
                        if before >= 0 and ends[before] - slack > part.pull[0]:
                            could += 1
                            waited += part.pull[1] - back * max(0, part.nbytes) >= ends[before] - slack
        return waited >= _ORDERLY_SHARE * could

    def _facts(self) -> dict[str, Any]:
        """Over all captured steps, in the form of :meth:`dpro.graph.wire.Wire.facts`."""
        links = []
        for name, messages in sorted(self._messages.items()):
            sender, _, receiver = name.removeprefix("link/").partition(">")
            began = [max(m.free, m.ready) for m in messages]
            links.append(
                {
                    "sender": sender,
                    "receiver": receiver,
                    "messages": len(messages),
                    "nbytes": sum(max(0, m.nbytes) for m in messages),
                    "transmit_ns": sum(m.end - at for m, at in zip(messages, began, strict=True)),
                    "queue_ns": sum(at - m.ready for m, at in zip(messages, began, strict=True)),
                    "wait_ns": 0,
                    "pieces": [],
                }
            )
        bounds = [trace.step_bounds for trace in self.traces if trace.steps]
        span = max((int(b[-1, 1] - b[0, 0]) for b in bounds), default=0)
        return {"attributed_share": 1.0, "span_ns": span, "links": links}


def _within(part: Part, limit: int) -> Part:
    """The part with no stage after its gradient was needed (rows of two clocks, or read late)."""
    out, push, pull, back = ((min(start, limit), min(end, limit)) for start, end in part.stages)
    return part._replace(out=out, push=push, pull=pull, back=back)
