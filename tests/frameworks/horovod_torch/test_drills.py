"""Drills on real two-process Horovod jobs: the weights a job gets without dpro, no hang, one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.horovod_torch.conftest import HorovodRanks
from tests.frameworks.launch import Result

DRILLS = "tests.frameworks.horovod_torch.drills"
JOBS = "tests.frameworks.horovod_torch.jobs"


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
    assert found.values[0]["verdict"] == "KEPT", found.values[0]
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
    "arguments", [{"compression": "fp16"}, {"op": "Sum"}], ids=lambda arguments: next(iter(arguments))
)
def test_the_users_compression_and_op_survive(ranks: HorovodRanks, tmp_path: Path, arguments: dict[str, str]) -> None:
    kept(both(ranks, tmp_path, f"{JOBS}:plain", **arguments))


def test_groups_of_a_job_that_keeps_them_apart_are_one_collective_each(ranks: HorovodRanks, tmp_path: Path) -> None:
    """By Horovod's own timeline. As it comes, groups that are complete together go together."""
    env = {"HOROVOD_DISABLE_GROUP_FUSION": "1", "HOROVOD_TIMELINE": "DYNAMIC"}
    found = ranks.run(f"{DRILLS}:captured", tmp_path, env=env).ok()
    grouped, single = found.values[0]["together"]
    assert [len(group) for group in grouped] == [6, 3, 1]
    assert [group for group in grouped if len(group) == 1] == [["8.bias"]]
    assert len(single) == 10


# -- kinds of models and loops --------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [{"reorder": True}, {"missing": True}, {"half": True}, {"all_sum": True, "reorder": True, "missing": True}],
    ids=["other order per rank", "missing on one rank", "fp16 beside fp32", "all at once"],
)
def test_branches(ranks: HorovodRanks, tmp_path: Path, kind: dict[str, bool]) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:branches", **kind)
    kept(found)
    assert len(found.values[0]["totals"]) == 50 * kind.get("all_sum", False)
    halves = [["right.bias"], ["right.weight"]] if "half" in kind else []
    assert [group for group in found.values[0]["groups"] if group in halves] == sorted(halves)


@pytest.mark.parametrize("uneven", [False, True])
def test_backward_passes_with_a_remainder(ranks: HorovodRanks, tmp_path: Path, uneven: bool) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:remainder", uneven=uneven)
    kept(found)
    assert found.values[0]["steps"] <= 40  # optimizer steps, not micro-batches


def test_gradient_clipping_between_synchronize_and_step(ranks: HorovodRanks, tmp_path: Path) -> None:
    kept(both(ranks, tmp_path, f"{DRILLS}:clipped"))


