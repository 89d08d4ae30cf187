"""The life cycle in a healthy job: each verdict, and what it leaves in force."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest

from dpro.errors import PlanError
from dpro.meeting import same_plan
from dpro.plan import Plan
from dpro.planning import Planned
from dpro.trace.model import RankTrace
from dpro.tuner import Arm, Outcome, State, Verdict
from dpro.verdict import Window
from tests.tuner.fakes import QUICK, Job, Rank, plan, planner

FAST, SLOW = plan(1.0, predicted_ms=8.0), plan(2.0, predicted_ms=7.0)


def by_plan(rank: int, step: int, in_force: Plan | None) -> float:
    """10 ms with the user's settings, 8 with FAST, 12 with SLOW; rank 1 is 0.5 ms quicker."""
    cost = {None: 10.0, FAST.sha256: 8.0, SLOW.sha256: 12.0}[in_force and in_force.sha256]
    return cost - 0.5 * rank


def settings(**given: object) -> object:
    return dataclasses.replace(QUICK, **given)  # type: ignore[arg-type]


def alike(ranks: list[Rank]) -> Outcome:
    """All ranks decided the same, nothing is left attached; the outcome of rank 0."""
    assert len({rank.decision for rank in ranks}) == 1
    for rank in ranks:
        assert rank.steps == 80
        assert not rank.adapter.capturing
        assert rank.adapter.calls[-1] == "close"
        assert rank.tuner.state is State.DONE
    return ranks[0].outcome


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_faster_plan_is_kept(world_size: int) -> None:
    ranks = Job(by_plan, plans=planner(FAST), world_size=world_size).run()
    outcome = alike(ranks)
    assert outcome.verdict is Verdict.KEPT
    assert (outcome.baseline_ms, outcome.measured_ms, outcome.predicted_ms) == (10.0, 8.0, 8.0)
    assert outcome.comparison is not None
    assert outcome.comparison.ratio == pytest.approx(0.8)
    assert [rank.adapter.in_force for rank in ranks] == [FAST] * world_size
    assert outcome.reason == "faster: 1.250x, noise 0.0 %"
    assert outcome.metrics() == {
        "dpro/baseline_ms": 10.0,
        "dpro/replayed_ms": 10.0,
        "dpro/predicted_ms": 8.0,
        "dpro/measured_ms": 8.0,
        "dpro/capture_overhead_pct": 3.0,
        "dpro/kept": 1.0,
    }


def test_the_phases_take_the_steps_they_are_given() -> None:
    ranks = Job(by_plan, plans=planner(FAST)).run()
    # 3 warm-up + 4 baseline + 2 capture, then windows of 2 + 4: plan, baseline, plan, baseline
    assert ranks[0].outcome.steps == 3 + 4 + 2 + 4 * 6
    in_force = [bool(sha) for sha in ranks[0].in_force]
    assert in_force == [False] * 9 + [True] * 6 + [False] * 6 + [True] * 6 + [False] * 6 + [True] * (80 - 33)
    assert [len(window.times_ms) for arm in ranks[0].outcome.arms for window in arm.windows] == [4] * 5


def test_the_best_of_several_is_measured_twice_and_kept() -> None:
    ranks = Job(by_plan, plans=planner(SLOW, FAST)).run()
    outcome = alike(ranks)
    assert outcome.verdict is Verdict.KEPT
    assert outcome.plan == FAST
    assert [(arm.name, len(arm.windows)) for arm in outcome.arms] == [
        ("your settings", 3),
        ("plan 0", 1),
        ("plan 1", 2),
    ]


def test_no_more_plans_are_tried_than_allowed() -> None:
    ranks = Job(by_plan, plans=planner(SLOW, FAST), settings=settings(trials=1)).run()  # type: ignore[arg-type]
    assert alike(ranks).verdict is Verdict.ROLLED_BACK
    assert len(ranks[0].outcome.arms) == 2


def test_a_slower_plan_is_rolled_back() -> None:
    ranks = Job(by_plan, plans=planner(SLOW)).run()
    assert alike(ranks).verdict is Verdict.ROLLED_BACK
    assert [rank.adapter.in_force for rank in ranks] == [None, None]
    assert ranks[0].adapter.calls.count("revert") == 2


def test_equal_times_are_rolled_back() -> None:
    assert alike(Job(plans=planner(FAST)).run()).verdict is Verdict.ROLLED_BACK


@pytest.mark.parametrize("slope", [-0.05, 0.05])
def test_a_drifting_machine_keeps_no_worthless_plan(slope: float) -> None:
    ranks = Job(lambda rank, step, in_force: 10 + slope * step, plans=planner(FAST)).run()
    assert alike(ranks).verdict is Verdict.ROLLED_BACK


