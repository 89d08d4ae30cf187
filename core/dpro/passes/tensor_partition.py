"""Tensor partition: into what parts a gradient is cut on its way to the servers and back (dPRO section 5.1; BytePS).

Knows the graph's buckets and, through :mod:`dpro.passes.push_pull`, how parts travel; not who chooses. How parts
overlap, and what one tensor's parts do to another's, is the replay's to say. A bucket is one gradient; its ops lie
between the gradient's OUT and IN on every worker, and an edit touches nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpro.adapter import Knob
from dpro.cost.ps import MODEL, PsModel
from dpro.graph.graph import Bucket, Graph
from dpro.graph.ps_ops import INFO, Ps
from dpro.passes.push_pull import Piece, add_ways
from dpro.trace.byteps import DEFAULT_PARTITION_BYTES, MAX_PARTS, PAGE_BYTES, aligned, cut

#: (tensor id, bytes of a part at most), by tensor.
Cuts = tuple[tuple[int, int], ...]

_MIB = 2**20
#: Bounds, bytes, that are tried by hand.
HAND_TRIED_BYTES = (DEFAULT_PARTITION_BYTES, _MIB, 2 * _MIB, 8 * _MIB, _MIB // 2, 16 * _MIB, _MIB // 4)


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
        totals = [graph.tensors[tensor].nbytes for tensor, _ in candidate]
        pieces = [
            Piece(way, number, size)
            for way, (total, (_, nbytes)) in enumerate(zip(totals, candidate, strict=True))
            for number, size in enumerate(cut(total, nbytes))
        ]
        made = add_ways(graph, [(tensor,) for tensor, _ in candidate], pieces, ps, model)
        for (tensor, _), total, ops in zip(candidate, totals, made, strict=True):
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
