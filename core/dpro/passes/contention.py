"""Takes the contention of the captured run out of its host ops, so that a model can put it back elsewhere.

While a collective's threads share a core with the host thread, the captured ops are longer than the work in
them. A search that moves collectives moves that loss: captured times must first be relieved of it, then
:func:`dpro.passes.tensor_fusion.add_collective` charges it to whatever runs while bytes move. Knows replayed
times and the cost model; the inverse of the latter's contention, on average and not op by op.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph, OpKind
from dpro.replay.engine import bucket_spans, replay

#: However dear the model thinks bytes are, a host thread keeps this share of its core.
LEAST_SHARE = 0.1


def captured_with_contention(graph: Graph) -> bool:
    """Whether the loss is hidden in the host ops: no bucket has contention ops of its own."""
    kind = graph.column("kind")
    return not any(kind[op] == OpKind.LOCAL for bucket in graph.buckets for op in bucket.ops)


def relieve(graph: Graph, model: SyncModel) -> int:
    """Shorten main-thread ops and gaps by what they lost to the captured buckets; returns the undo mark.

    A bucket of s bytes that took d ns cost the host ``steal·s/d`` of its time while it ran.
    """
    mark = graph.mark()
    if not model.steal_ns_per_byte or not captured_with_contention(graph):
        return mark
    played, arrays = replay(graph), graph.arrays()
    events: list[tuple[int, float]] = []
    for bucket, (begin, end) in zip(graph.buckets, bucket_spans(graph, played, arrays), strict=True):
        if end > begin:
            share = min(1 - LEAST_SHARE, model.steal_ns_per_byte * bucket.nbytes / (end - begin))
            events += [(begin, share), (end, -share)]
    if not events:
        return mark
    events.sort()
    # Loss accumulated until each event: the integral of a step function.
    at = np.array([t for t, _ in events], dtype=np.float64)
    share_now = np.minimum(np.cumsum([s for _, s in events]), 1 - LEAST_SHARE)
    lost = np.concatenate([[0.0], np.cumsum(share_now[:-1] * np.diff(at))])

    def loss_ns(since: npt.NDArray[np.int64], until: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.asarray(np.interp(until, at, lost) - np.interp(since, at, lost), dtype=np.float64)

    rows = np.flatnonzero(np.isin(arrays.resource, list(graph.info["main_resource"].values())))
    start, gap = played.start[rows], arrays.gap[rows]
    for key, values in (
        ("duration", arrays.duration[rows] - loss_ns(start, played.end[rows])),
        ("gap", gap - loss_ns(start - gap, start)),
    ):
        graph.set_many(arrays.ids[rows], key, np.maximum(0, values))
    return mark