def test_a_stalled_step_does_not_decide() -> None:
    stalls = {11, 18}  # in the plan's and in the baseline's window
    ranks = Job(
        lambda rank, step, p: by_plan(rank, step, p) + (500 if step in stalls else 0), plans=planner(FAST)
    ).run()
    assert alike(ranks).verdict is Verdict.KEPT


def test_no_plan_found() -> None:
    ranks = Job(plans=planner()).run()
    outcome = alike(ranks)
    assert outcome.verdict is Verdict.NO_BETTER_PLAN
    assert outcome.reason == "no plan is predicted to be faster than your settings"
    assert "apply" not in ranks[0].adapter.calls


def test_a_job_whose_settings_are_fixed_hears_why() -> None:
    outcome = alike(Job(plans=planner(), knobs=set()).run())
    assert (outcome.verdict, outcome.reason) == (Verdict.NO_BETTER_PLAN, "a communication hook is registered")


@pytest.mark.parametrize(("mode", "verdict"), [("observe", Verdict.OBSERVED), ("suggest", Verdict.SUGGESTED)])
def test_modes_that_change_nothing(mode: str, verdict: Verdict) -> None:
    ranks = Job(by_plan, plans=planner(FAST), settings=settings(mode=mode)).run()  # type: ignore[arg-type]
    outcome = alike(ranks)
    assert outcome.verdict is verdict
    assert outcome.baseline_ms == 10.0
    assert not {"prepare", "apply", "revert"} & set(ranks[0].adapter.calls)
    assert outcome.plan == (FAST if mode == "suggest" else None)


def test_a_given_plan_is_verified_without_profiling() -> None:
    ranks = Job(by_plan, given=lambda rank: FAST).run()
    outcome = alike(ranks)
    assert outcome.verdict is Verdict.KEPT
    assert "start_capture" not in ranks[0].adapter.calls
    assert outcome.steps == 3 + 4 + 4 * 6


def test_a_given_plan_for_another_job_is_refused() -> None:
    other = Plan(fingerprint={"model": "other"}, bucket_caps=[1.0])
    ranks = Job(by_plan, given=lambda rank: other).run()
    outcome = alike(ranks)
    assert outcome.verdict is Verdict.STEPPED_ASIDE
    assert outcome.reason == "rank 0: the plan is for another job; nothing was changed"


def test_given_plans_that_differ_are_refused() -> None:
    ranks = Job(by_plan, given=lambda rank: [FAST, SLOW][rank]).run()
    outcome = alike(ranks)
    assert outcome.reason == "rank 1 holds another plan than rank 0 (hashes differ); nothing was changed"
    assert ranks[0].voice.lines == [f"stepped aside: {outcome.reason}"]
    assert ranks[1].voice.lines == []


def test_skipped_steps_are_not_timed() -> None:
    """Validation after steps 4 and 12, of 1,000 ms, must not count as training."""

    def validate(rank: Rank) -> None:
        if rank.steps in (4, 12):
            rank.clock_ns += 1_000_000_000
            rank.tuner.skip()

    outcome = alike(Job(by_plan, plans=planner(FAST), after_step=validate).run())
    assert outcome.verdict is Verdict.KEPT
    assert max(ms for arm in outcome.arms for ms in arm.times_ms()) == 10.0
    assert [len(w.times_ms) for arm in outcome.arms for w in arm.windows] == [4, 4, 4, 3, 4]


def test_captured_steps_that_were_interrupted_are_left_out() -> None:
    """Steps 8 and 9 are captured; a validation runs within the second."""
    seen: list[RankTrace] = []

    def plans(blobs: list[bytes], *rest: object) -> Planned:
        seen.extend(RankTrace.load(io.BytesIO(blob)) for blob in blobs)
        return planner(FAST)(blobs, *rest)

    def validate(rank: Rank) -> None:
        if rank.steps == 8:
            rank.clock_ns += 1_000_000_000
            rank.tuner.skip()

    assert alike(Job(by_plan, plans=plans, after_step=validate).run()).verdict is Verdict.KEPT
    for rank, trace in enumerate(seen):
        assert trace.step_bounds.tolist() == [[0, 1_000_000]]
        assert trace.step.tolist() == [0, -1]
        assert trace.meta.extra["profiled_step_ns"] == [round((10 - 0.5 * rank) * 1e6)]


def test_a_capture_with_no_step_left_is_given_up() -> None:
    def validate(rank: Rank) -> None:
        if rank.steps in (7, 8):
            rank.tuner.skip()

    outcome = alike(Job(by_plan, plans=planner(FAST), after_step=validate).run())
    assert outcome.verdict is Verdict.STEPPED_ASIDE
    assert "every captured step was interrupted" in outcome.reason


def test_a_job_that_validates_after_every_step_keeps_nothing() -> None:
    outcome = alike(Job(by_plan, given=lambda rank: FAST, after_step=lambda rank: rank.tuner.skip()).run())
    assert outcome.verdict is Verdict.ROLLED_BACK


