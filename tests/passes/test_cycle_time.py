"""Fewer rounds of Horovod's thread: what the host gains in idle time, by hand."""

from __future__ import annotations

import pytest

from dpro.cost.sync import SyncModel, idle_share
from dpro.graph.graph import Graph
from dpro.passes.cycle_time import CycleTime, delayed
from tests.passes.test_contention import backward_ns
from tests.passes.test_tensor_fusion import state
from tests.search.graphs import ddp_graph

MS = 1_000_000
PLAIN = SyncModel(latency_ns=0, ns_per_byte=1.0)


def horovod_graph() -> Graph:
    """Forward 1 ms, five ops of 2 ms; bucket 0 (4 ms) runs from 3 to 7 ms, the rest of the time is idle."""
    graph = ddp_graph([4 * MS, 10, 10, 10, 10], MS, [2 * MS] * 5, groups=((0,), (1, 2, 3, 4)), sync=PLAIN)
    graph.info.update(negotiated=True, cycle_ns=MS, idle_share=0.2)
    return graph


def test_idle_time_shrinks_and_time_beside_bytes_does_not() -> None:
    graph = horovod_graph()
    before = state(graph)
    mark = CycleTime().apply(graph, 4 * MS)
    # a fifth of the core went to rounds, a twentieth is left: 80 % of the time is work, then 95 %
    idle = round(2 * MS * 0.80 / 0.95)
    for rank in range(2):
        assert backward_ns(graph, rank) == pytest.approx([idle, 2 * MS, 2 * MS, idle, idle], abs=1)
    graph.undo(mark)
    assert state(graph) == before


def test_the_captured_cycle_changes_nothing() -> None:
    graph = horovod_graph()
    before = state(graph)
    CycleTime().apply(graph, MS)
    assert state(graph) == before


def test_only_longer_cycles_and_only_of_horovod() -> None:
    graph = horovod_graph()
    assert min(CycleTime().candidates(graph)) == 2 * MS
    graph.info["cycle_ns"] = 20 * MS
    assert min(CycleTime().candidates(graph)) == 30 * MS
    del graph.info["negotiated"]
    assert not list(CycleTime().candidates(graph))


def test_a_gradient_waits_half_a_cycle_longer() -> None:
    graph = horovod_graph()
    model = SyncModel(latency_ns=0, ns_per_byte=1.0, delay_ns=0.7 * MS)
    assert delayed(model, graph, 5 * MS).delay_ns == pytest.approx(2.7 * MS)


@pytest.mark.parametrize(
    ("cores", "share"),
    [(1.0, 0.2), (2.0, 0.05), (0.0, 0.05)],  # with more cores: no more than the thread waited for one
)
def test_what_the_host_loses(cores: float, share: float) -> None:
    told = {"idle_share": 0.2, "main_delay_ns": 5.0, "wall_ns": 100.0, "cores": cores}
    assert idle_share([told]) == pytest.approx(share)
    assert idle_share([]) == idle_share([{}]) == 0.0
