"""Contention of the captured run: taken out of the ops it hit, and put back by the cost model."""

from __future__ import annotations

import pytest

from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.passes.contention import captured_with_contention, relieve
from dpro.passes.ddp_buckets import MIB
from dpro.passes.tensor_fusion import TensorFusion, captured
from dpro.replay.oracle import replay_arrays
from tests.passes.test_tensor_fusion import state
from tests.search.graphs import ddp_graph

MS = 1_000_000
PLAIN = SyncModel(latency_ns=0, ns_per_byte=1.0)


def backward_ns(graph: Graph, rank: int) -> list[int]:
    ops = [op for op in range(len(graph.column("kind"))) if graph.name_of(op) == "backward"]
    return [int(graph.column("duration")[op]) for op in ops if graph.column("rank")[op] == rank]


def test_only_what_ran_beside_bytes_is_shortened() -> None:
    # Bucket 0 (4,000,000 bytes, 4 ms) runs from 3 to 7 ms; ops of 2 ms end at 3, 5, 7, 9, 11 ms after 1 ms forward.
    graph = ddp_graph([4 * MS, 10, 10, 10, 10], MS, [2 * MS] * 5, groups=((0,), (1, 2, 3, 4)), sync=PLAIN)
    before = state(graph)
    mark = relieve(graph, SyncModel(latency_ns=0, ns_per_byte=1.0, steal_ns_per_byte=0.25))
    for rank in range(2):
        # a quarter of 4 ms is lost, half of it in each of the two ops beside the transfer
        assert backward_ns(graph, rank) == [2 * MS, 1.5 * MS, 1.5 * MS, 2 * MS, 2 * MS]
    graph.undo(mark)
    assert state(graph) == before


def test_without_contention_nothing_changes() -> None:
    graph = ddp_graph([MIB] * 4, MS, [MS] * 4, sync=PLAIN)
    assert relieve(graph, PLAIN) == graph.mark()
    modelled = SyncModel(latency_ns=0, ns_per_byte=1.0, steal_ns_per_byte=0.5)
    graph = ddp_graph([MIB] * 4, MS, [MS] * 4, sync=modelled)
    assert not captured_with_contention(graph)
    assert relieve(graph, modelled) == graph.mark()


@pytest.mark.parametrize("steal", [0.1, 0.5])
def test_out_and_back_in_is_the_captured_step(steal: float) -> None:
    sizes = [MIB // 2 * (1 + i % 5) for i in range(60)]
    groups = tuple(tuple(range(i, i + 6)) for i in range(0, 60, 6))
    graph = ddp_graph(sizes, 20 * MS, [3 * s // 2 for s in sizes], groups=groups, sync=PLAIN)
    step_ns = replay_arrays(graph.arrays()).makespan_ns
    model = SyncModel(latency_ns=0, ns_per_byte=1.0, steal_ns_per_byte=steal)
    relieve(graph, model)
    relieved_ns = replay_arrays(graph.arrays()).makespan_ns
    graph.info["sync"] = model
    TensorFusion().apply(graph, captured(graph))
    assert relieved_ns < step_ns * 0.97
    assert replay_arrays(graph.arrays()).makespan_ns == pytest.approx(step_ns, rel=0.01)
