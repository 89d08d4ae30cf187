"""The search for regions, alone and together with groups, on steps worked out by hand."""

from __future__ import annotations

import pytest

from dpro.adapter import Knob
from dpro.search.critical_path import SearchResult, optimize
from tests.passes.regions import MS, keras_graph, region

KNOBS = {Knob.GROUPS, Knob.COMPILE_REGIONS}


def found(*args: object, knobs: set[Knob] = KNOBS) -> SearchResult:
    graph = keras_graph(*args)  # type: ignore[arg-type]
    durations = graph.column("duration").tolist()
    result = optimize(graph, knobs=knobs, fingerprint={"model": "m"})
    assert graph.column("duration").tolist() == durations
    return result


def test_kinds_that_pay_are_compiled_and_others_left_out() -> None:
    # compute 8 ms, then a's gradient, 1.01 ms: 9.01. Norms take half (3 ms less), the wide one twice its time
    regions = [region("n1", 0.5, 0.5, "norm"), region("n2", 0.5, 0.5, "norm"), region("wide", 2, 2)]
    layers = {"a": 0.5, "n1": 1, "wide": 0.5, "n2": 1}
    result = found(layers, {"a": 0.5, "n1": 2, "wide": 0.5, "n2": 2}, {"a": 1_000_000}, regions)
    assert result.baseline_ms == pytest.approx(9.01)
    best = result.candidates[0]
    assert best.plan.compile_regions == ["n1", "n2"]
    assert best.plan.tensor_groups is None
    assert best.plan.fingerprint == {"model": "m"}
    assert best.predicted_ms == best.plan.predicted_ms == pytest.approx(6.01)
    assert "2 layers compiled to 2 clusters" in best.name


@pytest.mark.parametrize("knobs", [{Knob.GROUPS}, set[Knob]()])
def test_nothing_is_compiled_where_it_cannot_be(knobs: set[Knob]) -> None:
    result = found({"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, [region("b", 0.1, 0.1)], knobs=knobs)
    assert all(c.plan.compile_regions is None for c in result.candidates)


def test_everything_in_one_cluster_is_not_chosen_where_nothing_would_overlap() -> None:
    # saves 0.8 ms of 8, but b's gradient (4.01 ms on the channel, hidden till then) is there only at the end
    whole = region("a,b", 0.9, 0.9, tensors="a/kernel,b/kernel")
    overlapped = found({"a": 1, "b": 1}, {"a": 4, "b": 2}, {"a": 1, "b": 4_000_000}, [whole])
    assert all(c.plan.compile_regions is None for c in overlapped.candidates)
    # with little to transfer it is
    silent = found({"a": 1, "b": 1}, {"a": 4, "b": 2}, {"a": 1, "b": 1}, [whole])
    assert silent.candidates[0].plan.compile_regions == ["a", "b"]


def test_regions_and_groups_go_together() -> None:
    # both gradients are there at the region's end: together they cost one latency less than apart
    pair = region("a,b", 0.5, 0.5, tensors="a/kernel,b/kernel")
    slow = keras_graph({"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, [pair])
    slow.info["sync"] = type(slow.info["sync"])(latency_ns=1.0 * MS, ns_per_byte=0.0)
    result = optimize(slow, knobs=KNOBS)
    best = result.candidates[0]
    # 2 ms compiled, and one synchronisation of 1 ms
    assert best.predicted_ms == pytest.approx(3)
    assert best.plan.compile_regions == ["a", "b"]
    assert best.plan.tensor_groups == [["b/kernel", "a/kernel"]]
    assert any(c.plan.tensor_groups is None and c.plan.compile_regions for c in result.candidates)


def test_a_job_that_synchronises_nothing_has_regions_to_choose() -> None:
    # 1 + 1 ms forward, 2 + 1 ms backward, one process; b compiled takes half of its 2 ms, a twice its 3
    graph = keras_graph({"a": 1, "b": 1}, {"a": 2, "b": 1}, {}, [region("a", 2, 2), region("b", 0.5, 0.5)], ranks=1)
    result = optimize(graph, knobs={Knob.COMPILE_REGIONS}, fingerprint={"model": "m"})
    assert result.baseline_ms == pytest.approx(5)
    (best,) = result.candidates
    assert best.plan.compile_regions == ["b"]
    assert best.predicted_ms == pytest.approx(4)
    assert best.plan.settings() == {"compile_regions": ["b"]}
    nothing = keras_graph({"a": 1}, {"a": 1}, {}, [], ranks=1)
    assert optimize(nothing, knobs={Knob.COMPILE_REGIONS}).stopped == "no layer was timed that XLA could compile"
