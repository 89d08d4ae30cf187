"""Whatever fails, on whatever rank: all ranks decide alike, and training goes on to its last step."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.plan import Plan
from dpro.planning import Planned
from dpro.trace.model import RankTrace
from dpro.trace.regions import REGIONS, Region, RegionTime, load
from dpro.tuner import State, Verdict
from tests.tuner.fakes import QUICK, Job, Killed, Rank, plan, planner

FAST = plan(1.0)
PLACES = ["start_capture", "mark_step", "stop_capture", "prepare", "apply", "revert", "checksum"]
UNTIL_APPLY = {"start_capture", "mark_step", "stop_capture", "prepare"}


def gain(rank: int, step: int, in_force: Plan | None) -> float:
    return 8.0 if in_force else 10.0


def failing(place: str, victim: int, call: int = 1) -> Job:
    """A job in which the ``call``-th call of one method fails on one rank."""

    def arrange(rank: Rank) -> None:
        if rank.number == victim:
            rank.adapter.before = raise_at(place, call)

    return Job(gain, plans=planner(FAST), world_size=3, arrange=arrange)


def raise_at(place: str, call: int, error: type[BaseException] = RuntimeError):  # type: ignore[no-untyped-def]
    count = 0

    def before(name: str) -> None:
        nonlocal count
        count += name == place
        if name == place and count == call:
            raise error("boom")

    return before


def lines(ranks: list[Rank]) -> list[str]:
    return [line for rank in ranks for line in rank.voice.lines if line.startswith("stepped aside")]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_on_one_rank_makes_all_step_aside(place: str, victim: int) -> None:
    ranks = failing(place, victim).run()
    assert len({rank.decision for rank in ranks}) == 1
    changed = "nothing was changed" if place in UNTIL_APPLY | {"checksum"} else "your settings are back"
    assert ranks[0].outcome.verdict is Verdict.STEPPED_ASIDE
    assert ranks[0].outcome.reason == f"rank {victim}: RuntimeError: boom; {changed}"
    assert lines(ranks) == [f"stepped aside: {ranks[0].outcome.reason}"]
    for rank in ranks:
        assert rank.steps == 80
        assert rank.adapter.in_force is None
        assert not rank.adapter.capturing


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PLACES), st.integers(0, 2), st.integers(1, 4))
def test_decisions_are_equal_wherever_it_fails(place: str, victim: int, call: int) -> None:
    ranks = failing(place, victim, call).run()
    assert len({rank.decision for rank in ranks}) == 1
    assert all(rank.steps == 80 and not rank.adapter.capturing for rank in ranks)
    assert len(lines(ranks)) == (ranks[0].outcome.verdict is Verdict.STEPPED_ASIDE)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_failure_reported_from_outside_makes_all_step_aside(victim: int) -> None:
    def report(rank: Rank) -> None:
        if rank.number == victim and rank.steps == 5:
            rank.tuner.fail("the job has two models")
            rank.tuner.fail("a later one does not hide it")

    ranks = Job(gain, plans=planner(FAST), after_step=report).run()
    assert len({rank.decision for rank in ranks}) == 1
    assert ranks[0].outcome.reason == f"rank {victim}: the job has two models; nothing was changed"


def test_an_exception_in_the_planner() -> None:
    def broken(*_: object) -> Planned:
        raise ZeroDivisionError("in the search")

    ranks = Job(gain, plans=broken).run()
    assert len({rank.decision for rank in ranks}) == 1
    assert ranks[1].outcome.reason == "ZeroDivisionError: in the search; nothing was changed"
    assert len(lines(ranks)) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_regions_are_timed_on_rank_0_and_a_failure_costs_no_more_than_them(fails: bool) -> None:
    half = Region(("norm",), (), "kind", RegionTime(2, 2, 1, 1))
    asked, seen = [], []

    def arrange(rank: Rank) -> None:
        def time_regions(trace: RankTrace, budget_s: float) -> list[Region]:
            asked.append((rank.number, trace.meta.rank, budget_s))
            if fails:
                raise RuntimeError("no compiler")
            return [half]

        rank.adapter.time_regions = time_regions  # type: ignore[attr-defined]

    def plans(blobs: list[bytes], *rest: object) -> Planned:
        seen.extend(load(RankTrace.load(io.BytesIO(blob)).meta.extra.get(REGIONS)) for blob in blobs)
        return planner(FAST)(blobs, *rest)

    ranks = Job(gain, replace(QUICK, regions_s=7.0), plans=plans, arrange=arrange).run()
    assert all(rank.outcome.verdict is Verdict.KEPT for rank in ranks)
    assert asked == [(0, 0, 7.0)]
    assert seen == ([[], []] if fails else [[half], []])
    said = [line for line in ranks[0].voice.lines if "no compiler" in line]
    assert said == ["layers that could be compiled not timed: RuntimeError: no compiler"] * fails


def test_a_hash_that_differs_on_one_rank_changes_nothing() -> None:
    def arrange(rank: Rank) -> None:
        if rank.number == 1:
            rank.tuner._hash = lambda plan: "another"  # type: ignore[method-assign]

    ranks = Job(gain, plans=planner(FAST), arrange=arrange).run()
    assert len({rank.decision for rank in ranks}) == 1
    assert ranks[0].outcome.reason == "rank 1 holds another plan than rank 0 (hashes differ); nothing was changed"
    assert not any("apply" in rank.adapter.calls for rank in ranks)


def test_parameters_that_part_after_the_change_undo_it() -> None:
    def arrange(rank: Rank) -> None:
        def apply(name: str) -> None:
            if name == "apply" and rank.number == 1:
                rank.adapter.weights = "other"

        rank.adapter.before = apply

    ranks = Job(gain, plans=planner(FAST), arrange=arrange).run()
    assert len({rank.decision for rank in ranks}) == 1
    assert ranks[0].outcome.reason == "parameters differ between ranks after the change; your settings are back"
    assert all(rank.adapter.in_force is None for rank in ranks)


def test_parameters_that_differed_before_are_not_blamed_on_the_plan() -> None:
    ranks = Job(
        gain, plans=planner(FAST), arrange=lambda rank: setattr(rank.adapter, "weights", str(rank.number))
    ).run()
    assert ranks[0].outcome.verdict is Verdict.KEPT


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_killed_inside_a_step_leaves_the_others_to_end(place: str, victim: int) -> None:
    def arrange(rank: Rank) -> None:
        if rank.number == victim:
            rank.adapter.before = raise_at(place, 1, Killed)

    ranks = Job(gain, plans=planner(FAST), world_size=3, arrange=arrange).run()
    alive = [rank for rank in ranks if rank.number != victim]
    assert len({rank.decision for rank in alive}) == 1
    assert alive[0].outcome.verdict is Verdict.STEPPED_ASIDE
    reason = alive[0].outcome.reason
    if place in ("start_capture", "mark_step"):  # no meeting before the next all-reduce, which breaks
        assert reason.startswith("training ended after")
    else:
        assert reason.startswith(f"rank {victim} did not answer")
    # what is in force stays: undoing it on some ranks only would hang a job whose rank is merely late
    assert reason.endswith(
        {"apply": "the plan under trial stays in force", "revert": "your settings are back"}.get(
            place, "nothing was changed"
        )
    )


@pytest.mark.parametrize("place", ["mark_step", "stop_capture", "prepare", "checksum"])
def test_an_interrupt_in_the_midst_of_our_work_reaches_the_job_and_ends_the_tuning(place: str) -> None:
    def arrange(rank: Rank) -> None:
        if rank.number == 1:
            rank.adapter.before = raise_at(place, 1, KeyboardInterrupt)
            step = rank.tuner.step

            def caught() -> None:
                try:
                    step()
                except KeyboardInterrupt:
                    interrupted.append(rank.steps)

            rank.tuner.step = caught  # type: ignore[method-assign]

    interrupted: list[int] = []
    ranks = Job(gain, plans=planner(FAST), arrange=arrange).run()
    assert len(interrupted) == 1
    assert all(rank.steps == 80 and not rank.adapter.capturing for rank in ranks)
    assert ranks[0].outcome.reason == "rank 1 left the tuning; nothing was changed"
    assert ranks[1].outcome.reason.startswith("training ended after")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2))
def test_a_rank_killed_after_any_step(step: int, victim: int) -> None:
    def kill(rank: Rank) -> None:
        if rank.number == victim and rank.steps == step:
            raise Killed

    ranks = Job(gain, plans=planner(FAST), world_size=3, after_step=kill).run()
    alive = [rank for rank in ranks if rank.number != victim]
    assert len({rank.decision for rank in alive}) == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2))
def test_a_rank_that_leaves_the_tuning_after_any_step(step: int, quitter: int) -> None:
    """It goes on training; the plan in force must stay the same on all ranks (Job checks)."""

    def leave(rank: Rank) -> None:
        if rank.number == quitter and rank.steps == step:
            rank.tuner.close()

    ranks = Job(gain, plans=planner(FAST), world_size=3, after_step=leave).run()
    others = [rank for rank in ranks if rank.number != quitter]
    assert all(rank.steps == 80 for rank in ranks)
    assert len({rank.decision for rank in others}) == 1
    if step < 3 + 4 + 2 + 4 * 6:
        assert others[0].outcome.reason.startswith(f"rank {quitter} left the tuning")
    else:
        assert others[0].outcome.verdict is Verdict.KEPT


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (1, "training ended after 1 steps, in the warm-up phase; nothing was changed"),
        (5, "training ended after 5 steps, in the baseline phase; nothing was changed"),
        (8, "training ended after 8 steps, in the capture phase; nothing was changed"),
        (10, "training ended after 10 steps, in the apply phase; the plan under trial stays in force"),
        (13, "training ended after 13 steps, in the verify phase; the plan under trial stays in force"),
    ],
)
def test_a_job_that_ends_early_says_so_in_one_line(step: int, says: str) -> None:
    ranks = Job(gain, plans=planner(FAST), steps=step).run()
    assert len({rank.decision for rank in ranks}) == 1
    assert ranks[0].voice.lines[-1] == f"stepped aside: {says}"
    assert ranks[1].voice.lines == []
    for rank in ranks:
        assert not rank.adapter.capturing
        assert rank.tuner.state is State.DONE
        assert rank.adapter.calls[-1] == "close"


def test_an_obstacle_ends_the_tuning_at_once_without_a_meeting() -> None:
    def arrange(rank: Rank) -> None:
        rank.adapter.obstacle = lambda: "uneven inputs" if rank.steps >= 2 else ""  # type: ignore[method-assign]

    ranks = Job(gain, plans=planner(FAST), arrange=arrange).run()
    assert len({rank.decision for rank in ranks}) == 1
    assert ranks[0].outcome.reason == "uneven inputs; nothing was changed"
    assert ranks[0].outcome.steps == 2
    assert ranks[0].adapter.exchange._board.posts == {}


def test_an_obstacle_on_one_rank_stops_the_others_at_the_next_meeting() -> None:
    def arrange(rank: Rank) -> None:
        if rank.number == 1:
            rank.adapter.obstacle = lambda: "uneven inputs" if rank.steps >= 12 else ""  # type: ignore[method-assign]

    ranks = Job(gain, plans=planner(FAST), arrange=arrange).run()
    assert ranks[0].outcome.reason == "rank 1 left the tuning; the plan under trial stays in force"
    assert ranks[1].outcome.reason == "uneven inputs; the plan under trial stays in force"
    assert all(rank.adapter.in_force == FAST for rank in ranks)


def test_an_exchange_that_breaks_ends_the_tuning_not_the_training() -> None:
    def arrange(rank: Rank) -> None:
        def broken(key: str, blob: bytes) -> None:
            raise ConnectionError("the store is gone")

        rank.adapter.exchange.post = broken  # type: ignore[method-assign]

    ranks = Job(gain, plans=planner(FAST), arrange=arrange).run()
    for rank in ranks:
        assert rank.steps == 80
        assert rank.outcome.reason == "ConnectionError: the store is gone; training goes on"
        assert rank.voice.lines[-1] == f"stepped aside: {rank.outcome.reason}"
