"""Tensor fusion and partition together: gradients that go to their servers as one, and into what parts that is cut
(dPRO section 5.1).

Knows the graph's OUT and IN ops and, through :mod:`dpro.passes.push_pull`, how parts travel; not who chooses. A
what-if: no library that trains with parameter servers fuses gradients, so no knob carries a result into a job.

What goes as one goes when the last of it is ready, under the key of the first, and all of it is back when the last part
is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dpro.adapter import Knob
from dpro.cost.ps import PsModel
from dpro.graph.graph import Bucket, Graph
from dpro.passes.push_pull import Piece, add_ways
from dpro.passes.tensor_fusion import ready_order
from dpro.passes.tensor_partition import HAND_TRIED_BYTES, told
from dpro.trace.byteps import MAX_PARTS, PAGE_BYTES, aligned, cut

#: (tensor ids that go as one, bytes of a part at most), in the order in which they are ready.
Fused = tuple[tuple[tuple[int, ...], int], ...]

_MIB = 2**20
#: Bytes at most that go as one, tried by hand; 0: each gradient by itself.
_HAND_TRIED = (0, 8 * _MIB, 32 * _MIB)


@dataclass
class _Modelled(Bucket):
    """A bucket that this pass has made, and what it went by; a captured one is as it was measured."""

    sizes: tuple[int, ...] = ()
    model: PsModel | None = None


class FusedPartition:
    """Fuse and cut all gradients that are pushed and whose size is known. A candidate is :data:`Fused`."""

    name = "fused_partition"
    knobs: frozenset[Knob] = frozenset()

    def candidates(self, graph: Graph) -> Iterator[Fused]:
        """Runs of the ready order up to a size, in parts up to a size, without repeats."""
        seen: set[Fused] = set()
        for limit in _HAND_TRIED:
            for bound in HAND_TRIED_BYTES[:3]:
                found = tuple((group, aligned(bound)) for group in runs(graph, limit))
                if found and found not in seen and self.legal(graph, found):
                    seen.add(found)
                    yield found

    def legal(self, graph: Graph, candidate: Fused) -> bool:
        """Whether all gradients are in it once, those of one group of one dtype, in whole pages and not too many
        parts."""
        return sorted(t for group, _ in candidate for t in group) == sorted(pushed(graph)) and all(
            len({graph.tensors[t].dtype for t in group}) == 1
            and bound > 0
            and bound % PAGE_BYTES == 0
            and -(-_bytes(graph, group) // bound) <= MAX_PARTS
            for group, bound in candidate
        )

    def apply(self, graph: Graph, candidate: Fused) -> int:
        """Replace the ops of all gradients in it, but for groups that are there already as they would be made now.

        Returns the mark that undoes it. ``graph.info["ps"].bounds`` stays what was captured.

        Raises:
            ValueError: a group that is empty or has a gradient that is not pushed, or parts of less than a byte.
        """
        ps, model = told(graph)
        named = {t for group, _ in candidate for t in group}
        if named - set(pushed(graph)) or any(not group or bound < 1 for group, bound in candidate):
            raise ValueError("gradients that are pushed go together, in parts of at least a byte")
        wanted = {group: tuple(cut(_bytes(graph, group), bound)) for group, bound in candidate}
        mark = graph.mark()
        kept: dict[tuple[int, ...], Bucket] = {}
        others: list[Bucket] = []
        gone: list[int] = []
        for bucket in graph.buckets:
            if named.isdisjoint(bucket.tensors):
                others.append(bucket)
            elif isinstance(bucket, _Modelled) and bucket.model is model and wanted.get(bucket.tensors) == bucket.sizes:
                kept[bucket.tensors] = bucket
            else:
                gone += bucket.ops
        graph.remove_ops(gone)
        new = {group: sizes for group, sizes in wanted.items() if group not in kept}
        pieces = [Piece(way, k, size) for way, sizes in enumerate(new.values()) for k, size in enumerate(sizes)]
        made = add_ways(graph, list(new), pieces, ps, model)
        for (group, sizes), ops in zip(new.items(), made, strict=True):
            kept[group] = _Modelled(group, sum(sizes), ops, sizes=sizes, model=model)
        buckets = [kept[group] for group in wanted]
        graph.set_buckets([*buckets, *others])
        return mark

    def cost(self, graph: Graph, candidate: Fused) -> float:
        """How long the busiest link direction carries all of it, ns."""
        ps, model = told(graph)
        held: dict[str, int] = {}
        for group, bound in candidate:
            for number, size in enumerate(cut(_bytes(graph, group), bound)):
                server = ps.layout.server(group[0], number)
                for worker in range(len(ps.layout.ranks)):
                    for link in ps.layout.links[worker, server]:
                        held[link] = held.get(link, 0) + model.link(link).time_ns(size)
        return float(max(held.values(), default=0))


def pushed(graph: Graph) -> list[int]:
    """Gradients that are pushed and whose size is known, in the order in which they are ready."""
    there = {t for bucket in graph.buckets for t in bucket.tensors if graph.tensors[t].nbytes > 0}
    return [t for t in ready_order(graph) if t in there]


def runs(graph: Graph, limit: int) -> list[tuple[int, ...]]:
    """Runs of the ready order, of one dtype and up to ``limit`` bytes or one gradient."""
    found: list[tuple[int, ...]] = []
    for tensor in pushed(graph):
        last = found[-1] if found else ()
        alike = bool(last) and graph.tensors[last[0]].dtype == graph.tensors[tensor].dtype
        if alike and _bytes(graph, (*last, tensor)) <= limit:
            found[-1] = (*last, tensor)
        else:
            found.append((tensor,))
    return found


def _bytes(graph: Graph, group: tuple[int, ...]) -> int:
    return sum(graph.tensors[t].nbytes for t in group)
