"""Collectives expanded into ring steps: the textbook's time, whoever arrives when, however it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.comm import MAX_RING_OPS, expand_rings
from dpro.graph.graph import NO_RESOURCE, Bucket, Graph, OpKind
from dpro.replay import oracle
from dpro.replay.engine import replay

S = 10**9


def job(arrivals: list[int], sizes: list[int], name: str = "all_reduce") -> Graph:
    """Ranks that compute until they arrive (ns), then all-reduces, each of 1,000 ns, one after the other."""
    graph = Graph()
    graph.ranks = len(arrivals)
    work = [
        graph.add_op("work", OpKind.BACKWARD, resource=graph.resource(f"rank{r}"), duration=t, rank=r)
        for r, t in enumerate(arrivals)
    ]
    channel = graph.resource("group/gloo")
    ops = [
        graph.add_op(name, OpKind.COLLECTIVE, resource=channel, duration=1_000, nbytes=size, after=work)
        for size in sizes
    ]
    for r in range(len(arrivals)):
        graph.add_op("step", OpKind.UPDATE, resource=graph.resource(f"rank{r}"), duration=7, rank=r, after=ops)
    graph.set_buckets([Bucket((i,), size, (op,)) for i, (op, size) in enumerate(zip(ops, sizes, strict=True))])
    return graph


def makespan(graph: Graph) -> int:
    played = replay(graph)
    assert played.end.tolist() == oracle.replay_arrays(graph.arrays()).end.tolist()
    return played.makespan_ns


@settings(deadline=None, max_examples=40)
@given(
    arrivals=st.lists(st.integers(0, 10_000), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 10_000_000), min_size=1, max_size=3),
    bandwidth=st.floats(1e6, 1e11),
    latency=st.floats(0, 1e6),
    chunk=st.sampled_from([1 << 17, 1 << 20, 1 << 40]),
    workers=st.none() | st.integers(2, 9),
)
def test_a_ring_takes_what_the_textbook_says(
    arrivals: list[int], sizes: list[int], bandwidth: float, latency: float, chunk: int, workers: int | None
) -> None:
    graph = job(arrivals, sizes)
    before, mark = makespan(graph), graph.mark()
    assert expand_rings(graph, bandwidth, latency, chunk=chunk, workers=workers) == len(sizes)
    n = workers or len(arrivals)
    expected = sum(2 * (n - 1) * (latency + size / n / bandwidth * S) for size in sizes)
    assert makespan(graph) == pytest.approx(max(arrivals) + expected + 7, abs=len(sizes))
    graph.undo(mark)
    assert makespan(graph) == before


def test_three_ranks_by_hand() -> None:
    # 3,000 bytes at 1 byte/ns: 4 steps of 100 + 1,000, in pieces of 500
    graph = job([0, 400, 100], [3_000])
    assert expand_rings(graph, S, 100, chunk=500) == 1
    [bucket] = graph.buckets
    kinds = graph.column("kind")
    sends = [op for op in bucket.ops if kinds[op] == OpKind.SEND]
    assert len(sends) == 3 * 4 * 2
    assert kinds[bucket.ops[-1]] == OpKind.COLLECTIVE
    assert graph.column("duration")[sends].tolist() == [600, 500] * 12
    played = replay(graph)
    row = {op: i for i, op in enumerate(graph.arrays().ids.tolist())}
    first = {graph.resource_names[graph.column("resource")[op]]: played.start[row[op]] for op in reversed(sends)}
    # 0 and 1 wait for rank 1, which 2 does not send to: it needs rank 0 alone
    assert first == {"link/0>1": 400, "link/1>2": 400, "link/2>0": 100}
    assert makespan(graph) == 400 + 4 * 1_100 + 7


def test_one_slow_link_sets_the_pace() -> None:
    graph = job([0, 0, 0], [3_000])
    expand_rings(graph, S, 0)
    slow = np.flatnonzero(graph.column("alive") & (graph.column("resource") == graph.resource("link/1>2")))
    graph.scale(slow, 3)
    # its four steps follow each other at 3,000 each; what the ring does after its last one: nothing
    assert makespan(graph) == 4 * 3_000 + 7


def test_many_workers_stay_few_ops() -> None:
    graph = job([0, 0], [64 << 20])
    expand_rings(graph, S, 0, workers=64)
    assert len(graph) < MAX_RING_OPS + 10
    assert makespan(graph) == pytest.approx(2 * 63 / 64 * (64 << 20) + 7, abs=1)


def test_what_is_no_ring_is_left_alone() -> None:
    graph = job([0, 0], [100], name="broadcast")
    graph.add_op("all_gather", OpKind.COLLECTIVE, resource=NO_RESOURCE, duration=5, nbytes=-1)
    assert expand_rings(graph, S, 0) == 0
    assert expand_rings(job([0, 0], [100], name="ncclDevKernel_ReduceScatter_Sum"), S, 0) == 1


@pytest.mark.parametrize(("bandwidth", "latency", "workers"), [(0, 0, 2), (1, -1, 2), (float("nan"), 0, 2), (1, 0, 1)])
def test_no_such_network(bandwidth: float, latency: float, workers: int) -> None:
    with pytest.raises(ValueError, match="no ring"):
        expand_rings(job([0, 0], [100]), bandwidth, latency, workers=workers)
