"""The search for what fits, held against every choice there is."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from dpro.adapter import Knob
from dpro.passes.accumulate import Accumulate
from dpro.passes.recompute import Recompute, families
from dpro.replay.engine import replay
from dpro.replay.memory import peak_bytes
from dpro.search.memory import MemorySearch
from tests.passes.memory_graphs import BASE, chain_graph, chain_profile

BOTH = {Knob.RECOMPUTE, Knob.ACCUMULATE}
PROFILE = chain_profile([400, 300, 700, 100], [10, 20, 30, 10])


def search(knobs: set[Knob], micro: dict[int, int] | None = None) -> MemorySearch:
    return MemorySearch(chain_graph(PROFILE, [4, 1, 9, 2], [8, 2, 18, 4], 2, micro), knobs, time_budget_s=60)


@pytest.mark.parametrize("budget", [1560, 1400, 1200, 1000, 900, 800, 780])
def test_as_fast_as_can_be(budget: int) -> None:
    """Of all subsets of all ways to cut the model, replayed in full."""
    graph = chain_graph(PROFILE, [4, 1, 9, 2], [8, 2, 18, 4], 2)
    edit = Recompute()
    best_ns = 1 << 60
    for names in families(PROFILE):
        for chosen in chain.from_iterable(combinations(names, k) for k in range(len(names) + 1)):
            mark = edit.apply(graph, chosen)
            played = replay(graph)
            if max(peak_bytes(graph, played).values()) <= BASE + budget:
                best_ns = min(best_ns, played.makespan_ns)
            graph.undo(mark)
    found = search({Knob.RECOMPUTE}).fitting(BASE + budget)
    assert (found[0].step_ns if found else 1 << 60) <= 1.1 * best_ns
    assert bool(found) == (best_ns < 1 << 60)
    assert all(fit.peak <= BASE + budget for fit in found)


def test_fits_already() -> None:
    here = search(BOTH, {1: 10, 2: 6})
    assert here.plain.peak == BASE + 1571
    assert here.fitting(BASE + 1571)[0] == here.plain


def test_micro_batches_where_they_are_faster() -> None:
    """Half a batch in half the time, against a forward pass once more: both fit, the former is faster."""
    first, *others = search(BOTH, {1: 100, 2: 50, 4: 26}).fitting(BASE + 1000)
    assert (first.micro_batches, first.blocks) == (2, ())
    assert {fit.micro_batches for fit in others} == {1, 4}
    # where halves take nearly as long as the whole, it is the other way round
    first, *_ = search(BOTH, {1: 100, 2: 90}).fitting(BASE + 1000)
    assert first.micro_batches == 1 and first.blocks


def test_both_where_one_alone_does_not_do() -> None:
    alone = search({Knob.RECOMPUTE})
    assert not alone.fitting(BASE + 500) and alone.smallest().peak > BASE + 500
    [both] = search(BOTH, {1: 100, 2: 60}).fitting(BASE + 500)
    assert both.micro_batches == 2 and both.blocks
    graph = chain_graph(PROFILE, [4, 1, 9, 2], [8, 2, 18, 4], 2, {1: 100, 2: 60})
    Accumulate().apply(graph, 2)
    Recompute().apply(graph, both.blocks)
    played = replay(graph)
    assert played.makespan_ns == both.step_ns and max(peak_bytes(graph, played).values()) == both.peak


def test_a_plan_says_what_it_takes() -> None:
    here = search({Knob.RECOMPUTE})
    fit = here.fitting(BASE + 1200)[0]
    plan = fit.plan({"model": "m"}, scale=1e-6, baseline_ms=49.0)
    assert plan.recompute == list(fit.blocks) and plan.accumulate is None
    assert plan.predicted_bytes == fit.peak and plan.predicted_ms == pytest.approx(fit.step_ns / 1e6)
    assert plan.settings() == {"recompute": list(fit.blocks)}
