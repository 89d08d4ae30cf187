"""dPRO's Algorithm 1 for parameter servers: by hand, against all that there is, and what it leaves behind."""

from __future__ import annotations

import json
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import search_quality
from benchmarks.optimum import best_runs
from benchmarks.search_quality import groupings, partition_graph
from benchmarks.tables import search_table
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.passes.fused_partition import Fused
from dpro.replay.engine import replay
from dpro.search.fused_partition import COUNTS, Steps, search, worth_merging
from dpro.search.view import ALL, Speedups
from tests.graph.ps_jobs import US, layout, model, ps_graph
from tests.passes.test_tensor_partition import state
from tests.search.graphs import ddp_graph

MIB = 1 << 20


def job(sizes: list[int], link: SyncModel, bwd_ns: list[int]) -> Graph:
    where = layout(2, orderly=False)
    return ps_graph(sizes, 4 * MIB, where, model(where, link), bwd_ns=bwd_ns)


def test_small_gradients_go_as_one_where_messages_are_dear() -> None:
    """1 ms a message, four gradients of 4 KiB ready at once: each by itself 5 ms, as one 2 (and their bytes)."""
    result = search(job([4096] * 4, SyncModel(1e6, 1.0), [0] * 4))
    assert result.baseline_ms == pytest.approx(5, abs=0.03)
    (best,) = result.candidates
    assert best.predicted_ms == pytest.approx(2 + 2 * 16384e-6)
    assert best.groups == ((0, 1, 2, 3),)
    assert best.plan.settings() == {}  # a what-if
    assert best.plan.predicted_ms == best.predicted_ms


def test_a_large_one_is_cut_and_left_alone() -> None:
    """10 µs a message, 16 MiB at 1 ns a byte: k* = sqrt(s b / a) = 41 parts, 2 · (10 µs · 41 + s b) less what overlaps.

    In k parts: (k + 1) (a + s b / k). In 4 parts, as the job has it: 20.99 ms; in 48, the nearest that is tried: 17.62.
    """
    result = search(job([16 * MIB], SyncModel(10 * US, 1.0), [0]))
    assert result.baseline_ms == pytest.approx(5 * (0.01 + 4 * MIB / 1e6), rel=1e-3)
    assert result.candidates[0].predicted_ms == pytest.approx(49 * (0.01 + 16 * MIB / 48 / 1e6), rel=2e-3)


def everything(steps: Steps, n: int) -> int:
    """The least of all that there is, replayed one by one."""
    return min(
        steps.step_ns(tuple(zip(groups, bounds, strict=True)))
        for groups in groupings(n)
        for bounds in product(*map(steps.bounds, groups))
    )


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4))
def test_the_exact_optimum_is_the_least_of_all(seed: int, n: int) -> None:
    steps = Steps(partition_graph(random.Random(seed), n), float("inf"), ALL, (1, 2, 4))
    runs, back_ns = best_runs(
        steps.line,
        [steps.ready_ns[t] for t in range(n)],
        lambda first, end: steps.bounds(tuple(range(first, end))),
        lambda first, end, bound: steps.sizes(tuple(range(first, end)), bound),
    )
    best: Fused = tuple((tuple(range(first, end)), bound) for first, end, bound in runs)
    assert steps.step_ns(best) == everything(steps, n) == back_ns + steps.rest_ns


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("speedups", [ALL, Speedups(False, False, False, False)])
def test_near_the_least_of_all_graph_as_before(orderly: bool, speedups: Speedups) -> None:
    for seed in range(4):
        graph = partition_graph(random.Random(seed), 3, workers=2, orderly=orderly)
        before = state(graph)
        result = search(graph, counts=(1, 2, 4), speedups=speedups)
        assert state(graph) == before
        found_ms = result.candidates[0].predicted_ms if result.candidates else result.baseline_ms
        assert found_ms * 1e6 <= 1.01 * everything(Steps(graph, float("inf"), ALL, (1, 2, 4)), 3)
        for edit, chosen in (edits for best in result.candidates for edits in best.edits):
            edit.apply(graph, chosen)
            assert replay(graph).makespan_ns / 1e6 == found_ms < result.baseline_ms


def test_the_same_each_time_and_in_no_time_what_it_started_from() -> None:
    graph = partition_graph(random.Random(1), 8)
    results = [search(graph) for _ in range(2)]
    assert results[0].candidates == results[1].candidates
    assert results[0].evaluations == results[1].evaluations
    hasty = search(graph, time_budget_s=0.0)
    assert (hasty.candidates, hasty.evaluations, hasty.stopped) == ([], 1, "time budget")
    assert hasty.baseline_ms == results[0].baseline_ms


def test_dtypes_are_not_mixed() -> None:
    graph = job([4096] * 4, SyncModel(1e6, 1.0), [0] * 4)
    for tensor in graph.tensors[2:]:
        tensor.dtype = "float16"
    assert search(graph).candidates[0].groups == ((0, 1), (2, 3))


def test_nothing_to_fuse() -> None:
    assert search(ddp_graph([1, 1], 1, [1, 1])).stopped == "no gradients are pushed to a server"


def test_merges_are_refused_only_where_nothing_overtakes() -> None:
    """Second ready long after the first is back: as one they end later. With one pipe for all the line is not exact."""
    for orderly in (False, True):
        where = layout(1, orderly=orderly)
        costs = model(where, SyncModel(10.0, 1.0))
        graph = ps_graph([4096, 4096], 4096, where, costs, bwd_ns=[0, 100_000])
        steps = Steps(graph, float("inf"), ALL, COUNTS)
        here: Fused = (((0,), 4096), ((1,), 4096))
        merged: Fused = (((0, 1), 8192),)
        assert steps.step_ns(merged) > steps.step_ns(here)
        assert worth_merging(steps, here, 0, merged) is orderly


def test_a_line_that_was_wrong_refuses_nothing_more() -> None:
    where = layout(2, orderly=False)
    costs = model(where, SyncModel(10.0, 1.0), add=SyncModel(0.0, 1.0))
    graph = ps_graph([4096, 4096], 4096, where, costs, skew_ns=3_000)
    steps = Steps(graph, float("inf"), ALL, COUNTS)
    assert steps.exact
    here: Fused = (((0,), 4096), ((1,), 4096))
    # workers that are apart do not find the server busy with the other's
    assert steps.step_ns(here) != steps.estimate_ns(here)
    assert not steps.exact


def test_the_benchmark_prints_what_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    search_quality.main(["--share", "0.02", "--first", "3", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["instances"] == sum(family["instances"] for family in found["families"].values()) == 5 + 4 + 2
    assert found["within_1pct"] >= 90
    assert found["worst_pct"] <= 5
    assert found["filter_misses"] == 0 < found["rejected"]
    assert {"date", "machine", "commit", "seconds"} == found["place"].keys()
    assert search_table(found).text.count("| fusion+partition | 4 |") == 1
