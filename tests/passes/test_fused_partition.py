"""Gradients that go to a server as one, and in parts: pipelines worked out by hand, exact undo, what is kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.passes import registry
from dpro.passes.fused_partition import Fused, FusedPartition, pushed, runs
from dpro.replay.engine import replay
from dpro.trace.byteps import PAGE_BYTES
from tests.graph.ps_jobs import layout, model, ps_graph
from tests.passes.test_tensor_partition import state

PAGE = PAGE_BYTES
#: 1 ns for a byte.
LINK = SyncModel(0.0, 1.0)


def job(tensors: list[int], link: SyncModel = LINK, *, bwd_ns: list[int] | None = None, workers: int = 2) -> Graph:
    where = layout(workers, orderly=False)
    return ps_graph(tensors, 64 * PAGE, where, model(where, link), bwd_ns=bwd_ns)


def under(graph: Graph, candidate: Fused) -> int:
    mark = FusedPartition().apply(graph, candidate)
    found = replay(graph).makespan_ns
    graph.undo(mark)
    return found


def test_parts_of_what_goes_as_one() -> None:
    """Pushed for 2 P in parts of P: the first is pulled beside the second's push, the second until 3 P."""
    graph = job([PAGE, PAGE])
    assert under(graph, (((0, 1), 2 * PAGE),)) == 4 * PAGE
    assert under(graph, (((0, 1), PAGE),)) == 3 * PAGE
    assert under(graph, (((0,), PAGE), ((1,), PAGE))) == 3 * PAGE


def test_it_goes_when_the_last_of_it_is_ready() -> None:
    """The second is ready at 10 P. The first, by itself, is back by then."""
    graph = job([PAGE, PAGE], bwd_ns=[0, 10 * PAGE])
    assert under(graph, (((0,), PAGE), ((1,), PAGE))) == 12 * PAGE
    assert under(graph, (((0, 1), 2 * PAGE),)) == 14 * PAGE


def test_fusing_saves_what_a_message_holds_its_link_for() -> None:
    """10 P a message: two of P are pushed by 11 P and 22 P, and pulled in 11 P more; one of 2 P takes 12 P each way."""
    graph = job([PAGE, PAGE], SyncModel(10.0 * PAGE, 1.0))
    assert under(graph, (((0,), PAGE), ((1,), PAGE))) == 33 * PAGE
    assert under(graph, (((0, 1), 2 * PAGE),)) == 24 * PAGE


@pytest.mark.parametrize(
    ("candidate", "legal"),
    [
        ((((0, 1), PAGE), ((2,), PAGE)), True),
        ((((0, 2), PAGE), ((1,), PAGE)), True),
        ((((0,), PAGE), ((1,), PAGE)), False),  # one is missing
        ((((0, 1), PAGE), ((1, 2), PAGE)), False),
        ((((0, 1), PAGE), ((2,), 100)), False),  # no whole page
        ((((0, 1, 2), 0),), False),
    ],
)
def test_legal(candidate: Fused, legal: bool) -> None:
    assert FusedPartition().legal(job([PAGE, 2 * PAGE, 5]), candidate) is legal


def test_dtypes_stay_apart() -> None:
    graph = job([8, 8, 8])
    graph.tensors[1].dtype = "float16"
    assert not FusedPartition().legal(graph, (((0, 1), PAGE), ((2,), PAGE)))
    assert runs(graph, 1 << 20) == [(0,), (1,), (2,)]
    assert runs(job([8, 8, 8]), 16) == [(0, 1), (2,)]


@pytest.mark.parametrize("candidate", [(((0, 7), PAGE),), (((), PAGE),), (((0,), 0),)])
def test_what_cannot_be_applied(candidate: Fused) -> None:
    graph = job([8, 8])
    before = state(graph)
    with pytest.raises((ValueError, IndexError)):
        FusedPartition().apply(graph, candidate)
    assert state(graph) == before


def test_groups_that_stay_cost_no_edit() -> None:
    graph = job([PAGE] * 4)
    edit = FusedPartition()
    edit.apply(graph, (((0, 1), PAGE), ((2,), PAGE), ((3,), PAGE)))
    kept, gone = graph.buckets[0].ops, {*graph.buckets[1].ops, *graph.buckets[2].ops}
    mark = graph.mark()
    edit.apply(graph, (((0, 1), PAGE), ((2, 3), PAGE)))
    assert graph.buckets[0].ops == kept
    assert set(graph.changes(mark).removed) == gone
    edit.apply(graph, (((0, 1), 2 * PAGE), ((2, 3), PAGE)))
    assert graph.buckets[0].ops != kept


def test_candidates_are_legal_and_the_pass_can_be_found() -> None:
    graph = job([3 << 20] * 5)
    edit = registry.find("fused_partition")
    found = list(edit.candidates(graph))
    assert {len(one) for one in found} == {5, 3, 1}
    assert all(edit.legal(graph, one) for one in found)
    assert edit.knobs == frozenset()
    assert edit.cost(graph, found[0]) == 15 << 20


@st.composite
def fused(draw: st.DrawFn, n: int) -> Fused:
    cuts = [0, *sorted(draw(st.sets(st.integers(1, n - 1)))), n]
    pairs = pairwise(cuts)
    return tuple((tuple(range(a, b)), PAGE * draw(st.integers(1, 4))) for a, b in pairs)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.integers(1, 5 * PAGE), min_size=2, max_size=5))
def test_one_after_another_is_as_each_alone(data: st.DataObject, sizes: list[int]) -> None:
    """What is kept of the edit before is what a fresh edit makes; undo gives back the graph."""
    graph = job(sizes, SyncModel(500.0, 1.0), bwd_ns=[3_001 * (t + 1) for t in range(len(sizes))], workers=1)
    before = state(graph)
    mark = graph.mark()
    for _ in range(3):
        candidate = data.draw(fused(len(sizes)))
        FusedPartition().apply(graph, candidate)
        fresh = job(sizes, SyncModel(500.0, 1.0), bwd_ns=[3_001 * (t + 1) for t in range(len(sizes))], workers=1)
        assert replay(graph).makespan_ns == under(fresh, candidate)
        assert [bucket.tensors for bucket in graph.buckets] == [group for group, _ in candidate]
        assert pushed(graph) == list(range(len(sizes)))
    graph.undo(mark)
    assert state(graph) == before
