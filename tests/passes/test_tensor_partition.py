"""Tensor partition: pipelines worked out by hand, exact undo, equality with a graph made anew, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.adapter import Knob
from dpro.cost.ps import MODEL, PsModel
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.graph.ps_layout import Layout
from dpro.graph.ps_ops import INFO
from dpro.passes import registry
from dpro.passes.tensor_partition import Cuts, TensorPartition, captured, uniform
from dpro.replay.engine import replay
from dpro.replay.oracle import replay_arrays
from dpro.trace.byteps import PAGE_BYTES
from tests.graph.ps_jobs import column, layout, model, ps_graph

MS = 1_000_000
PAGE = PAGE_BYTES
#: 1 ms for a message and 10 ns per byte
LINK = SyncModel(latency_ns=1 * MS, ns_per_byte=10.0)
SIZE = 1_000_000


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


@pytest.mark.parametrize("parts", [1, 2, 4, 10])
def test_a_pipeline_of_two_links(parts: int) -> None:
    """k pushes after each other, each pull beside the next push: (k + 1) (a + b·s/k)."""
    where = layout(orderly=False)
    graph = ps_graph([SIZE], SIZE // parts, where, model(where, LINK))
    assert makespan_ns(graph) == (parts + 1) * (MS + 10 * SIZE // parts)


@pytest.mark.parametrize("parts", [1, 2, 4, 10])
def test_who_asks_in_order_asks_after_what_was_handed_to_the_link(parts: int) -> None:
    """All parts are handed to the link at once, so the first question goes behind the last push: 2 k (a + b·s/k)."""
    where = layout()
    graph = ps_graph([SIZE], SIZE // parts, where, model(where, LINK))
    assert makespan_ns(graph) == 2 * parts * (MS + 10 * SIZE // parts)


@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 4, 10])
def test_copies_slower_than_the_link_set_the_pace(parts: int, orderly: bool) -> None:
    """Copied out at 30 ns a byte: the link is idle before each part, so k·c/k and one part's push and pull."""
    where = layout(orderly=orderly)
    costs = model(where, SyncModel(0.0, 10.0), copy=SyncModel(0.0, 30.0))
    graph = ps_graph([SIZE], SIZE // parts, where, costs)
    # and the last part is copied in
    assert makespan_ns(graph) == 30 * SIZE + (10 + 10 + 30) * SIZE // parts


def test_a_server_that_is_slower_than_its_links() -> None:
    """Pushes of four parts by two workers are there at 10, 20, 30, 40 ms; each of the eight takes 20 ms to add."""
    where = layout(orderly=False)
    costs = model(where, SyncModel(0.0, 10.0), add=SyncModel(0.0, 20.0))
    graph = ps_graph([4 * MS], 1 * MS, where, costs)
    assert makespan_ns(graph) == (10 + 8 * 20 + 10) * MS
    # a worker whose gradient is late by 15 ms: its pushes are there at 25, 35, 45, 55; the thread is never idle, and
    # adds in the order of arrival: a1 10-30, a2 (there at 20) 30-50, b1 (25) -70, a3, b2 -110, a4, b3 -150, b4 -170
    late = ps_graph([4 * MS], 1 * MS, where, costs, skew_ns=15 * MS)
    assert sorted(ends(late, "summed")) == [70 * MS, 110 * MS, 150 * MS, 170 * MS]
    assert makespan_ns(late) == 180 * MS


def ends(graph: Graph, name: str) -> list[int]:
    played, arrays = replay(graph), graph.arrays()
    return [int(played.end[i]) for i, op in enumerate(arrays.ids.tolist()) if graph.name_of(op) == name]


@pytest.mark.parametrize(("orderly", "expected_ms"), [(False, 51), (True, 54)])
def test_lags_hold_nothing(orderly: bool, expected_ms: int) -> None:
    """Two parts of 10 ms on a link: pushed from 3 to 13 and to 23, acknowledged at 16 and 26, asked for at 20 and 30.

    Out of order the first pull begins at 25, the second right behind it at 35. In order the first question goes when
    the second push is through, at 23: pulls from 28 to 38 and to 48. 6 ms later the last one is copied in.
    """
    where = layout(orderly=orderly)
    lags = dict(zip(("out", "push", "acknowledge", "ask", "pull", "in"), range(MS, 7 * MS, MS), strict=True))
    graph = ps_graph([SIZE], SIZE // 2, where, model(where, SyncModel(0.0, 20.0), lags=lags))
    assert makespan_ns(graph) == expected_ms * MS


@pytest.mark.parametrize(("credit", "order"), [(0, [0, 1, 2]), (2, [0, 2, 1])])
def test_with_credit_the_first_declared_goes_first(credit: int, order: list[int]) -> None:
    """Ready at 0, 1, 2 ns, declared the other way round; while the first is copied out, both others come."""
    where = changed(layout(workers=1, credit=credit), declared={0: 2, 1: 1, 2: 0})
    graph = ps_graph([4_000] * 3, 4_000, where, model(where, LINK, copy=SyncModel(0.0, 1.0)), bwd_ns=[0, 1, 1])
    played, arrays = replay(graph), graph.arrays()
    copies = [(int(played.start[i]), op) for i, op in enumerate(arrays.ids.tolist()) if graph.name_of(op) == "copy out"]
    assert [int(graph.column("tensor")[op]) for _, op in sorted(copies)] == order


def test_two_hosts_share_their_links() -> None:
    """A worker and a server on each host: a link carries its worker's pushes and its server's answers."""
    pairs = {(w, s): (f"link/worker{w}>server{s}", f"link/server{s}>worker{w}") for w in (0, 1) for s in (0, 1)}
    links = pairs | {(0, 1): ("link/a>b", "link/b>a"), (1, 0): ("link/b>a", "link/a>b")}
    where = Layout((0, 1), 2, "naive", {}, links)
    names = {name for pair in links.values() for name in pair}
    costs = PsModel({name: SyncModel(0.0, 0.0 if "worker" in name else 10.0) for name in names})
    # one part each: tensor 0 is at server 0, tensor 1 at server 1. Each way a push of 10 ms, then an answer of 10 ms
    graph = ps_graph([SIZE, SIZE], SIZE, where, costs)
    assert makespan_ns(graph) == 20 * MS
    # half of each tensor is at each server: the same bytes, but a question may find the link taken by an answer
    TensorPartition().apply(graph, uniform(graph, SIZE // 2))
    assert 20 * MS <= makespan_ns(graph) <= 25 * MS
    # a single tensor whole: one way is idle while it is pushed, the other while it is pulled
    alone = ps_graph([SIZE], SIZE, where, costs)
    assert makespan_ns(alone) == 20 * MS
    TensorPartition().apply(alone, uniform(alone, SIZE // 2))
    assert makespan_ns(alone) == 10 * MS


sizes = st.lists(st.integers(1, 6 * PAGE), min_size=1, max_size=4)
bounds = st.integers(1, 5).map(lambda n: n * PAGE)


Job = tuple[Graph, list[int], Callable[[int], Graph]]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job in whatever partitions, and how to make the same with another bound."""
    tensors = draw(sizes)
    where = layout(draw(st.integers(1, 3)), draw(st.integers(1, 2)), orderly=draw(st.booleans()),
                   credit=draw(st.integers(0, 1)))  # fmt: skip
    line = st.builds(SyncModel, st.floats(0, 5_000), st.floats(0, 3))
    lags = {key: draw(st.floats(0, 3_000)) for key in ("out", "push", "acknowledge", "ask", "pull", "in")}
    costs = model(where, draw(line), copy=draw(line), add=draw(line), lags=lags)
    more = {
        "fwd_ns": 1_000,
        "bwd_ns": draw(st.lists(st.integers(0, 9_000), min_size=len(tensors), max_size=len(tensors))),
        "skew_ns": draw(st.integers(0, 5_000)),
        "update_ns": 500,
    }

    def make(bound: int) -> Graph:
        return ps_graph(tensors, bound, where, costs, **more)

    return make(draw(bounds)), tensors, make


@settings(deadline=None, max_examples=60)
@given(jobs(), bounds, st.data())
def test_undo_is_exact_and_the_last_cut_counts(job: Job, bound: int, data: st.DataObject) -> None:
    graph, tensors, make = job
    edit, before, there = TensorPartition(), state(graph), makespan_ns(make(bound))
    assert replay(graph).makespan_ns == makespan_ns(graph)
    mark = edit.apply(graph, uniform(graph, bound))
    assert makespan_ns(graph) == replay(graph).makespan_ns == there
    graph.undo(mark)
    assert state(graph) == before
    # by way of others, a tensor at a time, in any order
    some = [data.draw(bounds) for _ in tensors]
    outer = edit.apply(graph, tuple(enumerate(some)))
    between = state(graph)
    for tensor in data.draw(st.permutations(range(len(tensors)))):
        edit.apply(graph, ((tensor, bound),))
    # ties on a resource go by op, and these ops came in another order: the parts are the same, the step nearly
    parts = [sorted(column(graph, "copy out", "nbytes", rank)) for rank in range(graph.ranks)]
    assert parts == [sorted(n for t in tensors for n in _cut(t, bound))] * graph.ranks
    graph.undo(outer)
    assert state(graph) == before
    edit.apply(graph, tuple(enumerate(some)))
    assert state(graph)["columns"] == between["columns"]


def _cut(nbytes: int, bound: int) -> list[int]:
    return [min(bound, nbytes - at) for at in range(0, nbytes, bound)]


def test_only_what_lies_between_out_and_in_is_touched() -> None:
    where = layout()
    graph = ps_graph([3 * PAGE, 5 * PAGE], 2 * PAGE, where, model(where, LINK))
    body = set(graph.buckets[0].ops)
    others = [e for e in graph.edges().tolist() if not body & set(e)]
    TensorPartition().apply(graph, ((0, PAGE),))
    fresh = set(graph.buckets[0].ops)
    assert [e for e in graph.edges().tolist() if not fresh & set(e)] == others
    inward = {a for a, b in graph.edges().tolist() if b in fresh and a not in fresh}
    outward = {b for a, b in graph.edges().tolist() if a in fresh and b not in fresh}
    assert inward == {graph.out_op[r, 0] for r in range(2)}
    assert outward == {graph.in_op[r, 0] for r in range(2)}
    assert graph.buckets[1].ops != graph.buckets[0].ops
    last = graph.buckets[0].ops[-1]
    assert graph.column("nbytes")[last] == 3 * PAGE


def test_legal() -> None:
    where = layout()
    graph = ps_graph([10 * PAGE, 8], 10 * PAGE, where, model(where, LINK))
    edit = TensorPartition()
    assert edit.legal(graph, ((0, PAGE), (1, PAGE)))
    assert edit.legal(graph, ((1, PAGE),))
    assert not edit.legal(graph, ((0, PAGE + 1),))  # no whole page
    assert not edit.legal(graph, ((0, 0),))
    assert not edit.legal(graph, ((0, PAGE), (0, PAGE)))  # one twice
    assert not edit.legal(graph, ((2, PAGE),))  # none
    huge = ps_graph([1], PAGE, where, model(where, LINK))
    huge.tensors[0].nbytes = PAGE * 65_537  # a key has 16 bits for the part
    assert not edit.legal(huge, ((0, PAGE),))
    assert edit.legal(huge, ((0, 2 * PAGE),))


@pytest.mark.parametrize("cuts", [((2, PAGE),), ((0, 0),)])
def test_refused_before_anything_changes(cuts: Cuts) -> None:
    where = layout()
    graph = ps_graph([PAGE, PAGE], PAGE, where, model(where, LINK))
    before = state(graph)
    with pytest.raises(ValueError):
        TensorPartition().apply(graph, cuts)
    assert state(graph) == before


def test_candidates_are_legal_and_distinct_and_cost_counts_the_busiest_link() -> None:
    where = layout()
    graph = ps_graph([20 << 20, 100], 4_096_000, where, model(where, LINK))
    edit = TensorPartition()
    found = list(edit.candidates(graph))
    assert all(edit.legal(graph, cuts) for cuts in found)
    assert len({tuple(column_of_parts(graph, cuts)) for cuts in found}) == len(found) == 7
    assert found[0] == (*captured(graph)[:1], (1, 4_096_000))
    # 6 messages of the one, 1 of the other, on every worker's link
    assert edit.cost(graph, found[0]) == 7 * MS + 10 * ((20 << 20) + 100)


def column_of_parts(graph: Graph, cuts: Cuts) -> Sequence[int]:
    return [n for tensor, bound in cuts for n in _cut(graph.tensors[tensor].nbytes, bound)]


def test_it_is_found_by_name() -> None:
    assert registry.find("tensor_partition").knobs >= {Knob.PARTITIONS, Knob.PARTITION_BOUND}


def test_a_gradient_that_nobody_waits_for() -> None:
    where = layout()
    graph = ps_graph([PAGE], PAGE, where, model(where, LINK))
    graph.in_op.clear()
    TensorPartition().apply(graph, ((0, PAGE // 2),))
    assert np.count_nonzero(graph.column("alive")) == len(graph)
    assert graph.info[INFO] and graph.info[MODEL]
