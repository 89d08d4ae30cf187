"""How much a parameter server job's worker has on its way at once: part size and credit (ByteScheduler, SOSP 2019).

A worker's questions go behind the pushes that were handed to the same pipe before
(:attr:`~dpro.graph.ps_layout.Layout.orderly`). Where the network is slower than the backward pass that is all of them:
every gradient is pushed before the first is pulled, whatever parts they are cut into, and a link that could carry both
ways carries one. If a part is handed over when enough of those before it are back, pushes and pulls go side by side.

* Parts go one by one in the order in which gradients become ready, the same on all workers, each by a name of its own.
* Which ones a part waits for: :func:`dpro.trace.byteps.waits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dpro.adapter import Knob
from dpro.graph.graph import Bucket, Graph
from dpro.passes.push_pull import Piece, add_ways
from dpro.passes.tensor_fusion import ready_order
from dpro.passes.tensor_partition import HAND_TRIED_BYTES, captured, told
from dpro.trace.byteps import FIRST_NUMBER, MOST_NAMES, PAGE_BYTES, PART_BITS, aligned, cut, server_of, waits

#: Parts on their way at once that are tried by hand.
HAND_TRIED_PARTS = (2, 4, 8)


class Flow(NamedTuple):
    """Bytes of a part, and of parts on their way, at most."""

    part_bytes: int
    in_flight_bytes: int


class InFlight:
    """Let no more than so many bytes be on their way at once. A candidate is a :class:`Flow`, of all gradients."""

    name = "in_flight"
    knobs = frozenset({Knob.IN_FLIGHT})

    def candidates(self, graph: Graph) -> Iterator[Flow]:
        """BytePS's own partitions and a few others, a few of them at once."""
        for nbytes in HAND_TRIED_BYTES:
            for parts in HAND_TRIED_PARTS:
                found = Flow(aligned(nbytes), parts * aligned(nbytes))
                if self.legal(graph, found):
                    yield found

    def legal(self, graph: Graph, candidate: Flow) -> bool:
        """Whether all that is pushed is known, parts are whole pages that may go, and there are as many names."""
        part, most = candidate
        return (
            0 < len(captured(graph)) == len(graph.buckets)
            and part > 0
            and part % PAGE_BYTES == 0
            and part <= most
            and len(pieces(graph, part)) <= MOST_NAMES
        )

    def apply(self, graph: Graph, candidate: Flow) -> int:
        """Replace the ops of all gradients on their way; returns the mark that undoes it.

        ``graph.info["ps"].bounds`` stays what was captured.
        """
        ps, model = told(graph)
        wanted = {tensor for tensor, _ in captured(graph)}
        mark = graph.mark()
        buckets = list(graph.buckets)
        gone = {at: b for at, b in enumerate(buckets) if len(b.tensors) == 1 and b.tensors[0] in wanted}
        graph.remove_ops([op for bucket in gone.values() for op in bucket.ops])
        row = {bucket.tensors[0]: number for number, bucket in enumerate(gone.values())}
        parts = pieces(graph, candidate.part_bytes)
        turns = waits([size for _, _, size in parts], candidate.in_flight_bytes)
        # the first numbers are those of names that were recorded
        keys = [(FIRST_NUMBER + MOST_NAMES + place) << PART_BITS for place in range(len(parts))]
        servers = [server_of(key, ps.layout.servers, ps.layout.hash_fn) for key in keys]
        made = add_ways(
            graph,
            [bucket.tensors for bucket in gone.values()],
            [
                Piece(row[tensor], number, size, server, before)
                for (tensor, number, size), server, before in zip(parts, servers, turns, strict=True)
            ],
            ps,
            model,
        )
        for (at, bucket), ops in zip(gone.items(), made, strict=True):
            buckets[at] = Bucket(bucket.tensors, bucket.nbytes, ops)
        graph.set_buckets(buckets)
        return mark

    def cost(self, graph: Graph, candidate: Flow) -> float:
        """How long the slowest link direction takes for what may be on its way at once, ns."""
        ps, model = told(graph)
        links = {link for pair in ps.layout.links.values() for link in pair}
        return float(max((model.link(link).time_ns(candidate.in_flight_bytes) for link in links), default=0))


def pieces(graph: Graph, part_bytes: int) -> list[tuple[int, int, int]]:
    """(tensor, number, bytes) of every part, in the order in which they go."""
    pushed = {tensor for tensor, _ in captured(graph)}
    return [
        (tensor, number, size)
        for tensor in ready_order(graph)
        if tensor in pushed
        for number, size in enumerate(cut(graph.tensors[tensor].nbytes, part_bytes))
    ]
