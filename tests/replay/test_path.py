"""The critical path: worked out by hand, and its sum on random graphs."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.graph import Graph, OpKind
from dpro.replay.engine import replay
from dpro.replay.path import Step, critical_path
from tests.replay.random_graphs import random_graph


def two_ranks() -> Graph:
    """Both ranks: launch on the host, backward on a stream, all-reduce, optimizer. Rank 1 is slower.

    rank 0: launch 0-5, backward 5+2-27, arrives 27      rank 1: launch 0-5, backward 7-47, arrives 47
    queueing 47-50; all-reduce 50-150; optimizer after a gap of 3: 153-163 (rank 0), 153-173 (rank 1)
    """
    graph = Graph()
    arrivals = []
    for rank, work in ((0, 20), (1, 40)):
        cpu, stream = graph.resource(f"rank{rank}/cpu/1"), graph.resource(f"rank{rank}/stream/7")
        launch = graph.add_op("launch", OpKind.LOCAL, resource=cpu, duration=5, rank=rank)
        arrivals.append(
            graph.add_op("backward", OpKind.BACKWARD, resource=stream, duration=work, gap=2, rank=rank, after=[launch])
        )
    queue = graph.add_op("queueing", OpKind.LOCAL, duration=3, after=arrivals)
    joined = graph.add_op(
        "all_reduce", OpKind.COLLECTIVE, resource=graph.resource("group/0"), duration=100, after=[queue]
    )
    for rank, work in ((0, 10), (1, 20)):
        stream = graph.resource(f"rank{rank}/stream/7")
        graph.add_op("adam", OpKind.UPDATE, resource=stream, duration=work, gap=3, rank=rank, after=[joined])
    return graph


def test_by_hand_the_slow_rank_is_the_path() -> None:
    graph = two_ranks()
    path = critical_path(graph, replay(graph))
    assert path.steps == [
        Step(2, "launch", OpKind.LOCAL, 1, 0, 5, 0, 0),
        Step(3, "backward", OpKind.BACKWARD, 1, 7, 47, 2, 0),
        Step(4, "queueing", OpKind.LOCAL, -1, 47, 50, 0, 0),
        Step(5, "all_reduce", OpKind.COLLECTIVE, -1, 50, 150, 0, 0),
        Step(7, "adam", OpKind.UPDATE, 1, 153, 173, 3, 0),
    ]
    assert path.breakdown == {"compute": 5 + 40 + 20, "communication": 100, "wait": 3, "gap": 2 + 3}


def test_by_hand_a_busy_stream_is_on_the_path_and_hides_the_launch() -> None:
    # launches 0-5 and 5-10; kernels of 50: the second is eligible at 10 + 4, starts at 59
    graph = Graph()
    cpu, stream = graph.resource("cpu"), graph.resource("stream")
    first = graph.add_op("launch", OpKind.LOCAL, resource=cpu, duration=5)
    second = graph.add_op("launch", OpKind.LOCAL, resource=cpu, duration=5, after=[first])
    for launch in (first, second):
        graph.add_op("kernel", OpKind.FORWARD, resource=stream, duration=50, gap=4, after=[launch])
    path = critical_path(graph, replay(graph))
    assert [(s.op, s.start_ns, s.end_ns, s.gap_ns, s.wait_ns) for s in path.steps] == [
        (0, 0, 5, 0, 0),
        (2, 9, 59, 4, 0),
        (3, 59, 109, 0, 45),
    ]
    assert path.breakdown == {"compute": 105, "communication": 0, "wait": 0, "gap": 4}


def test_of_an_empty_graph_the_path_is_empty() -> None:
    path = critical_path(Graph(), replay(Graph()))
    assert path.steps == []
    assert set(path.breakdown.values()) == {0}


@settings(max_examples=150, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_it_is_without_holes_and_sums_exactly_to_the_makespan(rng: random.Random) -> None:
    graph = random_graph(rng)
    result = replay(graph)
    path = critical_path(graph, result)
    assert sum(path.breakdown.values()) == result.makespan_ns
    assert path.steps[0].start_ns == path.steps[0].gap_ns
    assert path.steps[-1].end_ns == result.makespan_ns
    edges = {tuple(edge) for edge in graph.edges().tolist()}
    resources = graph.column("resource")
    for before, step in pairwise(path.steps):
        assert step.start_ns == before.end_ns + step.gap_ns
        if step.wait_ns:  # it queued behind the one before it
            assert (step.gap_ns, resources[step.op]) == (0, resources[before.op])
        else:
            assert (before.op, step.op) in edges
            assert step.gap_ns == graph.column("gap")[step.op]
