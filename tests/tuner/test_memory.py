"""A job above its memory budget: what is kept, and what is undone, by the peak that was measured."""

from __future__ import annotations

import dataclasses

import pytest

from dpro.plan import Plan
from dpro.planning import Planned
from dpro.trace.memory import MEMORY, MemoryProfile, dump
from dpro.trace.model import RankTrace
from dpro.tuner import Outcome, Verdict
from tests.tuner.fakes import QUICK, FakeAdapter, Job, fake_trace

SMALL = Plan(fingerprint={"model": "m"}, recompute=["a", "b"], predicted_ms=14.0, predicted_bytes=60)
MIDDLE = Plan(fingerprint={"model": "m"}, recompute=["a"], predicted_ms=12.0, predicted_bytes=80)


def metered(monkeypatch: pytest.MonkeyPatch, peaks: dict[str, tuple[int, int]]) -> None:
    """Captures tell these peaks of ranks 0 and 1, by what is in force (its first blocks' names, "" none)."""

    def stop_capture(self: FakeAdapter) -> RankTrace:
        self._called("stop_capture")
        self.capturing = False
        trace = fake_trace(self.exchange.rank, steps=2)
        blocks = "".join((self.in_force and self.in_force.recompute) or [])
        trace.meta.extra[MEMORY] = dump(MemoryProfile(peaks[blocks][self.exchange.rank], (0,), (0,), (), ()))
        return trace

    monkeypatch.setattr(FakeAdapter, "meter_memory", lambda self: None, raising=False)
    monkeypatch.setattr(FakeAdapter, "stop_capture", stop_capture)


def tuned(budget: int, *plans: Plan) -> tuple[Outcome, list[Plan | None]]:
    """Of rank 0, and what is in force on both; recomputed blocks take 2 ms each."""

    def planner(*_: object) -> Planned:
        offers = [("fit", plan) for plan in plans]
        return Planned([10.0], 10.0, None, plans=offers, peak_bytes=100, must_fit=True)

    def cost(rank: int, step: int, in_force: Plan | None) -> float:
        return 10.0 + 2.0 * len((in_force and in_force.recompute) or [])

    ranks = Job(cost, plans=planner, settings=dataclasses.replace(QUICK, memory_bytes=budget)).run()
    assert len({rank.decision for rank in ranks}) == 1
    assert not any(rank.adapter.capturing for rank in ranks)
    return ranks[0].outcome, [rank.adapter.in_force for rank in ranks]


def test_slower_is_kept_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    metered(monkeypatch, {"": (100, 90), "a": (79, 78), "ab": (60, 60)})
    outcome, in_force = tuned(80, MIDDLE, SMALL)
    assert outcome.verdict is Verdict.KEPT and in_force == [MIDDLE, MIDDLE]
    assert (outcome.baseline_ms, outcome.measured_ms) == (10.0, 12.0)
    assert [arm.peak_bytes for arm in outcome.arms] == [None, 79, 60]


def test_the_largest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster plan does not fit on rank 1: the other one is kept."""
    metered(monkeypatch, {"": (100, 90), "a": (79, 81), "ab": (60, 60)})
    outcome, in_force = tuned(80, MIDDLE, SMALL)
    assert outcome.verdict is Verdict.KEPT and in_force == [SMALL, SMALL]


def test_what_was_not_measured_to_fit_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    metered(monkeypatch, {"": (100, 90), "a": (82, 81)})
    outcome, in_force = tuned(80, MIDDLE)
    assert outcome.verdict is Verdict.ROLLED_BACK and in_force == [None, None]
    assert "not measured to fit" in outcome.reason


def test_a_peak_that_a_rank_cannot_tell_is_not_below_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeAdapter, "meter_memory", lambda self: None, raising=False)
    outcome, in_force = tuned(80, MIDDLE)
    assert outcome.verdict is Verdict.ROLLED_BACK and in_force == [None, None]
