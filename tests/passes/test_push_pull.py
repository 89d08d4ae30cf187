"""The ops of parts, made in columns, against the same made one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.ps import PsModel
from dpro.cost.sync import SyncModel
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.graph.ps_layout import Layout
from dpro.graph.ps_ops import INFO, Ps, engine, resources
from dpro.passes.push_pull import Piece, add_parts, add_ways
from dpro.replay.engine import replay
from tests.graph.ps_jobs import ps_graph

PAGE = 4096


class OneByOne:
    """The oracle: a way's ops, part by part."""

    def __init__(self, graph: Graph, tensors: Sequence[int], layout: Layout, model: PsModel) -> None:
        self.graph, self.tensors, self.layout, self.model = graph, tensors, layout, model
        self.ops: list[int] = []
        self.there: dict[int, int] = {}
        for rank in layout.ranks:
            outs = [graph.out_op[rank, t] for t in tensors if (rank, t) in graph.out_op]
            if (rank, tensors[0]) in graph.out_op:
                self.there[rank] = outs[0] if len(outs) == 1 else self.add("gathered", OpKind.LOCAL, rank, outs)
        self.copied_in: dict[int, list[int]] = {rank: [] for rank in self.there}

    def part(self, piece: Piece, after: Mapping[int, Sequence[int]]) -> dict[int, int]:
        layout, model, size = self.layout, self.model, piece.nbytes
        server = layout.server(self.tensors[0], piece.number) if piece.server < 0 else piece.server
        shared = {a for a, _ in layout.links.values()} & {b for _, b in layout.links.values()}
        sums, asked, ended = [], {}, {}
        for worker, rank in enumerate(layout.ranks):
            if rank not in self.there:
                continue
            there, back = layout.links[worker, server]
            thread = resources(rank)[0]
            copied = self.add(
                "copy out", OpKind.LOCAL, rank, [self.there[rank], *after.get(rank, ())], resource=thread,
                duration=model.copy(thread).time_ns(size), gap=model.lag("out"), nbytes=size,
                priority=layout.priority(self.tensors[0]),
            )  # fmt: skip
            took = model.link(there).time_ns(size)
            lag = model.lag("push")
            push = self.add("push", OpKind.SEND, rank, [copied], resource=there, duration=took, gap=lag, nbytes=size)
            took = model.sums.time_ns(size)
            sums.append(self.add("sum", OpKind.LOCAL, -1, [push], resource=engine(server), duration=took, nbytes=size))
            pipes = (there, back) if layout.orderly else ("", "")
            known = self.add(
                "acknowledge", OpKind.LOCAL, rank, [push], resource=pipes[1], gap=model.lag("acknowledge"),
                priority=int(back in shared),
            )  # fmt: skip
            asked[rank] = self.add("ask", OpKind.LOCAL, rank, [known], resource=pipes[0], gap=model.lag("ask"))
        summed = self.add("summed", OpKind.LOCAL, -1, sums, gap=model.lag("sum"))
        for rank, ask in asked.items():
            back, thread = layout.links[layout.ranks.index(rank), server][1], resources(rank)[1]
            pull = self.add(
                "pull", OpKind.RECV, rank, [ask, summed], resource=back, duration=model.link(back).time_ns(size),
                gap=model.lag("pull"), nbytes=size, priority=int(back in shared),
            )  # fmt: skip
            ended[rank] = self.add(
                "copy in", OpKind.LOCAL, rank, [pull], resource=thread, duration=model.copy(thread).time_ns(size),
                gap=model.lag("in"), nbytes=size,
            )  # fmt: skip
            self.copied_in[rank].append(ended[rank])
        return ended

    def end(self, nbytes: int) -> None:
        ends = []
        for rank, copies in self.copied_in.items():
            ends.append(self.add("pulled", OpKind.RECV, rank, copies))
            for t in self.tensors:
                if (rank, t) in self.graph.in_op:
                    self.graph.add_edge(ends[-1], self.graph.in_op[rank, t])
        self.add("push_pull", OpKind.LOCAL, -1, ends, nbytes=nbytes)

    def add(self, name: str, kind: OpKind, rank: int, after: list[int], resource: str = "", **columns: Any) -> int:
        where = self.graph.resource(resource) if resource else NO_RESOURCE
        op = self.graph.add_op(
            name, kind, rank=rank, after=after, resource=where, tensor=self.tensors[0], **columns
        )  # fmt: skip
        self.ops.append(op)
        return op


def one_by_one(
    graph: Graph, ways: Sequence[Sequence[int]], pieces: Sequence[Piece], ps: Ps, model: PsModel
) -> list[tuple[int, ...]]:
    made = [OneByOne(graph, way, ps.layout, model) for way in ways]
    ended: list[dict[int, int]] = []
    for piece in pieces:
        after: dict[int, list[int]] = {}
        for earlier in piece.waits:
            for rank, op in ended[earlier].items():
                after.setdefault(rank, []).append(op)
        ended.append(made[piece.way].part(piece, after))
    for k, way in enumerate(made):
        way.end(sum(piece.nbytes for piece in pieces if piece.way == k))
    return [tuple(way.ops) for way in made]


