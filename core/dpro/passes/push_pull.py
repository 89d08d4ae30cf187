"""The way of gradients to their servers and back, part by part: the ops of it (BytePS).

Knows the graph's OUT and IN ops, the job's layout (``graph.info["ps"]``) and the cost model; not who chose the parts.
Made in columns, not op by op: a search makes those of a job of 16 workers, 20,000 and more, for each candidate.

* Every part is copied out, pushed, added up, asked for, pulled and copied in, each stage on a resource that serves in
  the order in which it is asked.
* Acknowledgements and questions take no time of a link, but go behind what was handed to it before
  (:attr:`~dpro.graph.ps_layout.Layout.orderly`).
* On a link that two hosts' workers and servers share, what a worker sends goes before what a server sends: a question
  is not kept waiting by another's answers. Each keeps its own order.
* A part's server follows from its key, as BytePS has it; a tensor that is cut anew keeps its declared index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpro.cost.ps import PsModel
from dpro.cost.sync import SyncModel
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.graph.ps_layout import Layout
from dpro.graph.ps_ops import Ps, engine, resources

_Ids = npt.NDArray[np.int64]
#: What servers send, where a worker sends over the same link.
_SERVERS_TURN = 1
#: Ops of a part for each worker before "summed", and after it.
_THERE, _BACK = ("copy out", "push", "sum", "acknowledge", "ask"), ("pull", "copy in")


class Piece(NamedTuple):
    """A part: of which of the ways, the how manieth of it, its bytes, its server, and which parts (their places) a
    worker has to be through with before it copies this one out.

    ``server`` -1: as its key says.
    """

    way: int
    number: int
    nbytes: int
    server: int = -1
    waits: Sequence[int] = ()


def add_parts(graph: Graph, tensors: Sequence[int], sizes: Sequence[int], ps: Ps, model: PsModel) -> tuple[int, ...]:
    """:func:`add_ways` of gradients that go as one in parts of ``sizes`` bytes; its ops."""
    return add_ways(graph, [tensors], [Piece(0, number, size) for number, size in enumerate(sizes)], ps, model)[0]


def add_ways(
    graph: Graph, ways: Sequence[Sequence[int]], pieces: Sequence[Piece], ps: Ps, model: PsModel
) -> list[tuple[int, ...]]:
    """Add the ops of ``pieces``, in this order, between OUT and IN ops.

    Args:
        ways: gradients that go as one under the key of the first, each gradient in one of them.

    Returns the ops of each way; its last one is where all workers have all of it.
    """
    if not ways:
        return []
    made = _Made(graph, ways, pieces, ps.layout, model)
    made.add()
    return made.ops_by_way()


class _Made:
    """Of one call of :func:`add_ways`. Rows are ways, then parts; columns are workers, by their place in the layout."""

    def __init__(
        self, graph: Graph, ways: Sequence[Sequence[int]], pieces: Sequence[Piece], layout: Layout, model: PsModel
    ) -> None:
        self.graph, self.ways, self.pieces, self.layout, self.model = graph, ways, pieces, layout, model
        self.ranks = np.array(layout.ranks, dtype=np.int64)
        self.tensor = np.array([way[0] for way in ways], dtype=np.int64)
        #: which workers have a way's gradients
        self.here = np.array([[(rank, way[0]) in graph.out_op for rank in layout.ranks] for way in ways], dtype=bool)
        self.way = np.array([piece.way for piece in pieces], dtype=np.int64)
        self._found: list[tuple[_Ids, _Ids]] = []

    def add(self) -> None:
        there = self._gathered()
        copied_in, copied_out = self._parts(there)
        self._ordered(copied_in, copied_out)
        self._ends(copied_in)

    def ops_by_way(self) -> list[tuple[int, ...]]:
        """In the order in which they were made."""
        ops, way = (np.concatenate(some) for some in zip(*self._found, strict=True))
        order = np.argsort(way, kind="stable")
        cuts = np.searchsorted(way[order], np.arange(1, len(self.ways)))
        return [tuple(some.tolist()) for some in np.split(ops[order], cuts)]

    def _gathered(self) -> _Ids:
        """By way and worker the op with which all of it is there, -1: the worker has none of it."""
        out_op = self.graph.out_op
        there = np.full(self.here.shape, -1, dtype=np.int64)
        for row, way in enumerate(self.ways):
            for at, rank in enumerate(self.layout.ranks):
                outs = [out_op[rank, tensor] for tensor in way if (rank, tensor) in out_op]
                if self.here[row, at]:
                    there[row, at] = outs[0] if len(outs) == 1 else self._one("gathered", row, rank, outs)
        return there

    def _one(self, name: str, way: int, rank: int, after: list[int]) -> int:
        op = self.graph.add_op(name, OpKind.LOCAL, rank=rank, tensor=int(self.tensor[way]), after=after)
        self._found.append((np.array([op]), np.array([way])))
        return op

    def _parts(self, there: _Ids) -> tuple[_Ids, _Ids]:
        """The ops of all parts; by part and worker those with which one is copied in, and out."""
        graph, layout, model = self.graph, self.layout, self.model
        sizes = np.array([piece.nbytes for piece in self.pieces], dtype=np.int64)
        tensors = self.tensor[self.way]
        servers = np.array(
            [
                layout.server(tensor, piece.number) if piece.server < 0 else piece.server
                for tensor, piece in zip(tensors.tolist(), self.pieces, strict=True)
            ],
            dtype=np.int64,
        )
        self._number(dict.fromkeys(servers.tolist()))
        here = self.here[self.way]
        many = here.sum(axis=1)
        ends = np.cumsum((len(_THERE) + len(_BACK)) * many + 1)
        part, worker = np.nonzero(here)
        turn = (np.cumsum(here, axis=1) - 1)[part, worker]  # among the workers that have it
        first = np.concatenate([[0], ends[:-1]])
        summed = first + len(_THERE) * many
        rows: dict[str, _Ids] = {name: first[part] + len(_THERE) * turn + k for k, name in enumerate(_THERE)}
        rows |= {name: summed[part] + 1 + len(_BACK) * turn + k for k, name in enumerate(_BACK)}

        size, server, count = sizes[part], servers[part], int(ends[-1]) if len(ends) else 0
        pairs = worker * layout.servers + server
        ways_there, ways_back = self._links()
        shared = np.isin(ways_back.resource, ways_there.resource)[pairs]
        copies = [self._table([resources(rank)[k] for rank in layout.ranks], model.copy) for k in (0, 1)]
        engines = np.array([graph.resource(engine(s)) for s in range(layout.servers)], dtype=np.int64)
        columns = {
            key: np.full(count, value, dtype=np.int64)
            for key, value in {
                "resource": NO_RESOURCE, "duration": 0, "gap": 0, "priority": 0, "rank": -1, "nbytes": -1,
                "name": graph.name("summed"), "kind": OpKind.LOCAL,
            }.items()
        }  # fmt: skip

        def fill(name: str, **values: Any) -> None:
            for key, value in {"name": graph.name(name), "rank": self.ranks[worker], **values}.items():
                columns[key][rows[name]] = value

        pushes = {"resource": ways_there.resource[pairs], "duration": ways_there.time_ns(pairs, size), "nbytes": size}
        pulls = {"resource": ways_back.resource[pairs], "duration": ways_back.time_ns(pairs, size), "nbytes": size}
        turns = np.where(shared, _SERVERS_TURN, 0)
        declared = np.array([layout.priority(tensor) for tensor in self.tensor.tolist()], dtype=np.int64)
        columns["gap"][summed] = model.lag("sum")
        fill(
            "copy out", resource=copies[0].resource[worker], duration=copies[0].time_ns(worker, size), nbytes=size,
            gap=model.lag("out"), priority=declared[self.way[part]],
        )  # fmt: skip
        fill("push", kind=OpKind.SEND, gap=model.lag("push"), **pushes)
        added_ns = np.rint(model.sums.latency_ns + model.sums.ns_per_byte * size)
        fill("sum", rank=-1, resource=engines[server], duration=added_ns, nbytes=size)
        fill("acknowledge", gap=model.lag("acknowledge"), priority=turns)
        fill("ask", gap=model.lag("ask"))
        fill("pull", kind=OpKind.RECV, gap=model.lag("pull"), priority=turns, **pulls)
        fill(
            "copy in", resource=copies[1].resource[worker], duration=copies[1].time_ns(worker, size), nbytes=size,
            gap=model.lag("in"),
        )  # fmt: skip
        if layout.orderly:
            columns["resource"][rows["ask"]] = pushes["resource"]
            columns["resource"][rows["acknowledge"]] = pulls["resource"]

        columns["tensor"] = np.repeat(tensors, np.diff(ends, prepend=0))
        names, kinds = columns.pop("name").astype(np.int32), columns.pop("kind").astype(np.uint8)
        ids = graph.add_ops(names, kinds, count, **columns)
        self._found.append((ids, np.repeat(self.way, np.diff(ends, prepend=0))))
        copied, pushed, added, known, asked, pulled, back = (ids[rows[name]] for name in (*_THERE, *_BACK))
        joint = ids[summed][part] if count else ids
        self._edges(there[self.way[part], worker], copied)
        for before, after in (
            (copied, pushed), (pushed, added), (pushed, known), (known, asked), (added, joint), (asked, pulled),
            (joint, pulled), (pulled, back),
        ):  # fmt: skip
            self._edges(before, after)
        copied_in, copied_out = (np.full(here.shape, -1, dtype=np.int64) for _ in range(2))
        copied_in[part, worker], copied_out[part, worker] = back, copied
        return copied_in, copied_out

    def _number(self, servers: Iterable[int]) -> None:
        """Have resources numbered in the order in which a part meets them: ties go by it."""
        graph, layout = self.graph, self.layout
        for server in servers:
            for worker, rank in enumerate(layout.ranks):
                there, back = layout.links[worker, server]
                for name in (resources(rank)[0], there, engine(server), *([back] if layout.orderly else [])):
                    graph.resource(name)
            for worker, rank in enumerate(layout.ranks):
                graph.resource(layout.back(worker, server))
                graph.resource(resources(rank)[1])

    def _ordered(self, copied_in: _Ids, copied_out: _Ids) -> None:
        """What parts wait for."""
        waits = [(earlier, place) for place, piece in enumerate(self.pieces) for earlier in piece.waits]
        if waits:
            before, after = np.array(waits, dtype=np.int64).T
            both = (copied_in[before] >= 0) & (copied_out[after] >= 0)
            self._edges(copied_in[before][both], copied_out[after][both])

    def _ends(self, copied_in: _Ids) -> None:
        """Where a worker has all of a way, and where all have."""
        graph = self.graph
        way, worker = np.nonzero(self.here)
        pulled = np.full(self.here.shape, -1, dtype=np.int64)
        tensor, rank = self.tensor[way], self.ranks[worker]
        ids = graph.add_ops("pulled", OpKind.RECV, len(way), tensor=tensor, rank=rank)
        pulled[way, worker] = ids
        self._found.append((ids, way))
        part, of = np.nonzero(copied_in >= 0)
        self._edges(copied_in[part, of], pulled[self.way[part], of])
        users = [
            (int(pulled[row, at]), graph.in_op[rank, tensor])
            for row, tensors in enumerate(self.ways)
            for at, rank in enumerate(self.layout.ranks)
            if self.here[row, at]
            for tensor in tensors
            if (rank, tensor) in graph.in_op
        ]
        if users:
            graph.add_edges(np.array(users, dtype=np.int64))
        nbytes = np.bincount(self.way, [piece.nbytes for piece in self.pieces], minlength=len(self.ways))
        ids = graph.add_ops("push_pull", OpKind.LOCAL, len(self.ways), tensor=self.tensor, nbytes=nbytes)
        self._found.append((ids, np.arange(len(self.ways))))
        self._edges(pulled[way, worker], ids[way])

    def _edges(self, before: _Ids, after: _Ids) -> None:
        self.graph.add_edges(np.stack([before, after], axis=1))

    def _links(self) -> tuple[_Table, _Table]:
        """By worker times servers plus server."""
        servers = range(self.layout.servers)
        pairs = [self.layout.links[worker, s] for worker in range(len(self.ranks)) for s in servers]
        there, back = (self._table([pair[k] for pair in pairs], self.model.link) for k in (0, 1))
        return there, back

    def _table(self, names: Sequence[str], line: Callable[[str], SyncModel]) -> _Table:
        known = {name: line(name) for name in dict.fromkeys(names)}
        return _Table(
            np.array([self.graph.resource(name) for name in names], dtype=np.int64),
            np.array([known[name].latency_ns for name in names]),
            np.array([known[name].ns_per_byte for name in names]),
        )


class _Table(NamedTuple):
    """Resources, and how long they are held (:class:`~dpro.cost.sync.SyncModel`)."""

    resource: _Ids
    latency_ns: npt.NDArray[np.float64]
    ns_per_byte: npt.NDArray[np.float64]

    def time_ns(self, at: _Ids, nbytes: _Ids) -> _Ids:
        times: _Ids = np.rint(self.latency_ns[at] + self.ns_per_byte[at] * nbytes).astype(np.int64)
        return times
