"""Drills on real two-process jobs: the weights a job gets without dpro, no hang, one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.launch import Ranks, Result

DRILLS = "tests.frameworks.torch_ddp.drills"
JOBS = "tests.frameworks.torch_ddp.jobs"


def both(
    ranks: Ranks, folder: Path, target: str, tune: str = "search", env: dict[str, str] | None = None, **arguments: Any
) -> Result:
    """Run a job with and without dpro; same weights on all ranks. Returns the run with dpro."""
    without = ranks.run(target, folder / "without", tune="", **arguments).ok()
    found = ranks.run(target, folder / "with", tune=tune, env=env, **arguments).ok()
    weights = [value["weights"] for value in without.values]
    assert [value["weights"] for value in found.values] == weights
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


# -- the ordinary job ---------------------------------------------------------------------------


@pytest.mark.parametrize("tune", ["plan", "search"])
@pytest.mark.parametrize(("kept", "verdict"), [(True, "KEPT"), (False, "ROLLED_BACK")])
def test_weights_are_bit_equal_after_50_steps(
    ranks: Ranks, tmp_path: Path, tune: str, kept: bool, verdict: str
) -> None:
    found = both(ranks, tmp_path, f"{JOBS}:plain", tune, kept=kept)
    assert found.values[0]["verdict"] == verdict
    assert len(found.values[0]["buckets"]) == (3 if kept else 1) or tune == "search"
    assert found.values[0]["buckets"] == found.values[1]["buckets"]


def test_a_job_that_really_decides(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing is forced here but time: whatever the verdict, the weights are the same."""
    found = both(ranks, tmp_path, f"{JOBS}:plain", "search", steps=80, kept=None)
    assert found.values[0]["verdict"] in ("KEPT", "ROLLED_BACK", "NO_BETTER_PLAN")
    assert (tmp_path / "with" / "runs").is_dir()


# -- kinds of models and loops --------------------------------------------------------------------


@pytest.mark.parametrize("no_sync", [False, True])
def test_accumulation_counts_updates_not_micro_batches(ranks: Ranks, tmp_path: Path, no_sync: bool) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:accumulate", no_sync=no_sync)
    assert found.values[0]["verdict"] == "KEPT"
    assert found.values[0]["steps"] <= 41


def test_frozen_and_tied_parameters(ranks: Ranks, tmp_path: Path) -> None:
    assert both(ranks, tmp_path, f"{DRILLS}:odd").values[0]["verdict"] == "KEPT"


def test_mixed_dtypes(ranks: Ranks, tmp_path: Path) -> None:
    assert both(ranks, tmp_path, f"{DRILLS}:odd", halves=True).values[0]["verdict"] == "KEPT"


