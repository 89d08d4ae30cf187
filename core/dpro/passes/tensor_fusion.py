"""Tensor fusion: which gradients are synchronised together (dPRO section 5.1; DDP buckets, Horovod groups).

Knows the graph's OUT and IN ops, its buckets, and the cost model in ``graph.info``; not who chooses a
grouping. Conventions it relies on and keeps:

* ``graph.info["sync"]`` is the :class:`~dpro.cost.sync.SyncModel`; ``graph.info["channel"]``, if there, the
  name of the resource collectives run on; ``graph.info["launch_ns"]`` the host time one bucket's launch
  costs, held in the duration of the OUT op of the bucket's last member; ``graph.info["main_resource"]`` maps
  each rank to the id of the host resource that loses time while bytes move.
* A bucket starts when all its members are ready on all ranks and the bucket before it is done: DDP launches
  in order, and a channel runs one collective at a time. Where ``graph.info["in_flight"]`` of them may be under
  way (gloo: two), it starts when the one that many before it is done, and they share the channel. Where
  ``graph.info["negotiated"]`` (Horovod), buckets go in the order in which they are complete, each after the
  delay of the negotiation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from dpro.adapter import Knob
from dpro.cost.sync import SyncModel
from dpro.graph.graph import NO_RESOURCE, Bucket, Graph, OpKind
from dpro.passes import ddp_buckets
from dpro.passes.ddp_buckets import MIB

#: Tensor ids per bucket, in launch order.
Grouping = tuple[tuple[int, ...], ...]

#: Contention is dealt out in pieces: fine enough to meet the ops it delays, few enough to stay cheap.
PIECE_BYTES = 1 * MIB
MAX_PIECES = 32


def ready_order(graph: Graph) -> list[int]:
    """Tensor ids in gradient-ready order; ids as they are where the order is not (wholly) known."""
    ids = range(len(graph.tensors))
    if any(tensor.ready < 0 for tensor in graph.tensors):
        return list(ids)
    return sorted(ids, key=lambda t: graph.tensors[t].ready)


def add_collective(
    graph: Graph,
    tensors: Sequence[int],
    nbytes: int,
    after: Iterable[int],
    before: Iterable[int],
    model: SyncModel,
) -> tuple[int, ...]:
    """Add one bucket's synchronisation between the ops ``after`` and the ops ``before``. Returns its ops.

    Without contention that is one COLLECTIVE op of ``model.time_ns(nbytes)``. With it
    (``steal_ns_per_byte > 0``), a chain: the latency, then the transfer in at most 32 pieces of about 1 MiB;
    as each piece starts, a LOCAL op of ``steal · piece`` becomes eligible on every rank's main host
    resource, before compute. It delays compute that runs then, and nothing when the host is idle. The
    chain lasts as long as the one op would.

    Where the library keeps several collectives in flight, the latency of one passes while another's bytes move:
    there it is a gap (which counts from readiness), no time on the channel.
    """
    channel = graph.resource(graph.info.get("channel", "group/default"))
    lead = tensors[0] if tensors else -1
    latency_ns, transfer_ns = round(model.latency_ns), model.time_ns(nbytes) - round(model.latency_ns)
    delay_ns, head_ns = round(model.delay_ns), latency_ns
    if graph.info.get("in_flight", 1) > 1:
        delay_ns, head_ns = delay_ns + latency_ns, 0
    pieces = min(MAX_PIECES, max(1, -(-nbytes // PIECE_BYTES))) if model.steal_ns_per_byte else 0
    if not pieces:
        head_ns += transfer_ns
    head = graph.add_op(
        "all_reduce",
        OpKind.COLLECTIVE,
        resource=channel,
        duration=head_ns,
        gap=delay_ns,
        tensor=lead,
        nbytes=nbytes,
        after=list(after),
    )
    ops = (head, *_pieces(graph, head, pieces, transfer_ns, nbytes, lead, model)) if pieces else (head,)
    for op in before:
        graph.add_edge(ops[-1], op)
    # The op whose end is the bucket's end comes last, for whoever chains on it.
    return ops


def _pieces(
    graph: Graph, head: int, pieces: int, transfer_ns: int, nbytes: int, lead: int, model: SyncModel
) -> list[int]:
    """The transfer after ``head``: for each piece what it takes from every rank's host, then the piece."""
    main = np.array(sorted(graph.info["main_resource"].items()), dtype=np.int64).reshape(-1, 2)
    each = len(main) + 1
    last = np.arange(pieces * each) % each == each - 1
    channel = int(graph.column("resource")[head])

    def dealt(hosts: int, wire: int) -> npt.NDArray[np.int64]:
        """By op: the piece's part of a whole; the parts add up exactly."""
        ends = np.arange(pieces + 1)
        shares = [np.diff(whole * ends // pieces).repeat(each) for whole in (hosts, wire)]
        return np.where(last, shares[1], shares[0])

    columns: dict[str, npt.NDArray[np.int64] | int] = {
        "resource": np.tile(np.append(main[:, 1], channel), pieces),
        "duration": dealt(round(model.steal_ns_per_byte * nbytes), transfer_ns),
        # Priority -1: nothing else on the channel comes between the pieces of one collective.
        "priority": -1,
        "tensor": np.where(last, lead, -1),
        "rank": np.tile(np.append(main[:, 0], -1), pieces),
        "nbytes": np.where(last, dealt(0, nbytes), -1),
    }
    names = np.where(last, graph.name("all_reduce.piece"), graph.name("contention")).astype(np.int32)
    kinds = np.where(last, OpKind.COLLECTIVE, OpKind.LOCAL).astype(np.uint8)
    ops = graph.add_ops(names, kinds, len(last), **columns)
    graph.add_edges(np.stack([np.append(head, ops[last][:-1]).repeat(each), ops], axis=1))
    made: list[int] = ops.tolist()
    return made


@dataclass
class _Modelled(Bucket):
    """A bucket that this pass has made, and what it went by; a captured one is as it was measured."""

    model: SyncModel | None = None


class TensorFusion:
    """Regroup the gradients of a graph. A candidate is a :data:`Grouping`; see the module text."""

    name = "tensor_fusion"
    knobs = frozenset({Knob.BUCKET_LIST, Knob.BUCKET_CAP, Knob.GROUPS})

    def __init__(self) -> None:
        self._wiring: WeakKeyDictionary[Graph, _Wiring] = WeakKeyDictionary()

    def candidates(self, graph: Graph) -> Iterator[Grouping]:
        """DDP's default and a few uniform caps, without repeats."""
        seen: set[Grouping] = set()
        limits = [ddp_buckets.DEFAULT_LIMITS, *((mib * MIB,) for mib in (4, 8, 2, 16, 1, 25, 50))]
        for grouping in (ddp_grouping(graph, caps) for caps in limits):
            if grouping and grouping not in seen:
                seen.add(grouping)
                yield grouping

    def legal(self, graph: Graph, candidate: Grouping) -> bool:
        """Whether DDP caps exist that give exactly this grouping (so: each tensor once, no mixed dtypes)."""
        order = ready_order(graph)
        place = {t: i for i, t in enumerate(order)}
        if sorted(t for group in candidate for t in group) != sorted(order):
            return False
        nbytes, dtypes = [graph.tensors[t].nbytes for t in order], [graph.tensors[t].dtype for t in order]
        return ddp_buckets.caps_for([[place[t] for t in group] for group in candidate], nbytes, dtypes) is not None

    def apply(self, graph: Graph, candidate: Grouping) -> int:
        """Replace all buckets by ``candidate``; returns the mark that undoes it.

        ``()`` leaves the graph without synchronisation: what compute alone would take.

        Raises:
            ValueError: a group that is empty, or mixes dtypes.
        """
        if any(not group or len({graph.tensors[t].dtype for t in group}) > 1 for group in candidate):
            raise ValueError("a bucket holds tensors, and all of one dtype")
        if graph not in self._wiring:
            self._wiring[graph] = _Wiring(graph)
        wiring = self._wiring[graph]
        model: SyncModel = graph.info["sync"]
        mark = graph.mark()
        # A bucket waits for the one so many before it: 0 if its place is its own business.
        back = 0 if graph.info.get("negotiated") else int(graph.info.get("in_flight", 1))
        kept = _kept(graph.buckets, candidate, back, model)
        gone = [bucket for m, bucket in enumerate(graph.buckets) if m not in kept.values()]
        graph.remove_ops([op for bucket in gone for op in bucket.ops])

        launch_ns = round(graph.info.get("launch_ns", 0))
        launches: dict[int, int] = {}
        fresh = [group for m, group in enumerate(candidate) if m not in kept]
        for sign, groups in ((-1, [bucket.tensors for bucket in gone]), (1, fresh)):
            for op in (op for group in groups for op in wiring.last_outs(group)):
                launches[op] = launches.get(op, 0) + sign * launch_ns
        duration = graph.column("duration")
        for op, delta in launches.items():
            if delta:
                # A captured op may be shorter than the typical launch that is taken out of it.
                graph.set(op, "duration", max(0, int(duration[op]) + delta))

        buckets: list[Bucket] = []
        for m, group in enumerate(candidate):
            if m in kept:
                buckets.append(graph.buckets[kept[m]])
                continue
            nbytes = sum(graph.tensors[t].nbytes for t in group)
            after = wiring.outs(group)
            if 0 < back <= m:
                after.append(buckets[m - back].ops[-1])
            ops = add_collective(graph, group, nbytes, after, wiring.ins(group), model)
            buckets.append(_Modelled(tensors=group, nbytes=nbytes, ops=ops, model=model))
        graph.set_buckets(buckets)
        return mark

    def cost(self, graph: Graph, candidate: Grouping) -> float:
        """Time on the channel, ns, plus the launches: what the grouping costs if nothing overlaps."""
        model: SyncModel = graph.info["sync"]
        sizes = [sum(graph.tensors[t].nbytes for t in group) for group in candidate]
        return sum(map(model.time_ns, sizes)) + len(sizes) * float(graph.info.get("launch_ns", 0))


def _kept(before: Sequence[Bucket], groups: Grouping, back: int, model: SyncModel) -> dict[int, int]:
    """Places of groups that are there already, as they would be made now -> places of their buckets.

    So what a search changes of a grouping costs edits for what changes. One more launch before a bucket moves it, but
    no edge of it.
    """
    places = {b.tensors: m for m, b in enumerate(before) if isinstance(b, _Modelled) and b.model == model}
    kept: dict[int, int] = {}
    for m, group in enumerate(groups):
        at = places.get(group)
        if at is None or (back and (m < back) != (at < back)):
            continue
        if not back or m < back or kept.get(m - back) == at - back:
            kept[m] = at
    return kept


def captured(graph: Graph) -> Grouping:
    """The grouping in force, in launch order."""
    return tuple(bucket.tensors for bucket in graph.buckets)


def ddp_grouping(graph: Graph, limits: Sequence[int]) -> Grouping:
    """The buckets that DDP makes of the graph's gradients under ``limits`` (bytes)."""
    order = ready_order(graph)
    if not order:
        return ()
    tensors = [graph.tensors[t] for t in order]
    groups = ddp_buckets.assign([t.nbytes for t in tensors], [t.dtype for t in tensors], limits)
    return tuple(tuple(order[i] for i in group) for group in groups)


class _Wiring:
    """Which OUT and IN ops a bucket must be tied to; the others are implied by the host thread's own order.

    Ops on one resource that are joined by explicit edges form a chain. Of the OUT ops on a chain only the
    last can matter, of the IN ops only the first: with that a regrouping costs edges per bucket, not per
    tensor. Tensor fusion never touches the edges of a chain, so this holds for the graph's life.
    """

    def __init__(self, graph: Graph) -> None:
        chains = _chains(graph)
        self.outs = _Ends(graph.out_op, chains, 1)
        self.ins = _Ends(graph.in_op, chains, -1)
        self._position = {t: i for i, t in enumerate(ready_order(graph))}
        self._out_of: dict[int, list[int]] = {}
        for (_, tensor), op in sorted(graph.out_op.items()):
            self._out_of.setdefault(tensor, []).append(op)

    def last_outs(self, group: Sequence[int]) -> list[int]:
        """Per rank, the OUT op that carries the bucket's launch."""
        return self._out_of.get(max(group, key=self._position.__getitem__), [])


class _Ends:
    """The OUT (or IN) ops of all ranks; called with a group, gives those that are not implied by another.

    ``sign``: 1 if the last op on a chain matters, -1 if the first one does.
    """

    def __init__(
        self, ops: dict[tuple[int, int], int], chains: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], sign: int
    ) -> None:
        first, place = chains
        on: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for (rank, tensor), op in sorted(ops.items()):
            on.setdefault((rank, int(first[op])), []).append((sign * int(place[op]), tensor, op))
        # Ranks usually agree on the order of tensors: then one look serves all of them.
        same: dict[tuple[int, ...], list[dict[int, int]]] = {}
        for chain_ops in on.values():
            chain_ops.sort()
            same.setdefault(tuple(t for _, t, _ in chain_ops), []).append({t: op for _, t, op in chain_ops})
        #: (tensor -> place, smaller ones implied by larger ones; tensor -> op, for each chain)
        self._orders = [({t: i for i, t in enumerate(order)}, maps) for order, maps in same.items() if len(order) > 1]
        self._alone = {order[0]: [m[order[0]] for m in maps] for order, maps in same.items() if len(order) == 1}

    def __call__(self, group: Sequence[int]) -> list[int]:
        found = [op for t in group for op in self._alone.get(t, ())] if self._alone else []
        for position, maps in self._orders:
            members = [t for t in group if t in position]
            if members:
                tensor = max(members, key=position.__getitem__)
                found += [ops[tensor] for ops in maps]
        return found


def _chains(graph: Graph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """By op: the first op of its chain (itself where it is alone) and its place on it, by edges between ops of one
    resource. Each step is a real edge."""
    resource = graph.column("resource").copy()
    # A chain must not lead through a bucket's own ops: they come and go.
    resource[[op for bucket in graph.buckets for op in bucket.ops]] = NO_RESOURCE
    src, dst = graph.edges().astype(np.int64).T
    same = (resource[src] == resource[dst]) & (resource[src] != NO_RESOURCE)
    src, dst = src[same], dst[same]
    both = np.intersect1d(np.unique(src, return_index=True)[1], np.unique(dst, return_index=True)[1])
    first, place = np.arange(len(resource)), np.zeros(len(resource), dtype=np.int64)
    first[dst[both]], place[dst[both]] = src[both], 1
    for _ in range(len(resource).bit_length()):  # twice as far each time
        place += place[first]
        first = first[first]
    return first, place
