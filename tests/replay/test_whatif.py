"""What-ifs on the two-rank step of ``hand_graph``: every expected makespan is worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.comm import expand_rings
from dpro.graph.graph import Graph, OpKind
from dpro.replay import whatif
from dpro.replay.engine import replay
from tests.report.hand_graph import MAKESPAN_MS, MS, two_ranks


def makespan_ms(graph: Graph) -> float:
    return replay(graph).makespan_ns / MS


def test_baseline() -> None:
    assert makespan_ms(two_ranks()) == MAKESPAN_MS


@pytest.mark.parametrize(
    ("pattern", "factor", "expected_ms", "ops"),
    [
        ("Backward", 0.5, 35, 2),  # 1 + 14 + 10 + 8 + 2
        ("^linear$", 0, 31, 2),  # 1 + 0 + 20 + 8 + 2
        ("Adam", 3, 49, 2),  # 1 + 14 + 20 + 8 + 6
        ("(?i)linear", 2, 79, 4),  # 1 + 28 + 40 + 8 + 2
        (".", 1, 45, 7),
    ],
)
def test_scale_ops(pattern: str, factor: float, expected_ms: float, ops: int) -> None:
    graph = two_ranks()
    mark = graph.mark()
    assert whatif.scale_ops(graph, pattern, factor).ops == ops
    assert makespan_ms(graph) == expected_ms
    graph.undo(mark)
    assert makespan_ms(graph) == MAKESPAN_MS


@pytest.mark.parametrize(
    ("bandwidth", "expected_ms"),
    [
        ("2x", 41),  # transfer 8 -> 4
        ("4", 39),
        ("0.5x", 53),  # 8 -> 16
        ("1e0x", 45),
    ],
)
def test_bandwidth_factor(bandwidth: str, expected_ms: float) -> None:
    graph = two_ranks()
    assert whatif.scale_bandwidth(graph, bandwidth).ops == 1
    assert makespan_ms(graph) == expected_ms


def three_sizes() -> Graph:
    """Transfers of 1, 2 and 4 MB in a row, each 1 ms + 8 ms per MB: exactly 1 Gbit/s among two ranks."""
    graph = Graph()
    graph.ranks = 2
    last: list[int] = []
    for mb in (1, 2, 4):
        last = [
            graph.add_op("all_reduce", OpKind.COLLECTIVE, duration=(1 + 8 * mb) * MS, nbytes=mb * 1_000_000, after=last)
        ]
    return graph


def test_bandwidth_leaves_the_latency() -> None:
    graph = three_sizes()
    assert makespan_ms(graph) == 3 + 8 * 7
    whatif.scale_bandwidth(graph, "2x", latency_ns=MS)
    assert makespan_ms(graph) == 3 + 4 * 7
    graph = three_sizes()
    whatif.scale_bandwidth(graph, "2x", latency_ns=20 * MS)  # more than the two small ones take: they stay
    assert makespan_ms(graph) == 9 + 17 + 20 + 13 / 2


def test_absolute_bandwidth_is_relative_to_the_measured_one() -> None:
    graph = three_sizes()  # 8 ns per byte = 1 Gbit/s of payload; 2 (n-1)/n = 1 for two ranks
    whatif.scale_bandwidth(graph, "10 Gbit/s", ns_per_byte=8, latency_ns=MS)
    assert makespan_ms(graph) == pytest.approx(3 + 5.6)
    graph = three_sizes()
    change = whatif.scale_bandwidth(graph, "500mbit", ns_per_byte=8, latency_ns=MS)
    assert makespan_ms(graph) == 3 + 16 * 7
    assert "0.5× the bandwidth measured (about 1 Gbit/s); 1000 µs of latency stay" in change.assumption
    graph = three_sizes()
    graph.info["world_size"] = 4  # on the wire 2·3/4 of the payload: the link does 1.5 Gbit/s
    whatif.scale_bandwidth(graph, "3gbit", ns_per_byte=8, latency_ns=MS)
    assert makespan_ms(graph) == 3 + 4 * 7


def test_transfers_are_those_of_known_size() -> None:
    graph = three_sizes()
    graph.add_op("barrier", OpKind.COLLECTIVE, duration=5)
    nbytes, duration_ns = whatif.transfers(graph)
    assert nbytes.tolist() == [1_000_000, 2_000_000, 4_000_000]
    assert duration_ns.tolist() == [9 * MS, 17 * MS, 33 * MS]


@pytest.mark.parametrize("text", ["fast", "", "-2x", "0", "0x", "inf", "nan", "2 parsecs", "10GB", "1e999", "2x; rm"])
def test_bandwidth_nobody_can_mean(text: str) -> None:
    with pytest.raises(whatif.WhatIfError, match="bandwidth"):
        whatif.parse_bandwidth(text, 1.0)


def test_absolute_bandwidth_needs_sizes() -> None:
    graph = Graph()
    graph.ranks = 2
    graph.add_op("all_reduce", OpKind.COLLECTIVE, duration=MS)
    with pytest.raises(whatif.WhatIfError, match="give a factor"):
        whatif.scale_bandwidth(graph, "10gbit")


def test_workers_scale_an_all_reduce_as_a_ring() -> None:
    graph = two_ranks()
    change = whatif.set_workers(graph, 4)
    assert makespan_ms(graph) == 49  # 8 ms · (2·3/4) / (2·1/2) = 12 ms
    assert "2(N-1)/N" in change.assumption


def test_workers_start_from_the_world_size_when_the_trace_holds_fewer_ranks() -> None:
    graph = two_ranks()
    graph.info["world_size"] = 4
    whatif.set_workers(graph, 2)
    assert makespan_ms(graph) == pytest.approx(37 + 16 / 3)  # 8 ms · 1 / 1.5


def test_latency_grows_with_the_steps_of_the_ring() -> None:
    graph = two_ranks()
    change = whatif.set_workers(graph, 4, latency_ns=2 * MS)
    assert makespan_ms(graph) == 37 + 2 * 3 + 6 * 1.5  # 2 steps become 6; 6 ms of bytes become 9
    assert "2000 µs of latency" in change.assumption


@given(
    workers=st.integers(2, 12), latency_ns=st.floats(0, 4e6), bandwidth=st.floats(1e8, 1e10), factor=st.floats(0.1, 10)
)
@settings(deadline=None, max_examples=30)
def test_a_what_if_is_the_replay_of_its_ring(workers: int, latency_ns: float, bandwidth: float, factor: float) -> None:
    """A network of ``bandwidth`` and ``latency_ns`` per step, asked about another: in one op, and step by step."""
    one, steps = two_ranks(), two_ranks()
    [op] = np.flatnonzero(one.column("kind") == OpKind.COLLECTIVE).tolist()
    total = 2 * (latency_ns + 500_000 / bandwidth * 1e9)
    for graph in (one, steps):
        graph.set(op, "duration", round(total))
    # at the captured bandwidth, workers and latency the captured time comes back
    mark = steps.mark()
    assert expand_rings(steps, bandwidth, latency_ns) == 1
    assert replay(steps).makespan_ns == pytest.approx(replay(one).makespan_ns, abs=2)
    steps.undo(mark)
    whatif.scale_bandwidth(one, f"{factor:.12f}x", latency_ns=2 * latency_ns)
    whatif.set_workers(one, workers, latency_ns=2 * latency_ns)
    expand_rings(steps, bandwidth * factor, latency_ns, workers=workers)
    assert replay(steps).makespan_ns == pytest.approx(replay(one).makespan_ns, abs=2 * workers + 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
        ("all_reduce", "allreduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "allgather"),
        ("reduce_scatter", "reducescatter"),
        ("gloo:broadcast", "broadcast"),
        ("ncclKernel_SendRecv", None),
    ],
)
def test_ring_model(name: str, expected: str | None) -> None:
    assert whatif.ring_model(name) == expected


def test_refusals_say_why() -> None:
    graph = two_ranks()
    with pytest.raises(whatif.WhatIfError, match="not a regular expression"):
        whatif.scale_ops(graph, "(", 2)
    with pytest.raises(whatif.WhatIfError, match="no op's name matches"):
        whatif.scale_ops(graph, "conv", 2)
    for factor in (-1, float("nan"), float("inf")):
        with pytest.raises(whatif.WhatIfError, match="finite"):
            whatif.scale_ops(graph, "linear", factor)
    with pytest.raises(whatif.WhatIfError, match="2 or more"):
        whatif.set_workers(graph, 1)
    alone = Graph()
    alone.ranks = 1
    alone.add_op("all_reduce", OpKind.COLLECTIVE, duration=MS)
    with pytest.raises(whatif.WhatIfError, match="1 worker"):
        whatif.set_workers(alone, 8)
    point_to_point = Graph()
    point_to_point.ranks = 2
    point_to_point.add_op("ncclKernel_SendRecv", OpKind.COLLECTIVE, duration=MS)
    with pytest.raises(whatif.WhatIfError, match="no model"):
        whatif.set_workers(point_to_point, 4)
    silent = Graph()
    silent.add_op("linear", OpKind.FORWARD, duration=MS)
    with pytest.raises(whatif.WhatIfError, match="no bandwidth to change"):
        whatif.scale_bandwidth(silent, "2x")
