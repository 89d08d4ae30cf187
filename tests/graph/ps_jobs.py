"""Parameter server jobs by hand: a step's graph under a cost model, and the traces that its workers would write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpro.cost.ps import MODEL, PsModel
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Bucket, Graph, OpKind, TensorInfo
from dpro.graph.ps_layout import Layout
from dpro.graph.ps_ops import INFO, Ps, resources
from dpro.passes.push_pull import add_parts
from dpro.replay.engine import replay
from dpro.trace import byteps
from dpro.trace.horovod import SUBMIT, WAIT
from dpro.trace.model import EventKind, Meta, RankTrace, Tensor, TraceBuilder

US = 1_000
FREE = SyncModel(0.0, 0.0)


def layout(workers: int = 2, servers: int = 1, *, orderly: bool = True, credit: int = 0) -> Layout:
    """Every worker has a link of its own to each server."""
    links = {
        (w, s): (f"link/worker{w}>server{s}", f"link/server{s}>worker{w}")
        for w in range(workers)
        for s in range(servers)
    }
    return Layout(tuple(range(workers)), servers, "naive", {}, links, credit, orderly)


def model(
    where: Layout,
    link: SyncModel,
    *,
    copy: SyncModel = FREE,
    add: SyncModel = FREE,
    lags: Mapping[str, float] | None = None,
) -> PsModel:
    """All links alike, all copies alike."""
    threads = [thread for rank in where.ranks for thread in resources(rank)]
    names = {name for pair in where.links.values() for name in pair}
    return PsModel(dict.fromkeys(names, link), dict.fromkeys(threads, copy), add, lags or {})


def ps_graph(
    sizes: Sequence[int],
    bound: int,
    where: Layout,
    costs: PsModel,
    *,
    fwd_ns: int = 0,
    bwd_ns: Sequence[int] | None = None,
    update_ns: int = 0,
    skew_ns: int = 0,
) -> Graph:
    """One host thread per rank: forward, backward and OUT per tensor, IN per tensor, update.

    ``sizes`` by tensor, in the order in which gradients are ready; rank r's forward is ``r · skew_ns`` longer.
    """
    graph = Graph()
    graph.ranks = len(where.ranks)
    graph.tensors = [TensorInfo(f"p{t}", n, "float32", t) for t, n in enumerate(sizes)]
    graph.info.update({INFO: Ps(where, {t: min(n, bound) for t, n in enumerate(sizes)}), MODEL: costs})
    for rank in where.ranks:
        place: dict[str, Any] = {"resource": graph.resource(f"rank{rank}/cpu/main"), "rank": rank}
        last = graph.add_op("forward", OpKind.FORWARD, duration=fwd_ns + rank * skew_ns, **place)
        for t in range(len(sizes)):
            took = bwd_ns[t] if bwd_ns else 0
            last = graph.add_op("backward", OpKind.BACKWARD, duration=took, after=[last], **place)
            last = graph.out_op[rank, t] = graph.add_op("out", OpKind.OUT, tensor=t, after=[last], **place)
        for t in range(len(sizes)):
            last = graph.in_op[rank, t] = graph.add_op("in", OpKind.IN, tensor=t, after=[last], **place)
        graph.add_op("update", OpKind.UPDATE, duration=update_ns, after=[last], **place)
    graph.set_buckets(
        [
            Bucket((t,), n, add_parts(graph, (t,), byteps.cut(n, bound), graph.info[INFO], costs))
            for t, n in enumerate(sizes)
        ]
    )
    return graph


def traces(graphs: Sequence[Graph], *, origin_ns: int = 1_000_000_000, rest_ns: int = 1_000_000) -> list[RankTrace]:
    """What the workers would have captured of these steps, one after another, ``rest_ns`` apart.

    Made from replays: a stage row is where BytePS would have taken its times.
    """
    ranks = graphs[0].info[INFO].layout.ranks
    builders = [TraceBuilder(Meta(rank=rank, world_size=len(ranks), host="here")) for rank in ranks]
    bounds: list[tuple[int, int]] = []
    at = origin_ns
    for number, graph in enumerate(graphs):
        played, arrays = replay(graph), graph.arrays()
        row = {op: i for i, op in enumerate(arrays.ids.tolist())}
        start = {op: int(played.start[i]) + at for op, i in row.items()}
        end = {op: int(played.end[i]) + at for op, i in row.items()}
        bounds.append((at, at + played.makespan_ns + rest_ns))
        for worker, rank in enumerate(ranks):
            _add_rows(builders[worker], graph, rank, number, bounds[-1], start, end)
        at = bounds[-1][1]
    made = []
    for builder in builders:
        trace = builder.freeze(bounds)
        trace.tensors = [Tensor(t.name, (t.nbytes // 4,), t.dtype, t.nbytes, t.ready) for t in graphs[0].tensors]
        trace.meta.extra[byteps.SETTINGS] = {"hash_fn": "naive", "servers": graphs[0].info[INFO].layout.servers}
        made.append(trace)
    return made


def with_wire(told: Sequence[RankTrace], graphs: Sequence[Graph], *, rest_ns: int = 1_000_000) -> list[RankTrace]:
    """The workers' traces of :func:`traces` with the socket calls of their messages, and that of their one server.

    A message has 120 bytes of headers, and is one call at either end: a push when it holds its link, an answer as well.
    """
    ranks = graphs[0].info[INFO].layout.ranks
    server = TraceBuilder(Meta(host="here", source=byteps.SERVER))
    workers = [TraceBuilder(trace.meta) for trace in told]
    moved = dict.fromkeys([(rank, name) for rank in ranks for name in ("push", "pull")], 0)
    at = int(told[0].step_bounds[0, 0])
    for graph in graphs:
        played, arrays = replay(graph), graph.arrays()
        ops = sorted(range(len(arrays.ids)), key=lambda i: (played.end[i], i))
        for i in ops:
            op = int(arrays.ids[i])
            name, rank = graph.name_of(op), int(graph.column("rank")[op])
            if name not in ("push", "pull"):
                continue
            nbytes = int(graph.column("nbytes")[op]) + 120
            start, end = int(played.start[i]) + at, int(played.end[i]) + at
            there, back = f"10.0.0.{rank}:1000", "10.0.1.0:2000"
            stream = f"wire/{there}>{back}" if name == "push" else f"wire/{back}>{there}"
            sender, receiver = (workers[rank], server) if name == "push" else (server, workers[rank])
            more = {"nbytes": nbytes, "offset": moved[rank, name]}
            sender.add("message", EventKind.SEND, stream, start, start + 1, None, **more)
            receiver.add("message", EventKind.RECV, stream, start, end, None, **more)
            moved[rank, name] += nbytes
        at += played.makespan_ns + rest_ns
    out = [trace.joined(builder.freeze([])) for trace, builder in zip(told, workers, strict=True)]
    return [*out, server.freeze([])]


def _add_rows(
    builder: TraceBuilder,
    graph: Graph,
    rank: int,
    number: int,
    bounds: tuple[int, int],
    start: Mapping[int, int],
    end: Mapping[int, int],
) -> None:
    builder.add(f"ProfilerStep#{number}", EventKind.ANNOTATION, "cpu/1", *bounds)
    mine = [op for op in start if graph.column("rank")[op] == rank]
    for op in mine:
        name = graph.name_of(op)
        if name in ("forward", "backward", "update") and end[op] > start[op]:
            builder.add(f"op::{name}", EventKind.CPU_OP, "cpu/1", start[op], end[op])
    for (r, tensor), op in graph.out_op.items():
        if r == rank:
            # inside the op that made it, and right before the one that needs it
            builder.add(SUBMIT, EventKind.ANNOTATION, "cpu/1", end[op] - 1, end[op] - 1, tensor=tensor)
            into = start[graph.in_op[rank, tensor]]
            builder.add(WAIT, EventKind.ANNOTATION, "cpu/1", into - 2, into, tensor=tensor)
    lag = graph.info[MODEL].lag
    after: dict[int, list[int]] = {}
    for a, b in graph.edges().tolist():
        after.setdefault(a, []).append(b)

    def then(op: int, name: str) -> int:
        return next(b for b in after[op] if graph.name_of(b) == name and graph.column("rank")[b] == rank)

    for (r, tensor), out in graph.out_op.items():
        if r != rank:
            continue
        for part, copied in enumerate(sorted(b for b in after[out] if graph.name_of(b) == "copy out")):
            more = {"tensor": tensor, "flow": part, "nbytes": int(graph.column("nbytes")[copied])}
            push = then(copied, "push")
            known = then(push, "acknowledge")
            pull = then(then(known, "ask"), "pull")
            back = then(pull, "copy in")
            for name, begin, over in (
                (byteps.COPY_OUT, start[copied], end[copied]),
                (byteps.PUSH, end[copied] + lag("push"), end[known]),
                (byteps.PULL, end[known] + lag("ask"), end[pull]),
                (byteps.COPY_IN, start[back], end[back]),
            ):
                builder.add(name, EventKind.ANNOTATION, name, begin, over, None, **more)


def column(graph: Graph, name: str, key: str, rank: int | None = None) -> list[int]:
    """A column of the ops called ``name``, in the order of their ids."""
    ids = np.flatnonzero(graph.column("alive")).tolist()
    found = [op for op in ids if graph.name_of(op) == name and rank in (None, graph.column("rank")[op])]
    return [int(graph.column(key)[op]) for op in found]
