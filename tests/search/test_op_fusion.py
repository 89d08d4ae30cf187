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


def test_regions_that_pay_only_with_their_gradients_as_one() -> None:
    """Theorem 3 one way. Layers b, a of 4 and 4 ms backward, gradients of 1 ms each on the channel, 3 ms of latency.

    Apart and uncompiled: a is ready at 10 (2 ms forward), and b's, ready at 6, is done by 10: 14 in all. Compiled
    (0.8 of it) both are ready at 8: one after the other that is 16; as one 8 + 3 + 2 = 13. As one uncompiled: 15.
    """
    pair = region("a,b", 0.8, 0.8, tensors="a/kernel,b/kernel")
    graph = keras_graph({"a": 1, "b": 1}, {"a": 4, "b": 4}, {"a": MS, "b": MS}, [pair])
    graph.info["sync"] = type(graph.info["sync"])(latency_ns=3.0 * MS, ns_per_byte=1.0)
    result = optimize(graph, knobs=KNOBS)
    assert result.baseline_ms == pytest.approx(14)
    best = result.candidates[0]
    assert best.predicted_ms == pytest.approx(13)
    assert best.plan.compile_regions == ["a", "b"]
    assert best.plan.tensor_groups == [["b/kernel", "a/kernel"]]


def test_regions_that_pay_only_with_the_best_buckets() -> None:
    """Of three layers of 1 ms each way, the last one's gradient takes 10 ms, c's and b's nothing but the latency of 6.

    Each by itself they are through at 3 + 1 + 3 · 6 + 10 = 32, whatever a, which is ready last, is compiled to; in
    one at 6 + 6 + 10 = 22, and with a compiled to half (1 ms less) at 21.
    """
    half = region("a", 0.5, 0.5)
    layers = {"a": 1, "b": 1, "c": 1}
    graph = keras_graph(layers, layers, {"a": 10 * MS, "b": 1, "c": 1}, [half])
    graph.info["sync"] = type(graph.info["sync"])(latency_ns=6.0 * MS, ns_per_byte=1.0)
    result = optimize(graph, knobs=KNOBS)
    assert result.baseline_ms == pytest.approx(32, abs=0.6)
    best = result.candidates[0]
    assert best.predicted_ms == pytest.approx(21)
    assert best.plan.compile_regions == ["a"]
    assert best.plan.tensor_groups == [["c/kernel", "b/kernel", "a/kernel"]]


def test_a_run_is_replaced_by_what_shares_layers_with_it() -> None:
    """All in one cluster saves most work and is taken first: both gradients are ready at 3.6 ms, done at 9.62.

    Uncompiled it is 4 and 10.02. But with a alone compiled to half b's, which takes 6.01, is ready at 3.5, a's beside
    it: 9.52.
    """
    whole, alone = region("a,b", 0.6, 0.6), region("a", 0.5, 0.5)
    graph = keras_graph({"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 6 * MS}, [whole, alone])
    best = optimize(graph, knobs=KNOBS).candidates[0]
    assert best.plan.compile_regions == ["a"]
