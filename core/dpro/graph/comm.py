"""What a collective is made of: SEND and RECV ops on link directions instead of one op.

Two ways there. :func:`add_messages` has every message of a capture (:mod:`dpro.graph.wire`) and keeps what
was measured; :func:`expand_rings` has a size, a bandwidth and a latency, for questions about networks and
worker counts that nobody captured. A link direction is a resource named ``link/<sender>><receiver>``, its
queue first come first served. In both, what a rank sends in a ring's step s is what it received in step s-1.

Source: dPRO (MLSys 2022) section 4.1; ring all-reduce: Patarasuk and Yuan, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dpro.graph.draft import DraftOp
from dpro.graph.graph import Graph, OpKind
from dpro.graph.wire import Exchange

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
    pieces = ((n, piece) for n, run in enumerate(runs) for piece in run.exchange.pieces)
    for n, piece in sorted(pieces, key=lambda item: (item[1].received, item[1].step, item[1].part, item[1].sender)):
        run, added = runs[n], out[n]
        sender, receiver = ranks[piece.sender], ranks[piece.receiver]
        label = f"{run.drafts[piece.sender].name} step {piece.step} part {piece.part}"
        before, ready = received.get((n, piece.sender, piece.step - 1, piece.part), (NO_OP, run.arrived[piece.sender]))
        # a sender that did not wait for its peer's arrival filled its buffers: then the RECV waits
        meets = piece.step == 0 and run.arrived[piece.receiver] <= piece.called
        if meets:
            ready = max(ready, run.arrived[piece.receiver])
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
        added.note(send, began, *([before] if before != NO_OP else []))
        added.note(recv, piece.received, send)
    for n, (run, added) in enumerate(zip(runs, out, strict=True)):
        for i, draft in run.drafts.items():
            mine = [found for key, found in received.items() if key[:2] == (n, i)]
            gap = max(0, draft.end - max(time for _, time in mine))
            leave = graph.add_op(f"{draft.name} received", OpKind.RECV, rank=ranks[i], gap=gap)
            added.leave[i] = added.note(leave, draft.end, *(op for op, _ in mine))
        drafts = run.drafts.values()
        nbytes = max(draft.nbytes for draft in drafts)
        end = graph.add_op(next(iter(drafts)).name, OpKind.COLLECTIVE, nbytes=nbytes)
        added.note(end, max(draft.end for draft in drafts), *added.leave.values())
    return out
