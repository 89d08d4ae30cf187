"""Op fusion: the ops of a region become one that a compiler made of them (dPRO section 5.1; XLA clusters in Keras).

Knows the regions and their measured times (``graph.info["regions"]``, :mod:`dpro.trace.regions`) and finds their ops
by name; not who chooses among them. What a region takes in the graph is scaled by what compiling it was measured to be
worth, forward and backward apart: the graph's times are those of the job, the trial's those of a region on its own.

All of a region runs where its inputs are there, at the place of one of its ops, the others take no time. What is made
in it is there only at its end: gradients of its weights above all, so that larger regions leave less to overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from weakref import WeakKeyDictionary

import numpy as np

from dpro.adapter import Knob
from dpro.graph.graph import Graph, OpKind
from dpro.replay.engine import replay
from dpro.trace.regions import REGIONS, LayerOps, Region

#: Regions that are fused, all others as they are.
Fusion = tuple[Region, ...]


def fusion_pays(*, first_ns: float, second_ns: float, fused_ns: float, first_sync_ns: float) -> bool:
    """dPRO's Theorem 1, exact: whether to fuse ops n-1 and n, by when both their tensors are synchronised.

    ``f + q_{n-1} < p_{n-1} + max(p_n, q_{n-1})``, all durations, ns; tensors stay apart, and the channel is free when
    op n-1 ends. The paper's form, ``q_{n-1} < p_{n-1} + p_n - f``, says the same where ``q_{n-1} <= p_n``. What does
    not pay where there is nothing to synchronise (``f < p_{n-1} + p_n``) never does.
    """
    return fused_ns + first_sync_ns < first_ns + max(second_ns, first_sync_ns)


class OpFusion:
    """Fuse regions. A candidate is a :data:`Fusion`."""

    name = "op_fusion"
    knobs = frozenset({Knob.COMPILE_REGIONS})

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Graph, _Ops] = WeakKeyDictionary()

    def candidates(self, graph: Graph) -> Iterator[Fusion]:
        """For each kind all its regions, since what computes alike is decided alike; most saved first.

        None that :func:`fusion_pays` refuses whatever is synchronised, unless its forward pass gets shorter: gradients
        of layers after it are then ready earlier, which may be worth more than what its backward pass takes longer.
        """
        kinds: dict[str, list[Region]] = {}
        for region in graph.info.get(REGIONS, ()):
            time = region.time
            pays = fusion_pays(first_ns=time.plain_ns, second_ns=0, fused_ns=time.fused_ns, first_sync_ns=0)
            if pays or time.fused_forward_ns < time.forward_ns:
                kinds.setdefault(region.kind, []).append(region)
        legal = [tuple(regions) for regions in kinds.values() if self.legal(graph, tuple(regions))]
        yield from sorted(legal, key=lambda fusion: (self.cost(graph, fusion), fusion[0].layers))

    def legal(self, graph: Graph, candidate: Fusion) -> bool:
        """Whether each layer is in one region at most, and every rank has ops of every region, forward and backward."""
        layers = [layer for region in candidate for layer in region.layers]
        if not candidate or len(set(layers)) < len(layers):
            return False
        ops = self._ops(graph)
        return all(ops.of(rank, r, back) for rank in ops.ranks for r in candidate for back in (False, True))

    def apply(self, graph: Graph, candidate: Fusion) -> int:
        """Replace the regions' ops by fused ones; returns the mark that undoes it."""
        mark = graph.mark()
        ops = self._ops(graph)
        for rank in ops.ranks:
            for region in candidate:
                time = region.time
                self._fuse(graph, ops.of(rank, region, False), _share(time.fused_forward_ns, time.forward_ns))
                last = self._fuse(graph, ops.of(rank, region, True), _share(time.fused_backward_ns, time.backward_ns))
                for tensor in ops.tensors(region):
                    if last >= 0 and (rank, tensor) in graph.out_op:
                        graph.add_edge(last, graph.out_op[rank, tensor])
        return mark

    def cost(self, graph: Graph, candidate: Fusion) -> float:
        """What it adds to the work of all ranks, ns; negative where it saves."""
        ops, duration, gap = self._ops(graph), graph.column("duration"), graph.column("gap")
        added = 0.0
        for rank in ops.ranks:
            for region in candidate:
                time = region.time
                for back, fused, plain in (
                    (False, time.fused_forward_ns, time.forward_ns),
                    (True, time.fused_backward_ns, time.backward_ns),
                ):
                    members = ops.of(rank, region, back)
                    added += (_share(fused, plain) - 1) * float(sum(duration[members]) + sum(gap[members]))
        return added

    def _ops(self, graph: Graph) -> _Ops:
        if graph not in self._found:
            self._found[graph] = _Ops(graph)
        return self._found[graph]

    def _fuse(self, graph: Graph, members: Sequence[int], share: float) -> int:
        """Returns the op that stands for ``members``, which are in the order of the graph; -1 of none."""
        if not members:
            return -1
        ops = self._found[graph]
        inside = set(members)
        inputs = {p for op in members for p in ops.before.get(op, ()) if p not in inside}
        duration, gap, resource = graph.column("duration"), graph.column("gap"), graph.column("resource")
        if ops.in_order:  # what its own thread does between is no input: gradients that are there one after another
            begin, thread = ops.place[members[0]], resource[members[0]]
            inputs = {p for p in inputs if resource[p] != thread or ops.place[p] < begin}
        ready = max((ops.place[p] for p in inputs), default=-1)
        fused = next(op for op in members if ops.place[op] > ready)
        whole = sum(int(duration[op]) + int(gap[op]) for op in members) - int(gap[fused])
        graph.set(fused, "duration", round(share * whole))
        for op in inside - {fused}:
            graph.set(op, "duration", 0)
            graph.set(op, "gap", 0)
        users = dict.fromkeys(chain.from_iterable(ops.after.get(op, ()) for op in members if op != fused))
        for user in users:
            if user not in inside and ops.place[user] > ops.place[fused]:
                graph.add_edge(fused, user)
        return fused


