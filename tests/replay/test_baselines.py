"""Daydream's estimate, worked out by hand on the two-rank graph of test_path."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dpro.graph.graph import Arrays, Graph, OpKind
from dpro.replay.baselines import daydream
from dpro.replay.engine import replay
from tests.replay.test_path import two_ranks

ALL_REDUCE = 5


def sized(nbytes: int = 1000) -> Graph:
    graph = two_ranks()
    graph.set(ALL_REDUCE, "nbytes", nbytes)
    return graph


def test_it_sees_one_worker_and_size_over_bandwidth() -> None:
    # Rank 0 alone: backward ends 27, queueing 30, then 1000 bytes, gap 3, adam 10.
    assert daydream(sized(), bandwidth_bytes_per_s=20e9) == 30 + 50 + 3 + 10
    assert daydream(sized(), bandwidth_bytes_per_s=5e9) == 30 + 200 + 3 + 10


def test_without_a_bandwidth_it_takes_that_of_all_collectives_together() -> None:
    graph = sized()
    assert daydream(graph) == 30 + 100 + 3 + 10  # 1000 bytes in 100 ns: as measured
    # A second one after it, of 3000 bytes in 60 ns: 4000 bytes in 160 ns, so 40 ns and 120 ns
    graph.add_op(
        "all_reduce",
        OpKind.COLLECTIVE,
        resource=graph.resource("group/0"),
        duration=60,
        nbytes=3000,
        after=[ALL_REDUCE],
    )
    assert daydream(graph) == 30 + 40 + 120


def test_a_collective_of_unknown_size_keeps_its_time() -> None:
    assert daydream(two_ranks()) == 143
    assert daydream(two_ranks(), bandwidth_bytes_per_s=1.0) == 143


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bandwidth_is_a_positive_number(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        daydream(sized(), bandwidth_bytes_per_s=bandwidth)


def test_the_graph_is_as_before() -> None:
    graph = sized()
    before, mark, makespan = graph.arrays(), graph.mark(), replay(graph).makespan_ns
    daydream(graph, 20e9)
    assert graph.mark() == mark
    after = graph.arrays()
    for field in fields(Arrays):
        one, other = getattr(before, field.name), getattr(after, field.name)
        assert (one == other) if field.name == "resources" else one.tolist() == other.tolist()
    assert replay(graph).makespan_ns == makespan == 173


def test_the_graph_is_as_before_also_when_the_replay_fails() -> None:
    graph = sized()
    graph.add_edge(ALL_REDUCE, 4)
    mark, edges = graph.mark(), graph.edges().tolist()
    with pytest.raises(ValueError, match="waits for itself"):
        daydream(graph)
    assert (graph.mark(), graph.edges().tolist()) == (mark, edges)
