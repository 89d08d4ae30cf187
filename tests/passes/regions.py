"""A hand-made step with layers whose times compiled are known, as the builder names its ops."""

from __future__ import annotations

from typing import Any

from dpro.cost.sync import SyncModel
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind, TensorInfo
from dpro.passes.tensor_fusion import Grouping, TensorFusion
from dpro.trace.regions import REGIONS, Region, RegionTime

#: 10 µs a bucket, whatever it holds, but for 1 ns a byte.
SYNC = SyncModel(latency_ns=10_000, ns_per_byte=1.0)
MS = 1_000_000


def region(layers: str, forward: float, backward: float, kind: str = "", tensors: str = "") -> Region:
    """``layers`` and ``tensors`` by commas; 1 + 1 ms without, ``forward`` and ``backward`` ms compiled."""
    time = RegionTime(MS, MS, round(forward * MS), round(backward * MS))
    return Region(tuple(layers.split(",")), tuple(filter(None, tensors.split(","))), kind or layers, time)


def keras_graph(
    forward_ms: dict[str, float],
    backward_ms: dict[str, float],
    nbytes: dict[str, int],
    regions: list[Region],
    groups: Grouping | None = None,
    ranks: int = 1,
) -> Graph:
    """Layers one after another, forward and back again, two ops each way of which the first has most (3 of 4).

    A layer with a weight of ``nbytes`` hands its gradient in when its second op backward is over. ``groups``: by
    default each gradient by itself, in the order in which they are ready.
    """
    graph = Graph()
    graph.ranks = ranks
    back = [*reversed(forward_ms)]
    ready = [layer for layer in back if layer in nbytes]
    graph.tensors = [TensorInfo(f"{layer}/kernel", nbytes[layer], "float32", t) for t, layer in enumerate(ready)]
    graph.info.update(sync=SYNC, launch_ns=0, channel="group/default", main_resource={}, negotiated=True)
    graph.info[REGIONS] = regions
    for rank in range(ranks):
        host = graph.resource(f"rank{rank}/cpu/main")
        graph.info["main_resource"][rank] = host
        last: list[int] = []
        for kind, prefix, layers, took in (
            (OpKind.FORWARD, "net", forward_ms, forward_ms),
            (OpKind.BACKWARD, "gradient_tape/net", back, backward_ms),
        ):
            for layer in layers:
                for part, share in (("A", 0.75), ("B", 0.25)):
                    ns = round(took[layer] * share * MS)
                    name = f"{prefix}/{layer}/{part}"
                    last = [graph.add_op(name, kind, resource=host, duration=ns, rank=rank, after=last)]
                if kind == OpKind.BACKWARD and layer in nbytes:
                    tensor = ready.index(layer)
                    place: dict[str, Any] = {"resource": NO_RESOURCE, "tensor": tensor, "rank": rank}
                    graph.out_op[rank, tensor] = graph.add_op("handed in", OpKind.OUT, after=last, **place)
                    graph.in_op[rank, tensor] = graph.add_op("reduced", OpKind.IN, **place)
                    graph.add_op("update", OpKind.UPDATE, resource=host, rank=rank, after=[graph.in_op[rank, tensor]])
    TensorFusion().apply(graph, groups or tuple((t,) for t in range(len(ready))))
    return graph