def test_unused_parameters_leave_the_buckets_alone(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:odd", unused=True, find_unused_parameters=True)
    assert found.values[0]["verdict"] == "NO_BETTER_PLAN"
    assert "find_unused_parameters=True" in found.values[0]["reason"]


def test_unused_parameters_with_a_given_plan(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:odd", "plan", unused=True, find_unused_parameters=True)
    one_line(found, "buckets can't be changed here: find_unused_parameters=True")


def test_bf16_parameters(ranks: Ranks, tmp_path: Path) -> None:
    assert both(ranks, tmp_path, f"{JOBS}:plain", dtype="bfloat16").values[0]["verdict"] == "KEPT"


@pytest.mark.parametrize("unused", [False, True])
def test_static_graph(ranks: Ranks, tmp_path: Path, unused: bool) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:odd", unused=unused, static_graph=True)
    assert found.values[0]["verdict"] == "KEPT"


def test_user_options_survive(ranks: Ranks, tmp_path: Path) -> None:
    options = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "bucket_cap_mb": 1}
    assert both(ranks, tmp_path, f"{JOBS}:plain", **options).values[0]["verdict"] == "KEPT"


def test_two_optimizers(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:two_optimizers")
    assert found.values[0]["verdict"] == "KEPT"
    assert found.values[0]["steps"] <= 50


def test_two_models_that_train_each_other(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:gan")
    assert found.values[0]["critic"] == found.values[1]["critic"]
    assert found.values[0]["verdict"] in ("KEPT", "STEPPED_ASIDE")


def test_checkpoints_are_what_they_were(ranks: Ranks, tmp_path: Path) -> None:
    without = ranks.run(f"{DRILLS}:checkpoints", tmp_path / "without", tune="").ok()
    found = ranks.run(f"{DRILLS}:checkpoints", tmp_path / "with", tune="search").ok()
    for key in ("weights", "keys", "resumed"):
        assert found.values[0][key] == without.values[0][key]


# -- the user's own tools ---------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_a_profiler_that_runs_already(ranks: Ranks, tmp_path: Path, legacy: bool) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:profiled", first=0, until=20, legacy=legacy)
    one_line(found, "the job's own profiler is running")
    assert found.values[0]["addmm"] == 21 * 5
    assert not found.values[0]["profiling"]


@pytest.mark.parametrize("legacy", [False, True])
def test_a_profiler_started_while_we_capture(ranks: Ranks, tmp_path: Path, legacy: bool) -> None:
    """Steps 6 to 8 are captured; the user starts his own before step 7, with what he would have seen."""
    env = {"DPRO_CAPTURE_STEPS": "3"}
    found = both(ranks, tmp_path, f"{DRILLS}:profiled", env=env, first=7, until=12, legacy=legacy)
    one_line(found, "the job's own profiler took over")
    assert found.values[0]["addmm"] == 6 * 5
    assert not found.values[0]["profiling"]


def test_a_communication_hook(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:comm_hook")
    assert found.values[0]["verdict"] == "NO_BETTER_PLAN"
    assert found.values[0]["reason"] == "a communication hook is registered"


def test_a_communication_hook_registered_later(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:comm_hook", "plan", late=True)
    one_line(found, "a communication hook was registered; nothing was changed")


def test_hooks_behind_ours_and_a_model_that_is_dropped(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:bystander")
    for value in found.values:
        assert value["verdict"] == "KEPT"
        assert value["runs"] == 50
        assert (value["hooks"], value["forward_hooks"]) == (1, 0)
        assert value["freed"]


# -- trouble ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5, 7, 9, 14])
def test_a_job_shorter_than_the_tuning(ranks: Ranks, tmp_path: Path, steps: int) -> None:
    found = both(ranks, tmp_path, f"{JOBS}:plain", steps=steps)
    one_line(found, f"training ended after {steps} steps")


def test_fewer_batches_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:uneven")
    one_line(found, "the job runs under Join (uneven inputs); nothing was changed")
    assert max(value["took_s"] for value in found.values) < 10  # far from DPRO_TIMEOUT_S: nobody waited


def test_an_exception_in_the_search(ranks: Ranks, tmp_path: Path) -> None:
    one_line(both(ranks, tmp_path, f"{DRILLS}:broken_search"), "ArithmeticError: out of luck; nothing was changed")


def test_a_plan_that_differs_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    one_line(both(ranks, tmp_path, f"{DRILLS}:other_hash", "plan"), "rank 1 holds another plan than rank 0")


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("start_capture", "nothing was changed"),
        ("stop_capture", "nothing was changed"),
        ("prepare", "nothing was changed"),
        ("apply", "your settings are back"),
    ],
)
def test_a_failure_on_one_rank(ranks: Ranks, tmp_path: Path, method: str, changed: str) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:failing_apply", method=method)
    one_line(found, f"rank 1: OSError: no luck; {changed}")
    assert found.values[0]["buckets"] == found.values[1]["buckets"]


def test_dpro_switched_off_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    without = ranks.run(f"{JOBS}:plain", tmp_path / "without", tune="").ok()
    found = ranks.run(f"{DRILLS}:alone", tmp_path / "with", tune="search").ok()
    assert [value["weights"] for value in found.values] == [value["weights"] for value in without.values]
    one_line(found, "rank 1 left the tuning; nothing was changed")
    assert found.values[0]["took_s"] < 10


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"DPRO_WARMUP_STEPS": "few"}, "DPRO_WARMUP_STEPS='few' is not a number"),
        ({"DPRO_PLAN": "nowhere.json"}, "nowhere.json: No such file or directory"),
    ],
)
def test_bad_settings_do_not_stop_the_job(ranks: Ranks, tmp_path: Path, env: dict[str, str], says: str) -> None:
    without = ranks.run(f"{JOBS}:plain", tmp_path / "without", tune="").ok()
    found = ranks.run(f"{JOBS}:plain", tmp_path / "with", tune="search", env=env).ok()
    assert [value["weights"] for value in found.values] == [value["weights"] for value in without.values]
    lines = found.lines()  # nobody knows whether others have it, too: one line on each rank
    assert len(lines) == 2
    assert all(says in line for line in lines)


# -- the ends of processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["WARMUP", "BASELINE", "CAPTURE", "PLAN", "APPLY", "VERIFY"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_hangs_nobody(ranks: Ranks, tmp_path: Path, state: str, victim: int) -> None:
    env = {"DPRO_TIMEOUT_S": "2", "DPRO_SEARCH_S": "1"}
    found = ranks.run(
        f"{DRILLS}:kill", tmp_path, env=env, last=True, timeout_s=45, tune="search", state=state, victim=victim,
        note=str(tmp_path / "died"),
    )  # fmt: skip
    assert (tmp_path / "died").exists(), found.logs
    assert not found.timed_out, found.logs
    assert found.exits[victim] == -9
    assert found.exits[1 - victim] == 1  # the error of its next all-reduce, as without dpro
    waited_s = found.ended_at[1 - victim] - float((tmp_path / "died").read_text())
    assert waited_s < 2 * 2 + 3 * 1 + 2 + 6, "longer than the tuner's time-outs and the job's own end"


@pytest.mark.parametrize("tidy", [False, True])
@pytest.mark.parametrize("steps", [2, 14])
def test_a_job_that_just_ends(ranks: Ranks, tmp_path: Path, steps: int, tidy: bool) -> None:
    found = ranks.run(f"{DRILLS}:unfinished", tmp_path, last=True, tune="search", steps=steps, tidy=tidy).ok()
    assert len(found.lines(f"stepped aside: training ended after {steps} steps")) == 1
    assert "Traceback" not in "".join(found.logs)


# -- activation by environment --------------------------------------------------------------------------


def test_activation_tunes_and_leaves_nothing_behind(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"})
    assert len(found.lines("trying")) == 1
    assert len(found.lines("stepped aside")) == 0
    assert found.values[0]["buckets"] == found.values[1]["buckets"]
    assert found.values[0]["restored"]
    assert found.values[0]["hooks"] == 0


def test_activation_gives_way_to_a_call_of_the_script(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"}, own_call=True)
    assert found.values[0]["verdict"] == "KEPT"
    assert len(found.lines("trying")) == 1
    assert found.values[0]["restored"]
    assert found.values[0]["hooks"] == 0


def test_activation_with_two_models_steps_aside(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"}, models=2)
    assert len(found.lines("stepped aside: the job has two DDP models")) == 1
    assert found.values[0]["restored"]
    assert found.values[0]["hooks"] == 0
