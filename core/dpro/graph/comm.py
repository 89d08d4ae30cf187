"""What a collective is made of: SEND and RECV ops on link directions instead of one op.

Two ways there. :func:`add_messages` has every message of a capture (:mod:`dpro.graph.wire`) and keeps what
was measured; :func:`expand_rings` has a size, a bandwidth and a latency, for questions about networks and
worker counts that nobody captured. A link direction is a resource named ``link/<sender>><receiver>``, its
queue first come first served. In both, what a rank sends in a ring's step s is what it received in step s-1.

Source: dPRO (MLSys 2022) section 4.1; ring all-reduce: Patarasuk and Yuan, 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dpro.graph.draft import DraftOp
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.graph.wire import Exchange, ring_steps

#: Ring steps are cut into pieces of about this many bytes, as gloo and Horovod do.
CHUNK_BYTES = 1 << 20
#: More ops than this for one collective, and its ring is one op of the same time instead.
MAX_RING_OPS = 20_000
NO_OP = -1


def link_name(sender: int, receiver: int) -> str:
    return f"link/{sender}>{receiver}"


# -- with messages ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A joined collective to be added: its messages, and by trace index each member's draft and its arrival, ns.

    The drafts must have been told (:meth:`settle`) when they end.
    """

    exchange: Exchange
    drafts: dict[int, DraftOp]
    arrived: dict[int, int]

    def settle(self) -> None:
        """A rank does not leave before it has received everything."""
        for piece in self.exchange.pieces:
            draft = self.drafts[piece.receiver]
            draft.end = max(draft.end, piece.received)


@dataclass
class Added:
    """Ops that stand for one collective.

    ``entries[i]`` may start only when trace i arrived, ``leave[i]`` is what its successors wait for; ``ops``
    are all of them, the last one at the end of all, with the measured start of each. ``edges`` among them are
    still to be added: the builder looks for cycles first.
    """

    entries: dict[int, list[int]]
    leave: dict[int, int] = field(default_factory=dict)
    ops: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    edges: set[tuple[int, int]] = field(default_factory=set)

    def note(self, op: int, time: int, *after: int) -> int:
        self.ops.append(op)
        self.times.append(time)
        self.edges.update((before, op) for before in after)
        return op


def add_messages(graph: Graph, runs: Sequence[Run], ranks: Sequence[int]) -> list[Added]:
    """Add the SEND and RECV ops of ``runs``, which share their links. ``ranks``: by trace index.

    A SEND holds its link from its turn there to the last byte received, and its gap is what its dependencies
    (the rank's arrival and its peer's, or the part received in the step before) leave of the time until the
    call: replayed as captured, every message ends when it was measured to end. A RECV takes no time: the
    copying is in the link's, the reducing in the gap before the next SEND. A rank leaves when it has
    received everything; what it then took to go on is the gap of its last op.
    """
    out = [Added({i: [] for i in run.drafts}) for run in runs]
    received: dict[tuple[int, int, int, int], tuple[int, int]] = {}  # run, receiver, step, part -> RECV op, its time
    everything: dict[tuple[int, int], list[tuple[int, int]]] = {}  # run, receiver -> the same
    pieces = ((n, piece) for n, run in enumerate(runs) for piece in run.exchange.pieces)
    for n, piece in sorted(pieces, key=lambda item: (item[1].received, item[1].step, item[1].part, item[1].sender)):
        run, added = runs[n], out[n]
        sender, receiver = ranks[piece.sender], ranks[piece.receiver]
        label = f"{run.drafts[piece.sender].name} step {piece.step} part {piece.part}"
        before, ready = received.get((n, piece.sender, piece.step - 1, piece.part), (NO_OP, run.arrived[piece.sender]))
        # A sender that did not wait for its peer's arrival filled its buffers: then the RECV waits. Profiler and tracer
        # read their clocks apart, so of two causes the call belongs to the one that was nearer.
        peer = run.arrived[piece.receiver]
        meets = peer - piece.called <= max(0, piece.called - ready)
        if meets:
            ready = max(ready, peer)
        began = max(piece.began, ready)
        send = graph.add_op(
            f"send {label}", OpKind.SEND, resource=graph.resource(link_name(sender, receiver)),
            duration=max(0, piece.received - began), gap=max(0, piece.called - ready),
            rank=sender, nbytes=piece.nbytes,
        )  # fmt: skip
        recv = graph.add_op(f"recv {label}", OpKind.RECV, rank=receiver, nbytes=piece.nbytes)
        if before == NO_OP:
            added.entries[piece.sender].append(send)
        added.entries[piece.receiver].append(send if meets else recv)
        received[n, piece.receiver, piece.step, piece.part] = recv, piece.received
        everything.setdefault((n, piece.receiver), []).append((recv, piece.received))
        added.note(send, began, *([before] if before != NO_OP else []))
        added.note(recv, piece.received, send)
    for n, (run, added) in enumerate(zip(runs, out, strict=True)):
        for i, draft in run.drafts.items():
            mine = everything[n, i]
            gap = max(0, draft.end - max(time for _, time in mine))
            leave = graph.add_op(f"{draft.name} received", OpKind.RECV, rank=ranks[i], gap=gap)
            added.leave[i] = added.note(leave, draft.end, *(op for op, _ in mine))
        drafts = run.drafts.values()
        nbytes = max(draft.nbytes for draft in drafts)
        end = graph.add_op(next(iter(drafts)).name, OpKind.COLLECTIVE, nbytes=nbytes)
        added.note(end, max(draft.end for draft in drafts), *added.leave.values())
    return out