def _share(fused_ns: int, plain_ns: int) -> float:
    return fused_ns / plain_ns if plain_ns else 1.0


class _Ops:
    """Of the graph as it is now: which ops a layer has on a rank, in the order in which they start, inputs first.

    Other passes change times, and what lies between OUT and IN: none of it is a layer's.
    """

    def __init__(self, graph: Graph) -> None:
        arrays = graph.arrays()
        #: op -> place in the order, and the ops on both sides of it
        self.place: dict[int, int] = {}
        self.before: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        start = replay(graph).start.tolist()
        left = np.bincount(arrays.indices, minlength=len(arrays.ids))
        ready = [(start[row], row) for row in np.flatnonzero(left == 0).tolist()]
        heapify(ready)
        while ready:
            _, row = heappop(ready)
            op = int(arrays.ids[row])
            self.place[op] = len(self.place)
            for following in arrays.indices[arrays.indptr[row] : arrays.indptr[row + 1]].tolist():
                user = int(arrays.ids[following])
                self.before.setdefault(user, []).append(op)
                self.after.setdefault(op, []).append(user)
                left[following] -= 1
                if not left[following]:
                    heappush(ready, (start[following], following))
        self._members: dict[tuple[int, str, bool], list[int]] = {}
        find = LayerOps(layer for region in graph.info.get(REGIONS, ()) for layer in region.layers)
        layers = [find(name) for name in graph.name_table]
        names, kinds, rank = graph.column("name"), graph.column("kind"), graph.column("rank")
        for op in self.place:
            layer = layers[names[op]]
            # an UPDATE waits for reduced gradients, whatever it is called
            if layer is not None and kinds[op] in (OpKind.FORWARD, OpKind.BACKWARD):
                self._members.setdefault((int(rank[op]), *layer), []).append(op)
        self.ranks = sorted({int(rank[op]) for op in self.place if rank[op] >= 0})
        self._tensors = {tensor.name: t for t, tensor in enumerate(graph.tensors)}
        resource = graph.column("resource")
        #: whether a thread runs its ops in order, gradients becoming ready among them (torch)
        self.in_order = any(resource[op] >= 0 for op in graph.out_op.values())

    def of(self, rank: int, region: Region, back: bool) -> list[int]:
        found = chain.from_iterable(self._members.get((rank, layer, back), ()) for layer in region.layers)
        return sorted(found, key=self.place.__getitem__)

    def tensors(self, region: Region) -> list[int]:
        return [self._tensors[name] for name in region.tensors if name in self._tensors]