def test_two_optimizers_one_of_them_tuned(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:gan")
    kept(found)
    assert found.values[0]["other_groups"] is None
    assert found.values[0]["other"] == found.values[1]["other"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"groups": 2}, "the job has groups of its own"),
        ({"gradient_predivide_factor": 2.0}, "Horovod's groups ignore gradient_predivide_factor"),
    ],
    ids=["own groups", "predivide"],
)
def test_what_a_job_has_set_itself_is_left_alone(
    ranks: HorovodRanks, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    one_line(both(ranks, tmp_path, f"{JOBS}:plain", **arguments), f"groups can't be changed here: {says}")


def test_sparse_gradients_are_left_alone(ranks: HorovodRanks, tmp_path: Path) -> None:
    one_line(both(ranks, tmp_path, f"{DRILLS}:sparse"), "there are sparse gradients, which can't be grouped")


# -- trouble ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5, 10])
def test_a_job_shorter_than_the_tuning(ranks: HorovodRanks, tmp_path: Path, steps: int) -> None:
    one_line(both(ranks, tmp_path, f"{JOBS}:plain", steps=steps), f"training ended after {steps} steps")


@pytest.mark.parametrize("tune", ["plan", "search"])
@pytest.mark.parametrize("at", [7, 10])
def test_horovod_started_anew_in_mid_tuning(ranks: HorovodRanks, tmp_path: Path, tune: str, at: int) -> None:
    """Step 7 is captured; at step 10 a plan is in force."""
    found = both(ranks, tmp_path, f"{DRILLS}:started_anew", tune, at=at)
    assert found.values[0]["verdict"] == "STEPPED_ASIDE"
    assert len(found.lines("stepped aside: Horovod was shut down or started anew")) >= 1
    assert found.values[0]["groups"] == found.values[1]["groups"]


def test_an_elastic_job_is_left_alone(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:elastic")
    assert found.values[0]["verdict"] == ""
    assert len(found.lines("stepped aside: the job is elastic")) == 2  # each rank sees it for itself


@pytest.mark.parametrize(
    ("method", "changed"), [("prepare", "nothing was changed"), ("apply", "your settings are back")]
)
def test_a_failure_on_one_rank(ranks: HorovodRanks, tmp_path: Path, method: str, changed: str) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:failing_apply", method=method)
    one_line(found, f"rank 1: OSError: no luck; {changed}")
    assert found.values[0]["groups"] is found.values[1]["groups"] is None


@pytest.mark.parametrize("off", [0, 1])
def test_dpro_switched_off_on_one_rank(ranks: HorovodRanks, tmp_path: Path, off: int) -> None:
    found = ranks.run(f"{DRILLS}:alone", tmp_path, tune="plan", off=off).ok()
    assert found.values[0]["weights"] == found.values[1]["weights"]
    # rank 0 speaks for all, also by its silence
    assert len(found.lines()) == off == len(found.lines(f"rank {off} left the tuning; nothing was changed"))
    assert found.values[0]["took_s"] < 15  # far from DPRO_TIMEOUT_S: nobody waited


@pytest.mark.parametrize(("state", "victim"), [("BASELINE", 1), ("APPLY", 1), ("VERIFY", 0)])
def test_a_killed_rank_hangs_nobody(ranks: HorovodRanks, tmp_path: Path, state: str, victim: int) -> None:
    env = {"DPRO_TIMEOUT_S": "2", "DPRO_SEARCH_S": "1"}
    found = ranks.run(
        f"{DRILLS}:kill", tmp_path, env=env, last=True, tune="plan", state=state, victim=victim,
        note=str(tmp_path / "died"),
    )  # fmt: skip
    assert (tmp_path / "died").exists(), found.logs
    assert not found.timed_out, found.logs
    assert found.exits[victim] == -9
    assert found.exits[1 - victim] != 0  # the error of its next all-reduce, as without dpro


@pytest.mark.parametrize("tune", ["plan", "search"])
def test_a_tensor_that_one_rank_lacks_for_a_while(ranks: HorovodRanks, tmp_path: Path, tune: str) -> None:
    """It waits while dpro captures, applies and measures; one that never comes hangs the job, dpro or not."""
    found = both(ranks, tmp_path, f"{DRILLS}:late", tune, at=4)
    kept(found)
    assert [value["sum"] for value in found.values] == [[3.0] * 3] * 2


@pytest.mark.parametrize("at", [3, 10])
def test_an_exception_of_the_users_ends_the_job_as_ever(ranks: HorovodRanks, tmp_path: Path, at: int) -> None:
    found = ranks.run(f"{DRILLS}:raising", tmp_path, last=True, tune="plan", at=at)
    assert not found.timed_out, found.logs
    assert found.exits == [1, 1]
    assert "ZeroDivisionError: the user's own" in found.logs[1]
    assert "HorovodInternalError" in found.logs[0]


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [([30, 26], "KEPT"), ([26, 30], "KEPT"), ([30, 10], "STEPPED_ASIDE"), ([10, 30], "STEPPED_ASIDE")],
    ids=str,
)
def test_a_rank_that_joins_early(ranks: HorovodRanks, tmp_path: Path, ended: list[int], verdict: str) -> None:
    """With a kept plan; and at step 10, where one is on trial: the rank leaves the tuning, nobody waits for it."""
    found = both(ranks, tmp_path, f"{DRILLS}:joined", ended=ended)
    for value in found.values:
        assert value["verdict"] == verdict, found.logs
        assert value["restored"]
        assert value["took_s"] < 15  # far from DPRO_TIMEOUT_S


# -- activation by environment --------------------------------------------------------------------------


@pytest.mark.parametrize("own_call", [False, True])
def test_activation_tunes_and_leaves_nothing_behind(ranks: HorovodRanks, tmp_path: Path, own_call: bool) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"}, own_call=own_call)
    assert len(found.lines("trying")) == 1
    assert len(found.lines("stepped aside")) == 0
    assert found.values[0]["groups"]
    assert found.values[0]["groups"] == found.values[1]["groups"]
    assert found.values[0]["restored"]
    assert found.values[0]["hooks"] == found.values[0]["gradient_hooks"] == 0


def test_activation_with_two_optimizers_steps_aside(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"}, optimizers=2)
    assert len(found.lines("stepped aside: the job has two Horovod optimizers")) == 1
    assert found.values[0]["restored"]
    assert found.values[0]["hooks"] == found.values[0]["gradient_hooks"] == 0