# -- without messages ------------------------------------------------------------------------------


def expand_rings(
    graph: Graph, bandwidth: float, latency_ns: float, *, chunk: int = CHUNK_BYTES, workers: int | None = None
) -> int:
    """Replace every ring collective of known size by the steps of a ring; how many were replaced.

    An all-reduce of S bytes among N ranks is 2 (N-1) steps (an all-gather or reduce-scatter N-1) in which every
    rank sends S/N bytes to the next one: each step holds its link for ``latency_ns`` + S / (N ·
    ``bandwidth``), in pieces of ``chunk`` bytes, the first of which carries the latency. A rank begins when it and
    the next one have arrived, so on idle links all end 2 (N-1) (latency + S / (N · bandwidth)) after the last
    arrival. Collectives that shared a channel follow each other there as before.

    ``workers`` puts N other than captured: of more ranks than there are, rank N + i arrives with rank i; of
    fewer, rank i stands for all i + k · N. Journalled: ``graph.undo`` takes it back.

    Args:
        bandwidth: of a link direction, bytes/s.
        latency_ns: of a step.

    Raises:
        ValueError: a number that is not positive (latency: negative), or fewer than 2 workers.
    """
    count = int(graph.info.get("world_size", graph.ranks)) if workers is None else workers
    if not (0 < bandwidth < float("inf") and 0 <= latency_ns < float("inf") and chunk > 0 and count >= 2):
        raise ValueError(f"{count} workers, {bandwidth} bytes/s, {latency_ns} ns, pieces of {chunk} bytes: no ring")
    kind, nbytes, alive = graph.column("kind"), graph.column("nbytes"), graph.column("alive")
    parts = [op for bucket in graph.buckets if len(bucket.ops) > 1 for op in bucket.ops]  # not whole collectives
    chosen = np.setdiff1d(np.flatnonzero(alive & (kind == OpKind.COLLECTIVE) & (nbytes > 0)), parts).tolist()
    ends: dict[int, int] = {}  # by channel: the end of the collective that had it last
    body: dict[int, tuple[int, ...]] = {}
    for op in chosen:  # in the order of their launches
        steps = ring_steps(graph.name_of(op), count)
        if steps:
            transfer_ns = int(graph.column("nbytes")[op]) / count / bandwidth * 1e9
            channel = int(graph.column("resource")[op])
            body[op] = _expand(graph, op, steps, count, latency_ns, transfer_ns, chunk, ends.get(channel))
            if channel != NO_RESOURCE:
                ends[channel] = body[op][-1]
    graph.set_buckets(
        [replace(b, ops=tuple(new for op in b.ops for new in body.get(op, (op,)))) for b in graph.buckets]
    )
    return len(body)


def _expand(
    graph: Graph, op: int, steps: int, count: int, latency_ns: float, transfer_ns: float, chunk: int, after: int | None
) -> tuple[int, ...]:
    """One collective of :func:`expand_rings`; ``after``: what had its channel. Its new ops, the end last."""
    name, nbytes, tensor = graph.name_of(op), int(graph.column("nbytes")[op]), int(graph.column("tensor")[op])
    edges, rank = graph.edges(), graph.column("rank")
    before = edges[edges[:, 1] == op, 0].tolist()
    behind = edges[edges[:, 0] == op, 1].tolist()
    ranks = max(graph.ranks, 1)
    arrivals: dict[int, list[int]] = {node: [] if after is None else [after] for node in range(count)}
    for src in before:
        for node in range(count):
            if rank[src] < 0 or rank[src] % count == node % ranks:
                arrivals[node].append(src)
    graph.remove_ops([op])
    pieces = max(1, min(math.ceil(nbytes / count / chunk), MAX_RING_OPS // (count * steps)))
    # Whole ns, such that the pieces of all steps add up to the formula.
    edge_ns = [
        round(step * (latency_ns + transfer_ns) + (latency_ns + transfer_ns * part / pieces if part else 0))
        for step in range(steps)
        for part in range(pieces)
    ] + [round(steps * (latency_ns + transfer_ns))]
    ops: list[int] = []
    sent_last: dict[tuple[int, int], int] = {}  # by link
    got: dict[tuple[int, int], int] = {}  # (node, part) -> the SEND that brought it, of the step before
    for step in range(steps):
        sent: dict[tuple[int, int], int] = {}
        for node in range(count):
            peer = (node + 1) % count
            for part in range(pieces):
                k = step * pieces + part
                waits = [got[node, part]] if step else [*arrivals[node], *arrivals[peer]] if part == 0 else []
                if (node, peer) in sent_last:  # in order, even where the peer has not come
                    waits.append(sent_last[node, peer])
                sent[peer, part] = graph.add_op(
                    f"send {name} step {step} part {part}", OpKind.SEND,
                    resource=graph.resource(link_name(node, peer)), duration=edge_ns[k + 1] - edge_ns[k],
                    tensor=tensor, rank=node if node < ranks else -1, nbytes=nbytes // count // pieces,
                    after=sorted(set(waits)),
                )  # fmt: skip
                sent_last[node, peer] = sent[peer, part]
                ops.append(sent[peer, part])
        got = sent
    end = graph.add_op(
        name, OpKind.COLLECTIVE, tensor=tensor, nbytes=nbytes, after=[got[n, pieces - 1] for n in range(count)]
    )
    for dst in behind:
        graph.add_edge(end, dst)
    return (*ops, end)
