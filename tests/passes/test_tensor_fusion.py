"""Tensor fusion: times worked out by hand, exact undo, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph, OpKind, TensorInfo
from dpro.passes.ddp_buckets import MIB
from dpro.passes.tensor_fusion import Grouping, TensorFusion, add_collective, captured, ddp_grouping
from dpro.replay.engine import replay
from dpro.replay.oracle import replay_arrays
from tests.search.graphs import ddp_graph


def makespan_ns(graph: Graph) -> int:
    return replay_arrays(graph.arrays()).makespan_ns


def state(graph: Graph) -> dict[str, Any]:
    """Everything a journal must give back."""
    arrays = graph.arrays()
    keys = ("ids", "resource", "duration", "gap", "priority", "indptr", "indices")
    return {key: getattr(arrays, key).tolist() for key in keys} | {
        "buckets": list(graph.buckets),
        "columns": {key: graph.column(key).tolist() for key in ("kind", "tensor", "rank", "nbytes", "alive")},
    }


# 1 µs latency, 1 ns per byte; forward 5 µs, gradients ready at 15, 25, 35 µs
SYNC = SyncModel(latency_ns=1_000, ns_per_byte=1.0)
THREE = {"sizes": [4_000, 20_000, 2_000], "fwd_ns": 5_000, "bwd_ns": [10_000] * 3, "sync": SYNC}


@pytest.mark.parametrize(
    ("groups", "end_ns"),
    [
        (((0, 1, 2),), 35_000 + 27_000),
        (((0,), (1, 2)), 35_000 + 23_000),
        (((0, 1), (2,)), 25_000 + 25_000 + 3_000),  # the second bucket waits for the channel
        (((0,), (1,), (2,)), 25_000 + 21_000 + 3_000),
    ],
)
def test_step_by_hand(groups: Grouping, end_ns: int) -> None:
    graph = ddp_graph(**THREE)
    TensorFusion().apply(graph, groups)
    assert makespan_ns(graph) == end_ns
    assert captured(graph) == groups
    assert [bucket.nbytes for bucket in graph.buckets] == [sum(THREE["sizes"][t] for t in g) for g in groups]
    # one op per bucket and nothing else
    assert [len(bucket.ops) for bucket in graph.buckets] == [1] * len(groups)


def test_the_slowest_rank_starts_a_collective() -> None:
    graph = ddp_graph(**THREE, skew_ns=7_000)
    assert makespan_ns(graph) == 42_000 + 27_000


def test_no_synchronisation() -> None:
    graph = ddp_graph(**THREE)
    TensorFusion().apply(graph, ())
    assert makespan_ns(graph) == 35_000
    assert graph.buckets == []


def test_launches_move_with_the_last_member() -> None:
    graph = ddp_graph(**THREE, launch_ns=500, groups=((0, 1), (2,)))
    duration = graph.column("duration")
    assert [duration[graph.out_op[1, t]] for t in range(3)] == [0, 500, 500]
    mark = TensorFusion().apply(graph, ((0,), (1, 2)))
    assert [graph.column("duration")[graph.out_op[1, t]] for t in range(3)] == [500, 0, 500]
    # two launches before the last bucket
    assert makespan_ns(graph) == 35_000 + 2 * 500 + 23_000
    graph.undo(mark)
    assert [graph.column("duration")[graph.out_op[0, t]] for t in range(3)] == [0, 500, 500]


def test_copies_overlap_with_later_buckets() -> None:
    # tensor 0 is handed on at 35 µs (host free, reduced at 20), tensors 1, 2 after 58 µs
    graph = ddp_graph(**THREE, copy_ns=[3_000, 4_000, 1_000], update_ns=100)
    TensorFusion().apply(graph, ((0,), (1, 2)))
    assert makespan_ns(graph) == 58_000 + 5_000 + 100


def test_contention_delays_compute_that_runs_and_nothing_else() -> None:
    # 2 MiB at 1 ns/B in two pieces; the host loses half the time that bytes move
    sync = SyncModel(latency_ns=1_000, ns_per_byte=1.0, steal_ns_per_byte=0.5)
    graph = ddp_graph([2 * MIB, 0], 0, [10_000, 6 * MIB], sync=sync, groups=((0,), (1,)))
    # The second backward is one op and starts before the first piece does: it is not cut in two,
    # what it lost comes after it, before the OUT op.
    assert makespan_ns(graph) == 10_000 + 6 * MIB + 2 * (MIB // 2) + 1_000
    # Everything waits for the one bucket: the host is idle, nothing is lost.
    TensorFusion().apply(graph, ((0, 1),))
    assert makespan_ns(graph) == 10_000 + 6 * MIB + 1_000 + 2 * MIB
    pieces = [op for op in graph.buckets[0].ops if graph.column("kind")[op] == OpKind.COLLECTIVE]
    assert [int(graph.column("duration")[op]) for op in pieces] == [1_000, MIB, MIB]


@given(nbytes=st.integers(0, 200 * MIB), steal=st.floats(0, 3), slope=st.floats(0, 20))
@settings(deadline=None)
def test_pieces_add_up(nbytes: int, steal: float, slope: float) -> None:
    graph = Graph()
    graph.ranks = 2
    graph.info["main_resource"] = {r: graph.resource(f"rank{r}/cpu/main") for r in range(2)}
    model = SyncModel(latency_ns=12_345, ns_per_byte=slope, steal_ns_per_byte=steal)
    ops = list(add_collective(graph, (0,), nbytes, (), (), model))
    kind, duration, rank = graph.column("kind")[ops], graph.column("duration")[ops], graph.column("rank")[ops]
    assert duration[kind == OpKind.COLLECTIVE].sum() == model.time_ns(nbytes)
    for r in range(2):
        assert duration[(kind == OpKind.LOCAL) & (rank == r)].sum() == round(steal * nbytes)
    assert np.count_nonzero(kind == OpKind.COLLECTIVE) <= 33
    assert len(ops) == 1 if not steal else len(ops) > 1


groupings = st.lists(st.booleans(), min_size=7, max_size=7)


def _grouping(ends: list[bool]) -> Grouping:
    groups: list[list[int]] = [[]]
    for t in range(8):
        groups[-1].append(t)
        if t < 7 and ends[t]:
            groups.append([])
    return tuple(map(tuple, groups))


@settings(deadline=None, max_examples=60)
@given(groupings, groupings, st.sampled_from([0.0, 0.4]))
def test_undo_is_exact_and_the_last_grouping_counts(first: list[bool], second: list[bool], steal: float) -> None:
    sync = SyncModel(latency_ns=1_000, ns_per_byte=1.0, steal_ns_per_byte=steal)
    sizes = [3 * MIB, 10, 500, MIB, 2 * MIB, 7, 80_000, 4 * MIB]
    graph = ddp_graph(sizes, 100, [5 * MIB] * 8, sync=sync, launch_ns=300, skew_ns=99)
    fusion, before = TensorFusion(), state(graph)
    direct = fusion.apply(graph, _grouping(second))
    there = makespan_ns(graph)
    graph.undo(direct)
    assert state(graph) == before
    outer = fusion.apply(graph, _grouping(first))
    between = state(graph)
    inner = fusion.apply(graph, _grouping(second))
    assert makespan_ns(graph) == there
    graph.undo(inner)
    assert state(graph) == between
    graph.undo(outer)
    assert state(graph) == before


@settings(deadline=None, max_examples=40)
@given(groupings, st.permutations(range(8)))
def test_without_a_thread_order_every_member_is_waited_for(ends: list[bool], finish: list[int]) -> None:
    """Gradients on no resource (streams, several threads) become ready in any order."""
    graph = Graph()
    graph.ranks = 1
    graph.tensors = [TensorInfo(f"p{t}", 1_000, "f", t) for t in range(8)]
    graph.info.update(sync=SYNC, main_resource={0: graph.resource("rank0/cpu/main")})
    done = graph.add_op("update", OpKind.UPDATE)
    for t in range(8):
        graph.out_op[0, t] = graph.add_op("out", OpKind.OUT, duration=1_000 * finish[t], tensor=t)
        graph.in_op[0, t] = graph.add_op("in", OpKind.IN, tensor=t)
        graph.add_edge(graph.in_op[0, t], done)
    TensorFusion().apply(graph, _grouping(ends))
    end = 0
    for group in _grouping(ends):
        end = max(end, *(1_000 * finish[t] for t in group)) + 1_000 + 1_000 * len(group)
    assert makespan_ns(graph) == end


def test_legal() -> None:
    graph = ddp_graph([8] * 4, 0, [10] * 4, dtypes=["f", "f", "h", "h"], groups=((0, 1), (2, 3)))
    fusion = TensorFusion()
    assert fusion.legal(graph, ((0, 1), (2, 3)))
    assert fusion.legal(graph, ((0,), (1,), (2,), (3,)))
    assert not fusion.legal(graph, ((0, 1, 2), (3,)))  # mixed dtypes
    assert not fusion.legal(graph, ((0, 1), (2,)))  # one left out
    assert not fusion.legal(graph, ((0, 1), (2, 3), (3,)))  # one twice
    assert not fusion.legal(graph, ((1,), (0,), (2, 3)))  # not in ready order
    # with caps that neither dtype reaches, DDP launches the later dtype first
    assert fusion.legal(graph, ((2, 3), (0, 1)))


@pytest.mark.parametrize("groups", [((0, 1, 2), (3,)), ((0, 1), (), (2, 3))])
def test_refused_before_anything_changes(groups: Grouping) -> None:
    graph = ddp_graph([8] * 4, 0, [10] * 4, dtypes=["f", "f", "h", "h"], groups=((0, 1), (2, 3)))
    before = state(graph)
    with pytest.raises(ValueError):
        TensorFusion().apply(graph, groups)
    assert state(graph) == before


def test_candidates_are_legal_distinct_and_ranked_by_cost_alone() -> None:
    graph = ddp_graph([MIB] * 60, 0, [10] * 60)
    fusion = TensorFusion()
    found = list(fusion.candidates(graph))
    assert len(found) == len(set(found)) == 8
    assert all(fusion.legal(graph, grouping) for grouping in found)
    assert [len(g) for g in found[:2]] == [4, 15]  # default: 1, 25, 25, 9 MiB; uniform 4 MiB
    # 100 µs a launch on the channel, 1 ns a byte
    assert fusion.cost(graph, found[1]) == 15 * 100_000 + 60 * MIB


def test_ready_order_rules_not_ids() -> None:
    graph = ddp_graph([MIB, 2 * MIB, 3 * MIB], 0, [10] * 3)
    graph.tensors = [TensorInfo(t.name, t.nbytes, t.dtype, 2 - t.ready) for t in graph.tensors]
    assert ddp_grouping(graph, [3 * MIB]) == ((2,), (1, 0))


@pytest.mark.parametrize("steal", [0.0, 1e-9])
def test_two_in_flight_hide_one_anothers_latency(steal: float) -> None:
    """Ready at 10, 20, 30; 500 ns of latency, 1,000 of transfer. One at a time: 10 + 3 · 1,500."""
    model = SyncModel(latency_ns=500, ns_per_byte=1, steal_ns_per_byte=steal)
    graph = ddp_graph([1_000] * 3, 0, [10] * 3, sync=model)
    each = ((0,), (1,), (2,))
    mark = TensorFusion().apply(graph, each)
    assert replay(graph).makespan_ns == 4_510
    graph.undo(mark)
    graph.info["in_flight"] = 2
    TensorFusion().apply(graph, each)
    # transfers from 510, 1,510 and 2,510: the third was launched at 1,510, when the first was done
    assert replay(graph).makespan_ns == 3_510