def test_on_done_is_told_once_and_may_not_break_the_job() -> None:
    seen: list[Outcome] = []

    def arrange(rank: Rank) -> None:
        def done(outcome: Outcome) -> None:
            seen.append(outcome)
            raise RuntimeError("the user's own mistake")

        rank.tuner._on_done = done

    assert alike(Job(by_plan, plans=planner(FAST), arrange=arrange).run()).verdict is Verdict.KEPT
    assert [outcome.verdict for outcome in seen] == [Verdict.KEPT] * 2


def test_closing_twice_and_stepping_on_after_the_end_is_harmless() -> None:
    ranks = Job(by_plan, plans=planner(FAST)).run()
    before = ranks[0].outcome
    ranks[0].tuner.close()
    ranks[0].tuner.step()
    ranks[0].tuner.skip()
    assert ranks[0].tuner.outcome is before


def test_same_plan_names_the_rank_and_compares_parameters() -> None:
    agree = b'{"sha": "a", "checksum": "x"}'
    assert same_plan([agree, agree]) == {"sound": True}
    assert same_plan([agree, b'{"sha": "a", "checksum": "y"}']) == {"sound": False}
    with pytest.raises(PlanError, match="rank 1 holds another plan"):
        same_plan([agree, b'{"sha": "b", "checksum": "x"}'])


def test_an_arm_pools_its_windows() -> None:
    assert Arm(None, "a", windows=[Window(0, [1.0]), Window(2, [2.0, 3.0])]).times_ms() == [1.0, 2.0, 3.0]


RECORD = plan(9.0)


def records_under(recording: Plan | None) -> Callable[[Rank], None]:
    """An arrangement in which a capture needs ``recording``."""

    def arrange(rank: Rank) -> None:
        def plan_to_record() -> Plan | None:
            rank.adapter.calls.append("plan_to_record")
            return recording

        rank.adapter.plan_to_record = plan_to_record  # type: ignore[attr-defined]

    return arrange


def test_a_job_that_is_recorded_under_a_plan_has_its_own_settings_back() -> None:
    ranks = Job(lambda *_: 10.0, plans=planner(), arrange=records_under(RECORD)).run()
    assert alike(ranks).verdict is Verdict.NO_BETTER_PLAN
    in_force = ranks[0].in_force
    # 3 warm-up + 4 baseline, then 2 to settle + 2 captured
    assert in_force == [""] * 7 + [RECORD.sha256] * 4 + [""] * (80 - 11)
    calls = [call for call in ranks[1].adapter.calls if call != "checksum"]
    captured = ["start_capture", "mark_step", "mark_step", "stop_capture"]
    assert calls == ["plan_to_record", "prepare", "apply", *captured, "revert", "close", "close"]


def test_a_job_that_can_be_recorded_as_it_is_stays_as_it_is() -> None:
    ranks = Job(by_plan, plans=planner(FAST), arrange=records_under(None)).run()
    assert alike(ranks).verdict is Verdict.KEPT
    assert "revert" in ranks[0].adapter.calls and RECORD.sha256 not in ranks[0].in_force


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_be_recorded_makes_all_step_aside_before_anything_is_changed(victim: int) -> None:
    def arrange(rank: Rank) -> None:
        def fail() -> Plan:
            raise RuntimeError("no record here")

        records_under(RECORD)(rank)
        if rank.number == victim:
            rank.adapter.plan_to_record = fail  # type: ignore[attr-defined]

    ranks = Job(by_plan, arrange=arrange).run()
    assert alike(ranks).reason == f"rank {victim}: RuntimeError: no record here; nothing was changed"
    assert not any(ranks[0].in_force)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rehearsal_goes_before_the_capture(fails: bool) -> None:
    """As many steps, nothing of which is kept; one that fails on a rank fails the tuning on all."""

    def arrange(rank: Rank) -> None:
        def start_rehearsal() -> None:
            rank.adapter.calls.append("start_rehearsal")
            if fails and rank.number == 1:
                raise RuntimeError("no room")

        rank.adapter.start_rehearsal = start_rehearsal  # type: ignore[attr-defined]

    ranks = Job(lambda *_: 10.0, plans=planner(), arrange=arrange).run()
    if fails:
        assert alike(ranks).reason == "rank 1: RuntimeError: no room; nothing was changed"
        return
    assert alike(ranks).verdict is Verdict.NO_BETTER_PLAN
    calls = [call for call in ranks[1].adapter.calls if call != "checksum"]
    marks = ["mark_step", "mark_step"]
    assert calls[:4] == ["start_rehearsal", *marks, "abort_capture"]
    assert calls[4:8] == ["start_capture", *marks, "stop_capture"]
