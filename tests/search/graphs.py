"""Hand-made graphs of one DDP step, with the conventions the graph builder keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph, OpKind, TensorInfo
from dpro.passes.tensor_fusion import Grouping, TensorFusion

#: 100 µs + 1 ns per byte (about 1 GB/s).
SYNC = SyncModel(latency_ns=100_000, ns_per_byte=1.0)


def ddp_graph(
    sizes: Sequence[int],
    fwd_ns: int,
    bwd_ns: Sequence[int],
    *,
    groups: Grouping | None = None,
    dtypes: Sequence[str] | None = None,
    ranks: int = 2,
    skew_ns: int = 0,
    copy_ns: Sequence[int] | None = None,
    copy_name: str = "in",
    update_ns: int = 0,
    launch_ns: int = 0,
    sync: SyncModel = SYNC,
) -> Graph:
    """One host thread per rank: forward, backward and OUT per tensor in ready order, IN per tensor, update.

    ``sizes`` in bytes and ``bwd_ns`` by tensor, in ready order; ``copy_ns`` the copy out of the bucket;
    rank r's forward is ``r · skew_ns`` longer. ``groups``: the captured buckets (default: all in one).
    """
    graph = Graph()
    graph.ranks = ranks
    kinds = dtypes or ["float32"] * len(sizes)
    graph.tensors = [TensorInfo(f"p{t}", n, kind, t) for t, (n, kind) in enumerate(zip(sizes, kinds, strict=True))]
    graph.info.update(sync=sync, launch_ns=launch_ns, channel="group/default", main_resource={})
    for rank in range(ranks):
        host = graph.resource(f"rank{rank}/cpu/main")
        graph.info["main_resource"][rank] = host
        place: dict[str, Any] = {"resource": host, "rank": rank}
        last = graph.add_op("forward", OpKind.FORWARD, duration=fwd_ns + rank * skew_ns, **place)
        for t in range(len(sizes)):
            last = graph.add_op("backward", OpKind.BACKWARD, duration=bwd_ns[t], after=[last], **place)
            last = graph.add_op("out", OpKind.OUT, tensor=t, after=[last], **place)
            graph.out_op[rank, t] = last
        for t in range(len(sizes)):
            duration = copy_ns[t] if copy_ns else 0
            last = graph.add_op(copy_name, OpKind.IN, duration=duration, tensor=t, after=[last], **place)
            graph.in_op[rank, t] = last
        graph.add_op("update", OpKind.UPDATE, duration=update_ns, after=[last], **place)
    TensorFusion().apply(graph, groups or (tuple(range(len(sizes))),))
    return graph


def horovod_graph(idle_share: float) -> Graph:
    """One response at the end of a backward pass of 40 ms; rounds every ms."""
    graph = ddp_graph([1 << 20] * 4, 10_000_000, [10_000_000] * 4, groups=((0, 1, 2, 3),))
    graph.info.update(negotiated=True, cycle_ns=1_000_000, idle_share=idle_share, fusion_bytes=128 << 20)
    return graph
