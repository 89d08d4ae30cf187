"""Tensor partition: into what parts a gradient is cut on its way to the servers and back (dPRO section 5.1; BytePS).

Knows the graph's OUT and IN ops, the job's layout (``graph.info["ps"]``) and the cost model
(``graph.info["ps_model"]``, :class:`~dpro.cost.ps.PsModel`); not who chooses. Every part is copied out, pushed, added
up, asked for, pulled and copied in, each stage on a resource that serves in the order in which it is asked: how parts
overlap, and what one tensor's parts do to another's, is the replay's to say.

* A bucket is one gradient; its ops lie between the gradient's OUT and IN on every worker, and an edit touches nothing
  else.
* Acknowledgements and questions take no time of a link, but go behind what was handed to it before
  (:attr:`~dpro.graph.ps_layout.Layout.orderly`).
* On a link that two hosts' workers and servers share, what a worker sends goes before what a server sends: a question
  is not kept waiting by another's answers. Each keeps its own order.
* A part's server follows from its key, as BytePS has it; a tensor that is cut anew keeps its declared index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dpro.adapter import Knob
from dpro.cost.ps import MODEL, PsModel
from dpro.graph.graph import NO_RESOURCE, Bucket, Graph, OpKind
from dpro.graph.ps_ops import INFO, Ps, engine, resources
from dpro.trace.byteps import DEFAULT_PARTITION_BYTES, MAX_PARTS, PAGE_BYTES, aligned, cut

#: (tensor id, bytes of a part at most), by tensor.
Cuts = tuple[tuple[int, int], ...]

_MIB = 2**20
#: Bounds, bytes, that are tried by hand.
HAND_TRIED_BYTES = (DEFAULT_PARTITION_BYTES, _MIB, 2 * _MIB, 8 * _MIB, _MIB // 2, 16 * _MIB, _MIB // 4)
#: What servers send, where a worker sends over the same link.
_SERVERS_TURN = 1


class TensorPartition:
    """Cut gradients anew. A candidate is :data:`Cuts`; tensors that it does not name stay as they are."""

    name = "tensor_partition"
    knobs = frozenset({Knob.PARTITIONS, Knob.PARTITION_BOUND, Knob.PARTITION_BYTES})

    def candidates(self, graph: Graph) -> Iterator[Cuts]:
        """One bound for all, without repeats: BytePS's own, and a few others."""
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for bound in HAND_TRIED_BYTES:
            found = uniform(graph, aligned(bound))
            parts = tuple(tuple(cut(graph.tensors[t].nbytes, n)) for t, n in found)
            if found and parts not in seen and self.legal(graph, found):
                seen.add(parts)
                yield found

    def legal(self, graph: Graph, candidate: Cuts) -> bool:
        """Whether BytePS can cut so: gradients of known size, each once, whole pages, not more parts than keys."""
        known = dict(captured(graph))
        tensors = [tensor for tensor, _ in candidate]
        return len(set(tensors)) == len(tensors) and all(
            tensor in known
            and nbytes > 0
            and nbytes % PAGE_BYTES == 0
            and 0 < -(-graph.tensors[tensor].nbytes // nbytes) <= MAX_PARTS
            for tensor, nbytes in candidate
        )

    def apply(self, graph: Graph, candidate: Cuts) -> int:
        """Replace the ops of the candidate's gradients; returns the mark that undoes it.

        ``graph.info["ps"].bounds`` stays what was captured.

        Raises:
            ValueError: a tensor that is no bucket of its own, or parts of less than a byte.
        """
        ps, model = told(graph)
        place = {bucket.tensors[0]: i for i, bucket in enumerate(graph.buckets) if len(bucket.tensors) == 1}
        if any(tensor not in place or nbytes < 1 for tensor, nbytes in candidate):
            raise ValueError("a gradient that is pushed is cut into parts of at least a byte")
        mark = graph.mark()
        graph.remove_ops([op for tensor, _ in candidate for op in graph.buckets[place[tensor]].ops])
        buckets = list(graph.buckets)
        for tensor, nbytes in candidate:
            total = graph.tensors[tensor].nbytes
            ops = add_parts(graph, (tensor,), cut(total, nbytes), ps, model)
            buckets[place[tensor]] = Bucket((tensor,), total, ops)
        graph.set_buckets(buckets)
        return mark

    def cost(self, graph: Graph, candidate: Cuts) -> float:
        """How long the busiest link direction carries what the candidate's gradients are cut into, ns."""
        ps, model = told(graph)
        held: dict[str, int] = {}
        for tensor, nbytes in candidate:
            for number, size in enumerate(cut(graph.tensors[tensor].nbytes, nbytes)):
                server = ps.layout.server(tensor, number)
                for worker in range(len(ps.layout.ranks)):
                    for link in ps.layout.links[worker, server]:
                        held[link] = held.get(link, 0) + model.link(link).time_ns(size)
        return float(max(held.values(), default=0))


def add_parts(graph: Graph, tensors: Sequence[int], sizes: Sequence[int], ps: Ps, model: PsModel) -> tuple[int, ...]:
    """Add the way of gradients that go as one to the servers and back, in parts of ``sizes`` bytes, between their OUT
    and their IN ops.

    Returns its ops; the last one is where all workers have them.
    """
    way = Way(graph, tensors, ps, model)
    for number, size in enumerate(sizes):
        way.add_part(number, size)
    way.add_ends(sum(sizes))
    return tuple(way.ops)


class Way:
    """Adds the ops of one gradient, or of several that go as one under the first one's key, part by part."""

    def __init__(self, graph: Graph, tensors: Sequence[int], ps: Ps, model: PsModel) -> None:
        self.graph, self.tensors, self.tensor, self.layout, self.model = graph, tensors, tensors[0], ps.layout, model
        ranks = enumerate(self.layout.ranks)
        self.workers = [(worker, rank) for worker, rank in ranks if (rank, self.tensor) in graph.out_op]
        links = self.layout.links.values()
        #: links over which workers as well as servers send
        self.shared = {there for there, _ in links} & {back for _, back in links}
        self.ops: list[int] = []
        self.copied_in: dict[int, list[int]] = {rank: [] for _, rank in self.workers}
        #: by rank the op with which all of it is there
        self.there = {rank: self._gathered(rank) for _, rank in self.workers}

    def _gathered(self, rank: int) -> int:
        outs = [self.graph.out_op[rank, t] for t in self.tensors if (rank, t) in self.graph.out_op]
        return outs[0] if len(outs) == 1 else self._add("gathered", OpKind.LOCAL, rank, outs)

    def add_part(
        self, number: int, size: int, after: Mapping[int, Sequence[int]] | None = None, server: int | None = None
    ) -> dict[int, int]:
        """The ops of one part; for each rank the one that ends it.

        Args:
            after: ops that a rank has to be through with before it copies the part out.
            server: which has it; as its key says if not given.
        """
        layout, model = self.layout, self.model
        server = layout.server(self.tensor, number) if server is None else server
        ended: dict[int, int] = {}
        sums: list[int] = []
        asked: list[int] = []
        for worker, rank in self.workers:
            there, back = layout.links[worker, server]
            thread = resources(rank)[0]
            copied = self._add(
                "copy out", OpKind.LOCAL, rank,
                [self.there[rank], *(after or {}).get(rank, ())], thread,
                model.copy(thread).time_ns(size), "out", size, layout.priority(self.tensor),
            )  # fmt: skip
            push = self._add("push", OpKind.SEND, rank, [copied], there, model.link(there).time_ns(size), "push", size)
            took = model.sums.time_ns(size)
            sums.append(self._add("sum", OpKind.LOCAL, -1, [push], engine(server), took, nbytes=size))
            turn = _SERVERS_TURN if back in self.shared else 0
            pipes = (there, back) if layout.orderly else ("", "")
            known = self._add("acknowledge", OpKind.LOCAL, rank, [push], pipes[1], lag="acknowledge", priority=turn)
            asked.append(self._add("ask", OpKind.LOCAL, rank, [known], pipes[0], lag="ask"))
        summed = self._add("summed", OpKind.LOCAL, -1, sums, lag="sum")
        for (worker, rank), ask in zip(self.workers, asked, strict=True):
            back, thread = layout.back(worker, server), resources(rank)[1]
            turn, took = _SERVERS_TURN if back in self.shared else 0, model.link(back).time_ns(size)
            pull = self._add("pull", OpKind.RECV, rank, [ask, summed], back, took, "pull", size, turn)
            took = model.copy(thread).time_ns(size)
            ended[rank] = self._add("copy in", OpKind.LOCAL, rank, [pull], thread, took, "in", size)
            self.copied_in[rank].append(ended[rank])
        return ended

    def add_ends(self, nbytes: int) -> None:
        ends = []
        for rank, copies in self.copied_in.items():
            ends.append(self._add("pulled", OpKind.RECV, rank, copies))
            for tensor in self.tensors:
                if (rank, tensor) in self.graph.in_op:
                    self.graph.add_edge(ends[-1], self.graph.in_op[rank, tensor])
        self._add("push_pull", OpKind.LOCAL, -1, ends, nbytes=nbytes)

    def _add(
        self,
        name: str,
        kind: OpKind,
        rank: int,
        after: list[int],
        resource: str = "",
        time_ns: int = 0,
        lag: str = "",
        nbytes: int = -1,
        priority: int = 0,
    ) -> int:
        op = self.graph.add_op(
            name, kind, resource=self.graph.resource(resource) if resource else NO_RESOURCE, duration=time_ns,
            gap=self.model.lag(lag), priority=priority, tensor=self.tensor, rank=rank, nbytes=nbytes, after=after,
        )  # fmt: skip
        self.ops.append(op)
        return op


def captured(graph: Graph) -> Cuts:
    """The cuts in force, of all gradients that are pushed and whose size is known."""
    ps = graph.info.get(INFO)
    if not isinstance(ps, Ps):
        return ()
    tensors = sorted(bucket.tensors[0] for bucket in graph.buckets if len(bucket.tensors) == 1)
    return tuple((t, ps.bounds[t]) for t in tensors if t in ps.bounds and graph.tensors[t].nbytes > 0)


def own(graph: Graph) -> Cuts:
    """The job's own cuts: those in force, unless it was recorded under others."""
    in_force, ps = captured(graph), graph.info.get(INFO)
    if not isinstance(ps, Ps) or not ps.job_bytes:
        return in_force
    jobs = uniform(graph, ps.job_bytes)
    sizes = [[cut(graph.tensors[t].nbytes, n) for t, n in cuts] for cuts in (jobs, in_force)]
    return in_force if sizes[0] == sizes[1] else jobs


def uniform(graph: Graph, nbytes: int) -> Cuts:
    """One bound for all gradients."""
    return tuple((tensor, nbytes) for tensor, _ in captured(graph))


def told(graph: Graph) -> tuple[Ps, PsModel]:
    """What the graph of a parameter server job says of it, and what its cost model is."""
    ps, model = graph.info[INFO], graph.info[MODEL]
    assert isinstance(ps, Ps) and isinstance(model, PsModel)
    return ps, model
