"""Drills on real two-process Gluon jobs: the weights a job gets without dpro, no hang, one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.horovod_torch.conftest import HorovodRanks
from tests.frameworks.launch import Result

DRILLS = "tests.frameworks.horovod_mxnet.drills"
JOBS = "tests.frameworks.horovod_mxnet.jobs"


def both(
    ranks: HorovodRanks,
    folder: Path,
    target: str,
    tune: str = "plan",
    env: dict[str, str] | None = None,
    **arguments: Any,
) -> Result:
    """Run a job with and without dpro; same weights on all ranks. Returns the run with dpro."""
    without = ranks.run(target, folder / "without", tune="", **arguments).ok()
    found = ranks.run(target, folder / "with", tune=tune, env=env, **arguments).ok()
    weights = [value["weights"] for value in without.values]
    assert [value["weights"] for value in found.values] == weights
    assert len(set(weights)) == 1
    assert [value.get("sums") for value in found.values] == [value.get("sums") for value in without.values]
    assert without.lines() == []
    assert len({value["verdict"] for value in found.values}) == 1
    return found


def one_line(found: Result, says: str) -> None:
    """dpro stepped aside, and said so once."""
    assert found.values[0]["verdict"] == "STEPPED_ASIDE", found.values[0]
    lines = found.lines("stepped aside")
    assert len(lines) == 1, lines
    assert says in lines[0]
    assert "Traceback" not in "".join(found.logs)


def kept(found: Result) -> None:
    """A plan is in force on all ranks alike."""
    assert found.values[0]["verdict"] == "KEPT", (found.values[0], found.logs)
    assert found.values[0]["groups"]
    assert found.values[0]["groups"] == found.values[1]["groups"]


# -- the ordinary job ---------------------------------------------------------------------------


@pytest.mark.parametrize("tune", ["plan", "search"])
def test_groups_kept_leave_weights_bit_equal(ranks: HorovodRanks, tmp_path: Path, tune: str) -> None:
    kept(both(ranks, tmp_path, f"{JOBS}:plain", tune))
    if tune == "search":
        files = {path.name for path in next((tmp_path / "with" / "runs").iterdir()).iterdir()}
        assert {"plan.json", "report.txt", "outcome.json", "meta.json"} <= files, files


def test_groups_rolled_back_leave_weights_bit_equal(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{JOBS}:plain", kept=False)
    assert found.values[0]["verdict"] == "ROLLED_BACK"
    assert found.values[0]["groups"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"compression": "fp16"},
        {"gradient_predivide_factor": 2.0},
        {"optimizer": "adam", "hybrid": False, "look": False},
        {"flags": {"static_alloc": True, "static_shape": True}, "prefix": "mine"},
    ],
    ids=["compression", "predivide", "imperative, never looks at a result", "static shapes"],
)
def test_what_the_user_chose_survives_a_search(ranks: HorovodRanks, tmp_path: Path, arguments: dict[str, Any]) -> None:
    kept(both(ranks, tmp_path, f"{JOBS}:plain", "search", **arguments))


# -- kinds of models and loops --------------------------------------------------------------------


@pytest.mark.parametrize("job", ["convolutions", "halves", "scaled"])
def test_kinds_of_models(ranks: HorovodRanks, tmp_path: Path, job: str) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:{job}", "search" if job == "convolutions" else "plan")
    kept(found)
    if job == "halves":  # nothing of one kind goes with the other
        groups = [group for group in found.values[0]["groups"] if len(group) > 1]
        assert sorted(map(len, groups)) == [4, 4]


@pytest.mark.parametrize("job", ["accumulated", "clipped"])
def test_kinds_of_loops(ranks: HorovodRanks, tmp_path: Path, job: str) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:{job}", "search")
    kept(found)
    assert 0 < found.values[0]["steps"] <= 50  # updates, not micro-batches


def test_an_estimator_with_validation(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:estimated", "search")
    kept(found)
    assert found.values[0]["clean"]


def test_a_resumed_job_verifies_its_plan_and_does_not_profile(ranks: HorovodRanks, tmp_path: Path) -> None:
    kept(ranks.run(f"{DRILLS}:resumed", tmp_path / "first", tune="search").ok())
    (plan,) = (tmp_path / "first" / "runs").glob("*/plan.json")
    found = both(ranks, tmp_path, f"{DRILLS}:resumed", plan=str(plan))
    kept(found)
    assert found.lines("profiling") == []


def test_two_trainers_one_of_them_tuned(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:two_trainers")
    kept(found)
    assert found.values[0]["other_groups"] is None
    assert found.values[0]["other"] == found.values[1]["other"]


@pytest.mark.parametrize(
    ("target", "arguments", "says"),
    [
        (f"{JOBS}:plain", {"num_groups": 2}, "the job has groups of its own"),
        (f"{DRILLS}:own_way", {}, "the job's trainer reduces gradients in a way of its own"),
    ],
    ids=["own groups", "own way"],
)
def test_what_a_job_has_set_itself_is_left_alone(
    ranks: HorovodRanks, tmp_path: Path, target: str, arguments: dict[str, Any], says: str
) -> None:
    one_line(both(ranks, tmp_path, target, **arguments), f"groups can't be changed here: {says}")


def test_trainers_that_are_left_alone(ranks: HorovodRanks, tmp_path: Path) -> None:
    for found in ranks.run(f"{DRILLS}:left_alone", tmp_path).ok().values:
        assert found["stock"] == ""
        assert found["process set"] == "the trainer spans only a process set"
        assert found["sparse"] == "there are sparse gradients, which can't be grouped"
        assert found["autotune"] == "HOROVOD_AUTOTUNE changes settings meanwhile"


# -- trouble ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7])
def test_a_job_shorter_than_the_tuning(ranks: HorovodRanks, tmp_path: Path, steps: int) -> None:
    one_line(both(ranks, tmp_path, f"{JOBS}:plain", "search", steps=steps), f"training ended after {steps} steps")


@pytest.mark.parametrize("ended", [[30, 10], [10, 30]], ids=str)
def test_uneven_data_end_the_job_as_ever(ranks: HorovodRanks, tmp_path: Path, ended: list[int]) -> None:
    """At step 10 a plan is on trial; the other rank is told by its next all-reduce, as without dpro."""
    without = ranks.run(f"{DRILLS}:uneven", tmp_path / "without", tune="", ended=ended).ok()
    found = ranks.run(f"{DRILLS}:uneven", tmp_path / "with", tune="plan", ended=ended).ok()
    told = [value["told"] for value in found.values]
    assert told == [value["told"] for value in without.values] == [ended[rank] == 30 for rank in range(2)]
    assert [value["verdict"] for value in found.values] == ["STEPPED_ASIDE"] * 2


@pytest.mark.parametrize("at", [7, 10])
def test_parameters_frozen_in_mid_tuning(ranks: HorovodRanks, tmp_path: Path, at: int) -> None:
    """Step 7 is captured; at step 10 a plan is in force, and stays so for what is still trained."""
    found = both(ranks, tmp_path, f"{DRILLS}:frozen", "search", at=at)
    assert found.values[0]["verdict"] == "STEPPED_ASIDE"
    assert found.lines("the job changed which parameters it trains")
    assert found.values[0]["groups"] == found.values[1]["groups"]


def test_horovod_started_anew_in_mid_tuning(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:started_anew", at=10)
    assert found.values[0]["verdict"] == "STEPPED_ASIDE"
    assert found.values[0]["restored"]
    assert found.values[0]["groups"] == found.values[1]["groups"]


@pytest.mark.parametrize(
    ("method", "changed"), [("prepare", "nothing was changed"), ("apply", "your settings are back")]
)
def test_a_failure_on_one_rank(ranks: HorovodRanks, tmp_path: Path, method: str, changed: str) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:failing_apply", method=method)
    one_line(found, f"rank 1: OSError: no luck; {changed}")
    assert found.values[0]["groups"] is found.values[1]["groups"] is None


def test_dpro_switched_off_on_one_rank(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = ranks.run(f"{DRILLS}:alone", tmp_path, tune="plan", off=1).ok()
    assert found.values[0]["weights"] == found.values[1]["weights"]
    assert len(found.lines()) == 1 == len(found.lines("rank 1 left the tuning; nothing was changed"))
    assert found.values[0]["took_s"] < 15  # far from DPRO_TIMEOUT_S: nobody waited


@pytest.mark.parametrize(("state", "victim"), [("CAPTURE", 1), ("APPLY", 1), ("VERIFY", 0)])
def test_a_killed_rank_hangs_nobody(ranks: HorovodRanks, tmp_path: Path, state: str, victim: int) -> None:
    env = {"DPRO_TIMEOUT_S": "2", "DPRO_SEARCH_S": "1"}
    tune = "search" if state == "CAPTURE" else "plan"
    found = ranks.run(
        f"{DRILLS}:kill", tmp_path, env=env, last=True, tune=tune, state=state, victim=victim,
        note=str(tmp_path / "died"),
    )  # fmt: skip
    assert (tmp_path / "died").exists(), found.logs
    assert not found.timed_out, found.logs
    assert found.exits[victim] == -9
    assert found.exits[1 - victim] != 0  # the error of its next all-reduce, as without dpro


def test_an_exception_of_the_users_ends_the_job_as_ever(ranks: HorovodRanks, tmp_path: Path) -> None:
    """Where a plan is on trial."""
    found = ranks.run(f"{DRILLS}:raising", tmp_path, last=True, tune="plan", at=10)
    assert not found.timed_out, found.logs
    assert found.exits[1] == 1
    assert "ZeroDivisionError: the user's own" in found.logs[1]


@pytest.mark.parametrize("at", [2, 6])
def test_an_operation_that_fails_in_the_engine_is_told_to_the_job(ranks: HorovodRanks, tmp_path: Path, at: int) -> None:
    """Not swallowed by whoever of dpro's waits: when it paces Python, and when it captures (step 6)."""
    found = ranks.run(f"{DRILLS}:failing_op", tmp_path, tune="search", at=at).ok()
    assert [value["told"] for value in found.values] == [["MXNetError"]] * 2


