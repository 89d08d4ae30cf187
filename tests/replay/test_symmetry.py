"""Ranks that do the same, replayed as one: equal to the full replay, op by op."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay_speed import ddp_graph as job_of_kernels
from dpro.adapter import Knob
from dpro.cost.sync import SyncModel
from dpro.graph.graph import NO_RESOURCE, Bucket, Graph, OpKind
from dpro.passes.op_fusion import OpFusion
from dpro.passes.tensor_fusion import TensorFusion
from dpro.replay import oracle
from dpro.replay.engine import replay
from dpro.replay.symmetry import Collapsed, SymmetryError, collapse
from dpro.search.critical_path import optimize
from tests.passes.regions import keras_graph, region
from tests.search.graphs import ddp_graph


def symmetric_job(rng: random.Random, ranks: int, stragglers: dict[int, int]) -> Graph:
    """A random DAG of a rank's ops, once per rank, and of shared ones; by how many ns ``stragglers`` are slower.

    Shared ops take time: see the docstring of ``collapse``.
    """
    graph = Graph()
    graph.ranks = ranks
    slots = rng.randint(1, 14)
    longest = rng.choice([1, 2, 5, 1000])
    own, channels = rng.randint(1, 3), rng.randint(0, 2)
    late_channel = rng.random() < 0.5
    if not late_channel:
        shared_on = [graph.resource(f"channel{c}") for c in range(channels)]
    for r in range(ranks):
        for k in range(own):
            graph.resource(f"rank{r}/{k}")
    if late_channel:
        shared_on = [graph.resource(f"channel{c}") for c in range(channels)]
    late_at = rng.randrange(slots)
    shared = [rng.random() < 0.3 for _ in range(slots)]
    before = [rng.sample(range(slot), rng.randint(0, min(slot, 3))) for slot in range(slots)]
    made: list[dict[int, int]] = [{} for _ in range(slots)]  # by slot: the ops of all ranks (-1: the shared one)
    order = [(slot, r) for slot in range(slots) for r in ([-1] if shared[slot] else range(ranks))]
    numbers = [
        (
            0 if rng.random() < 0.3 and not shared[slot] else rng.randint(1, longest),
            rng.choice([0, 0, rng.randint(0, longest)]),
            rng.randrange(2),
            rng.randrange(-1, channels if shared[slot] else own),
        )
        for slot in range(slots)
    ]
    if rng.random() < 0.5:  # as a builder does: rank by rank
        order.sort(key=lambda item: (item[1] < 0, item[1]))
    for slot, r in order:
        duration, gap, priority, on = numbers[slot]
        made[slot][r] = graph.add_op(
            f"op{slot}", OpKind.COLLECTIVE if r < 0 else OpKind.BACKWARD, gap=gap, priority=priority, rank=r,
            resource=NO_RESOURCE if on < 0 else shared_on[on] if r < 0 else graph.resource(f"rank{r}/{on}"),
            duration=duration + (stragglers.get(r, 0) if slot == late_at and r >= 0 else 0),
        )  # fmt: skip
    for slot, r in order:
        for s in before[slot]:
            for op in made[s].values() if r < 0 or shared[s] else [made[s][r]]:
                graph.add_edge(op, made[slot][r])
    if rng.random() < 0.3:
        graph.remove_ops(list(rng.choice(made).values()))
    return graph


def assert_same_times(full: Graph, small: Collapsed) -> None:
    a, b = oracle.replay_arrays(full.arrays()), replay(small.graph)
    onto = small.onto[full.arrays().ids]
    row = np.full(len(small.graph.column("kind")), -1)
    row[small.graph.arrays().ids] = np.arange(len(b.start))
    np.testing.assert_array_equal(a.start, b.start[row[onto]])
    np.testing.assert_array_equal(a.end, b.end[row[onto]])
    assert a.makespan_ns == b.makespan_ns


@settings(deadline=None, max_examples=300)
@given(rng=st.randoms(use_true_random=False), ranks=st.integers(1, 6), data=st.data())
def test_the_replay_is_that_of_all_ranks(rng: random.Random, ranks: int, data: st.DataObject) -> None:
    stragglers = data.draw(st.dictionaries(st.integers(0, ranks - 1), st.integers(1, 3)))
    full = symmetric_job(rng, ranks, stragglers)
    small = collapse(full)
    assert_same_times(full, small)
    kinds = {stragglers.get(r, 0) for r in range(ranks)}
    assert len(small.members) <= len(kinds)
    assert sorted(r for m in small.members.values() for r in m) == (list(range(ranks)) if small.members else [])
    assert small.graph.info["world_size"] == ranks


def test_by_hand() -> None:
    # Ranks 0 and 2 compute 10, rank 1 computes 25; all-reduce of 100; everyone updates for 7.
    graph = Graph()
    graph.ranks = 3
    host = {r: graph.resource(f"rank{r}/cpu") for r in range(3)}
    graph.info["main_resource"] = host
    work = [
        graph.add_op("work", OpKind.OUT, resource=host[r], duration=ns, rank=r, tensor=0)
        for r, ns in enumerate([10, 25, 10])
    ]
    joined = graph.add_op("all_reduce", OpKind.COLLECTIVE, duration=100, after=work)
    steal = [graph.add_op("contention", OpKind.LOCAL, resource=host[r], rank=r, after=[work[r]]) for r in range(3)]
    update = [
        graph.add_op("step", OpKind.UPDATE, resource=host[r], duration=7, rank=r, after=[joined]) for r in range(3)
    ]
    graph.out_op = {(r, 0): op for r, op in enumerate(work)}
    graph.in_op = {(r, 0): op for r, op in enumerate(update)}
    graph.set_buckets([Bucket((0,), 4, (*steal, joined))])
    small = collapse(graph)
    assert small.members == {0: (0, 2), 1: (1,)}
    assert small.assumption == "3 ranks are replayed as 2: 2 like rank 0"
    assert len(small.graph) == 7
    assert small.graph.out_op == {(0, 0): 0, (1, 0): 1}
    assert small.graph.in_op == {(0, 0): 5, (1, 0): 6}
    assert small.graph.buckets == [Bucket((0,), 4, (4, 3, 2))]  # the one that ends it comes last
    assert small.graph.info == {"world_size": 3, "main_resource": {0: host[0], 1: host[1]}}
    assert replay(small.graph).makespan_ns == 25 + 100 + 7
    assert (len(graph), graph.ranks, small.graph.ranks) == (10, 3, 2)


def test_the_latest_of_near_ones_stands_for_them() -> None:
    graph = Graph()
    graph.ranks = 3
    work = [
        graph.add_op("work", OpKind.BACKWARD, resource=graph.resource(f"r{r}"), duration=ns, gap=20, rank=r)
        for r, ns in enumerate([100, 110, 120])
    ]
    graph.add_op("all_reduce", OpKind.COLLECTIVE, duration=1000, after=work)
    assert collapse(graph, 0.05).members == {0: (0,), 1: (1,), 2: (2,)}
    near = collapse(graph, 0.1)  # 110 is within 10 % of 110, 120 is not within 10 % of 100
    assert near.members == {0: (0, 1), 2: (2,)}
    assert "up to 10 %" in near.assumption
    all_of_them = collapse(graph, 0.17)
    assert all_of_them.members == {0: (0, 1, 2)}
    assert replay(all_of_them.graph).makespan_ns == 20 + 120 + 1000 == replay(graph).makespan_ns
    assert (all_of_them.graph.column("duration")[0], all_of_them.graph.column("gap")[0]) == (120, 20)


@settings(deadline=None, max_examples=100)
@given(
    times=st.lists(st.integers(0, 2_000), min_size=1, max_size=6),
    noise=st.lists(st.lists(st.floats(0.5, 2), min_size=12, max_size=12), min_size=2, max_size=5),
    kernels=st.booleans(),
)
def test_ranks_that_are_late_in_turn(times: list[int], noise: list[list[float]], kernels: bool) -> None:
    """Each rank with noise of its own; a host thread, maybe with a stream that it launches on, and all-reduces."""
    graph = Graph()
    graph.ranks = len(noise)
    last: list[list[int]] = [[] for _ in noise]
    launched: list[list[int]] = [[] for _ in noise]
    for k, ns in enumerate(times):
        for r, factors in enumerate(noise):
            host, stream = graph.resource(f"r{r}/cpu"), graph.resource(f"r{r}/stream")
            took = {"duration": int(ns * factors[k]), "gap": int(100 * factors[6 + k]), "rank": r}
            op = graph.add_op("work", OpKind.BACKWARD, resource=host, after=last[r], **took)
            last[r] = [op]
            if kernels:
                after = [op, *launched[r]]
                launched[r] = [graph.add_op("kernel", OpKind.BACKWARD, resource=stream, after=after, **took)]
                last[r] += launched[r]
        if k % 2:
            joined = graph.add_op(
                "all_reduce", OpKind.COLLECTIVE, duration=ns, after=[op for ops in last for op in ops]
            )
            last = [[joined] for _ in noise]
        elif kernels:
            last = [ops[:1] for ops in last]  # the host does not wait
    small = collapse(graph, 1.0)
    assert list(small.members) == [0]
    full, one = replay(graph), replay(small.graph)
    assert one.makespan_ns == full.makespan_ns
    for op in range(len(small.graph)):
        assert one.end[op] == full.end[small.onto[graph.arrays().ids] == op].max()


def test_who_differs_stays() -> None:
    def job() -> Graph:
        return ddp_graph([1_000] * 3, 5_000, [10_000] * 3, ranks=4, copy_ns=[100] * 3)

    assert collapse(job()).members == {0: (0, 1, 2, 3)}
    changed = job()
    changed.set(changed.out_op[2, 1], "gap", 1)
    assert collapse(changed).members == {0: (0, 1, 3), 2: (2,)}
    for key, value in (("kind", int(OpKind.LOCAL)), ("tensor", 2), ("priority", 5), ("nbytes", 9), ("resource", -1)):
        changed = job()
        changed.set(changed.out_op[2, 1], key, value)
        assert collapse(changed).members == {0: (0, 1, 3), 2: (2,)}, key
    edge = job()
    edge.add_edge(edge.out_op[1, 0], edge.in_op[1, 2])
    assert collapse(edge).members == {0: (0, 2, 3), 1: (1,)}
    across = job()  # rank 1 waits for rank 0: neither stands for another
    across.add_edge(across.out_op[0, 0], across.in_op[1, 0])
    assert collapse(across).members == {0: (0,), 1: (1,), 2: (2, 3)}
    same_thread = job()
    same_thread.set(same_thread.out_op[0, 0], "resource", same_thread.info["main_resource"][1])
    assert collapse(same_thread).members == {0: (0,), 1: (1,), 2: (2, 3)}
    last = job()
    del last.in_op[3, 0]
    assert collapse(last).members == {0: (0, 1, 2), 3: (3,)}


@pytest.mark.parametrize("steal", [0.0, 0.25])
def test_searches_find_the_same(steal: float) -> None:
    sync = SyncModel(latency_ns=100_000, ns_per_byte=1.0, steal_ns_per_byte=steal)
    full = ddp_graph(
        [1 << 20, 3 << 20, 5_000, 2 << 20], 5_000_000, [3_000_000, 900_000, 2_000_000, 100_000], ranks=5,
        copy_ns=[50_000] * 4, update_ns=700_000, launch_ns=20_000, sync=sync,
    )  # fmt: skip
    small = collapse(full)
    assert_same_times(full, small)
    assert list(small.members.values()) == [(0, 1, 2, 3, 4)]
    fusion = TensorFusion()
    for grouping in (((0, 1, 2, 3),), ((0,), (1, 2), (3,)), ((0, 1), (2, 3)), ()):
        a, b = fusion.apply(full, grouping), fusion.apply(small.graph, grouping)
        assert replay(full).makespan_ns == replay(small.graph).makespan_ns
        full.undo(a)
        small.graph.undo(b)
    found = [optimize(graph, knobs={Knob.BUCKET_LIST, Knob.BUCKET_CAP}) for graph in (full, small.graph)]
    assert found[0].baseline_ms == found[1].baseline_ms
    assert [(c.name, c.predicted_ms) for c in found[0].candidates] == [
        (c.name, c.predicted_ms) for c in found[1].candidates
    ]


def test_regions_are_fused_alike() -> None:
    # by hand in tests/passes/test_op_fusion.py: 9.02 ms, and 8.52 ms where b takes half
    half = region("b", 0.5, 0.5)
    full = keras_graph(
        {"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 1}, {"a": 1_000_000, "c": 4_000_000}, [half], ranks=4
    )
    small = collapse(full)
    assert list(small.members) == [0]
    assert replay(small.graph).makespan_ns == pytest.approx(9.02e6)
    OpFusion().apply(small.graph, (half,))
    assert replay(small.graph).makespan_ns == pytest.approx(8.52e6)


def test_what_is_refused() -> None:
    graph = ddp_graph([1_000], 5_000, [10_000])
    with pytest.raises(SymmetryError, match="between 0 and 1"):
        collapse(graph, -0.1)
    graph.info["ps"] = object()
    with pytest.raises(SymmetryError, match="parameter servers"):
        collapse(graph)


def test_a_graph_without_ranks() -> None:
    small = collapse(Graph())
    assert (len(small.graph), small.members) == (0, {})
    small.graph.add_op("grows", OpKind.LOCAL)
    assert len(small.graph) == 1


def test_many_ranks_are_quick() -> None:
    graph = job_of_kernels(100_000, 64)
    begin = time.perf_counter()
    assert len(collapse(graph).members) == 64  # all different: the most work
    assert time.perf_counter() - begin < 1.0
