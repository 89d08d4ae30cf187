"""How much is on its way at once: pipelines worked out by hand, known limits, exact undo, what is legal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.adapter import Knob
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.passes import registry
from dpro.passes.in_flight import Flow, InFlight, pieces
from dpro.passes.tensor_partition import TensorPartition, uniform
from dpro.replay.engine import replay
from dpro.trace.byteps import PAGE_BYTES
from tests.graph.ps_jobs import layout, model, ps_graph
from tests.passes.test_tensor_partition import bounds, makespan_ns, sizes, state

PAGE = PAGE_BYTES
#: 1 ns for a byte.
LINK = SyncModel(0.0, 1.0)


def job(tensors: list[int], bound: int = 64 * PAGE, *, lag_ns: float = 0.0, bwd_ns: list[int] | None = None) -> Graph:
    where = layout()
    return ps_graph(tensors, bound, where, model(where, LINK, lags={"out": lag_ns}), bwd_ns=bwd_ns)


def under(graph: Graph, part: int, most: int) -> int:
    mark = InFlight().apply(graph, Flow(part, most))
    found = makespan_ns(graph)
    assert replay(graph).makespan_ns == found
    graph.undo(mark)
    return found


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_one_at_a_time_is_pushed_and_pulled_in_turn(parts: int) -> None:
    assert under(job([parts * PAGE]), PAGE, PAGE) == 2 * parts * PAGE


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_with_two_at_once_pushes_go_beside_pulls(parts: int) -> None:
    """T for a part. Pushes end at T and 2 T, where the first is asked for, behind the second; it is pulled until 3 T.

    The second's acknowledgement goes behind that answer, so that it is asked for at 3 T and pulled until 4 T, beside
    the push of the third, which had room from 3 T on. At 4 T the fourth has room, and all is as it was at T: every two
    parts take 3 T, and the last pull one more. With all of them at once they take 4 T.
    """
    found = under(job([parts * PAGE], lag_ns=2.0), PAGE, 2 * PAGE)
    assert found == pytest.approx((3 * parts // 2 + 1) * PAGE, abs=4 * parts)
    assert under(job([parts * PAGE]), PAGE, parts * PAGE) == 2 * parts * PAGE


def test_parts_go_in_the_order_in_which_gradients_are_ready() -> None:
    graph = job([2 * PAGE, PAGE + 8, 16])
    for tensor, ready in zip(graph.tensors, (2, 0, 1), strict=True):
        tensor.ready = ready
    assert pieces(graph, PAGE) == [(1, 0, PAGE), (1, 1, 8), (2, 0, 16), (0, 0, PAGE), (0, 1, PAGE)]


@settings(deadline=None, max_examples=40)
@given(sizes, bounds, bounds, st.integers(1, 12))
def test_undo_is_exact_and_without_a_limit_it_is_a_partition(
    tensors: list[int], before: int, part: int, n: int
) -> None:
    graph = job(tensors, before, bwd_ns=[3_000] * len(tensors))
    was, edit = state(graph), InFlight()
    mark = edit.apply(graph, Flow(part, n * part))
    limited = makespan_ns(graph)
    assert len(graph.buckets) == len(tensors)
    assert {bucket.tensors: bucket.nbytes for bucket in graph.buckets} == {(t,): n for t, n in enumerate(tensors)}
    graph.undo(mark)
    assert state(graph) == was
    unlimited = under(graph, part, sum(tensors) + part)
    mark = TensorPartition().apply(graph, uniform(graph, part))
    assert makespan_ns(graph) == unlimited
    graph.undo(mark)
    # each part there and back, one after the other
    assert limited <= 3_000 * len(tensors) + 2 * sum(tensors)


def test_legal() -> None:
    edit, graph = InFlight(), job([10 * PAGE, 8])
    assert edit.legal(graph, Flow(PAGE, PAGE))
    assert not edit.legal(graph, Flow(PAGE + 1, 4 * PAGE))  # no whole page
    assert not edit.legal(graph, Flow(2 * PAGE, PAGE))  # a part that may never go
    assert not edit.legal(graph, Flow(0, PAGE))
    graph.tensors[0].nbytes = 4_096 * PAGE
    assert not edit.legal(graph, Flow(PAGE, 4 * PAGE))  # more names than there are numbers
    assert all(edit.legal(graph, flow) for flow in edit.candidates(graph))
    graph.set_buckets([])
    assert not edit.legal(graph, Flow(PAGE, PAGE))


def test_cost_is_what_the_slowest_link_takes_for_what_may_be_under_way() -> None:
    assert InFlight().cost(job([10 * PAGE]), Flow(PAGE, 3 * PAGE)) == 3 * PAGE


def test_it_is_found_by_name() -> None:
    assert registry.find("in_flight").knobs == {Knob.IN_FLIGHT}