@pytest.mark.parametrize(("when", "says"), [("before", "is running"), ("7", "took over")])
def test_the_jobs_own_profiler_has_the_right_of_way(ranks: HorovodRanks, tmp_path: Path, when: str, says: str) -> None:
    """It had begun before the tuning, or begins between two steps that are captured."""
    found = own_profiler(ranks, tmp_path, when)
    one_line(found, f"the job's own profiler {says}")


def test_a_profile_after_a_capture_is_whole(fresh_ranks: HorovodRanks, tmp_path: Path) -> None:
    """MXNet itself writes the head of its file only once in each process."""
    found = own_profiler(fresh_ranks, tmp_path, "after")
    kept(found)
    assert [value["whole"] and value["clean"] for value in found.values] == [True, True]


def own_profiler(ranks: HorovodRanks, folder: Path, when: str) -> Result:
    env = {"DPRO_CAPTURE_STEPS": "2"}
    found = ranks.run(f"{DRILLS}:profiled", folder, env=env, tune="search", when=when, into=str(folder)).ok()
    assert found.values[0]["weights"] == found.values[1]["weights"]
    assert min(value["updates"] for value in found.values) > 0
    return found


# -- activation by environment --------------------------------------------------------------------------


@pytest.mark.parametrize("own_call", [False, True])
def test_activation_tunes_and_leaves_nothing_behind(ranks: HorovodRanks, tmp_path: Path, own_call: bool) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"}, own_call=own_call)
    assert len(found.lines("trying")) == 1
    assert len(found.lines("stepped aside")) == 0
    assert found.values[0]["groups"]
    assert found.values[0]["groups"] == found.values[1]["groups"]
    assert found.values[0]["restored"]
    assert found.values[0]["on_trainer"] == ["_allreduce_grads"]


def test_activation_with_two_trainers_steps_aside(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"}, trainers=2)
    assert len(found.lines("stepped aside: the job has two Horovod trainers")) == 1
    assert found.values[0]["restored"]
    assert found.values[0]["on_trainer"] == []
