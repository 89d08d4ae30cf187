"""The search for how much to have on its way at once: what it finds on a slow link, and that it keeps to its limits."""

from __future__ import annotations

import time

import pytest

from dpro.adapter import Knob
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO
from dpro.plan import Plan
from dpro.search.critical_path import optimize
from dpro.search.in_flight import LEAST_BYTES, best_flows
from dpro.trace.byteps import DEFAULT_PARTITION_BYTES, PAGE_BYTES
from tests.graph.ps_jobs import layout, model, ps_graph
from tests.passes.test_tensor_partition import state

MS = 1_000_000
#: 200 Mbit/s
SLOW = SyncModel(0.0, 40.0)
SIZES = [2_048_000, 1_048_576, 6_422_528, 147_456, 73_728, 1_728]
KNOBS = {Knob.PARTITION_BOUND, Knob.IN_FLIGHT}


def slow_graph(sizes: list[int], *, orderly: bool = True, lag_ns: float = 500_000.0) -> Graph:
    where = layout(orderly=orderly)
    lags = dict.fromkeys(("out", "acknowledge", "ask", "in"), lag_ns)
    return ps_graph(sizes, DEFAULT_PARTITION_BYTES, where, model(where, SLOW, lags=lags), bwd_ns=[MS] * len(sizes))


def test_on_a_slow_link_pushes_and_pulls_go_side_by_side() -> None:
    """Captured: all is pushed, then all is pulled, 2 S b. At best: S b, and what the first and the last part take."""
    graph = slow_graph(SIZES)
    before = state(graph)
    found = optimize(graph, knobs=KNOBS, fingerprint={"model": "m"})
    assert state(graph) == before
    both_ms = 2 * sum(SIZES) * 40 / MS
    assert found.baseline_ms == pytest.approx(both_ms, rel=0.02)
    best = found.candidates[0]
    assert both_ms / 2 < best.predicted_ms < 0.75 * both_ms
    plan = best.plan
    assert plan.fingerprint == {"model": "m"} and plan.push_order == [f"p{t}" for t in range(len(SIZES))]
    assert plan.partitions is not None and set(plan.partitions) == set(plan.push_order)
    (part,) = set(plan.partitions.values())
    assert part % PAGE_BYTES == 0 and LEAST_BYTES <= part < max(SIZES) / 2
    assert plan.in_flight_bytes is not None and 2 * part <= plan.in_flight_bytes < sum(SIZES)
    assert plan.predicted_ms == best.predicted_ms and plan.baseline_ms == found.baseline_ms
    assert Plan.loads(plan.dumps()) == plan
    assert not found.at_start


def test_neither_end_of_the_sizes_is_best() -> None:
    """Large parts leave a link idle at either end, small ones cost as many lags."""
    graph = slow_graph(SIZES, lag_ns=2_000_000.0)
    flow = best_flows(graph, time.monotonic() + 60)[0][0].flow
    assert LEAST_BYTES < flow.part_bytes < DEFAULT_PARTITION_BYTES


def test_no_part_is_larger_than_the_jobs_own() -> None:
    graph = slow_graph(SIZES)
    graph.info[INFO].job_bytes = 64 * PAGE_BYTES
    flows, _ = best_flows(graph, time.monotonic() + 60)
    assert flows and all(verdict.flow.part_bytes <= 64 * PAGE_BYTES for verdict in flows)


def test_without_the_knob_there_is_none_and_without_time_neither() -> None:
    graph = slow_graph(SIZES)
    found = optimize(graph, knobs={Knob.PARTITION_BOUND})
    assert all(candidate.plan.in_flight_bytes is None for candidate in found.candidates)
    assert best_flows(graph, time.monotonic() - 1) == ([], 0)
    alone = optimize(graph, knobs={Knob.IN_FLIGHT})
    assert alone.candidates and all(candidate.plan.in_flight_bytes for candidate in alone.candidates)


def test_where_one_small_gradient_is_pushed_there_is_nothing_to_gain() -> None:
    found = optimize(slow_graph([8_192]), knobs=KNOBS)
    assert all(candidate.plan.in_flight_bytes is None for candidate in found.candidates)