def rows(graph: Graph) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """What ops and edges are, whatever their ids."""
    keys = ("kind", "duration", "gap", "priority", "tensor", "rank", "nbytes")
    columns = [graph.column(key).tolist() for key in keys]
    where = graph.column("resource").tolist()
    told = {
        op: (graph.name_of(op), graph.resource_names[where[op]] if where[op] >= 0 else "", *(c[op] for c in columns))
        for op in np.flatnonzero(graph.column("alive")).tolist()
    }
    return sorted(told.values()), sorted((told[a], told[b]) for a, b in graph.edges().tolist())


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Graph, list[list[int]], list[Piece], PsModel]:
    """A job without its gradients' ways, the ways, and their parts in some order."""
    whole = st.integers(0, 9)
    workers, servers = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    shared = draw(st.booleans())  # each worker's host has a server, and both send over its one link
    links = {
        (w, s): (f"link/{w}>*", f"link/{s}>*") if shared else (f"link/{w}>{s}", f"link/{s}>{w} back")
        for w in range(workers)
        for s in range(servers)
    }
    where = Layout(
        tuple(range(workers)), servers, "djb2", {0: 2, 1: 0}, links, draw(st.integers(0, 1)), draw(st.booleans())
    )
    threads = [thread for rank in where.ranks for thread in resources(rank)]
    names = sorted({name for pair in links.values() for name in pair})
    lags = {what: float(draw(whole)) for what in ("out", "push", "acknowledge", "ask", "sum", "pull", "in")}
    line = st.builds(SyncModel, st.floats(0, 9), st.floats(0, 2))
    model = PsModel({n: draw(line) for n in names}, {t: draw(line) for t in threads}, draw(line), lags)
    tensors = draw(st.integers(1, 4))
    graph = ps_graph([PAGE] * tensors, PAGE, where, model, bwd_ns=draw(st.lists(whole, min_size=4, max_size=4)))
    graph.remove_ops([op for bucket in graph.buckets for op in bucket.ops])
    lone = draw(st.integers(0, tensors - 1))  # a gradient that the first worker may not have
    if workers > 1 and draw(st.booleans()):
        del graph.out_op[0, lone], graph.in_op[0, lone]
    cut_at = draw(st.integers(1, tensors))
    ways = [list(range(cut_at)), *([[*range(cut_at, tensors)]] if cut_at < tensors else [])]
    pieces: list[Piece] = []
    for place in range(draw(st.integers(len(ways), 6))):
        way = place if place < len(ways) else draw(st.integers(0, len(ways) - 1))
        number = sum(piece.way == way for piece in pieces)
        waits = draw(st.lists(st.integers(0, place - 1), unique=True, max_size=2)) if place else []
        pieces.append(Piece(way, number, draw(st.integers(1, 99)), draw(st.integers(-1, servers - 1)), waits))
    return graph, ways, pieces, model


@settings(deadline=None)
@given(jobs())
def test_columns_make_the_ops_that_are_made_one_by_one(
    job: tuple[Graph, list[list[int]], list[Piece], PsModel],
) -> None:
    graph, ways, pieces, model = job
    ps = graph.info[INFO]
    before, mark = rows(graph), graph.mark()
    wanted_ops = one_by_one(graph, ways, pieces, ps, model)
    wanted, wanted_ns = rows(graph), replay(graph).makespan_ns
    graph.undo(mark)
    assert rows(graph) == before
    ops = add_ways(graph, ways, pieces, ps, model)
    assert rows(graph) == wanted
    assert replay(graph).makespan_ns == wanted_ns
    assert [len(some) for some in ops] == [len(some) for some in wanted_ops]
    assert [graph.name_of(some[-1]) for some in ops] == ["push_pull"] * len(ways)
    graph.undo(mark)
    assert rows(graph) == before


def test_no_ways_are_no_ops() -> None:
    where = Layout((0,), 1, "naive", {}, {(0, 0): ("there", "back")})
    graph = ps_graph([PAGE], PAGE, where, PsModel({}))
    count = len(graph)
    assert add_ways(graph, [], [], graph.info[INFO], PsModel({})) == []
    assert len(graph) == count


def test_a_part_by_hand() -> None:
    """One worker: copied out, pushed, added, asked for and pulled, copied in: seven ops, their joint and two ends."""
    where = Layout((0,), 1, "naive", {}, {(0, 0): ("there", "back")})
    line = SyncModel(1.0, 0.5)
    model = PsModel({"there": line, "back": line}, {}, SyncModel(0.0, 0.25))
    graph = ps_graph([8], 8, where, model)
    graph.remove_ops(list(graph.buckets[0].ops))
    ops = add_parts(graph, (0,), [8], graph.info[INFO], model)
    assert [graph.name_of(op) for op in ops] == [
        "copy out", "push", "sum", "acknowledge", "ask", "summed", "pull", "copy in", "pulled", "push_pull",
    ]  # fmt: skip
    assert graph.column("duration")[list(ops)].tolist() == [0, 5, 2, 0, 0, 0, 5, 0, 0, 0]
    assert replay(graph).makespan_ns == 5 + 2 + 5
