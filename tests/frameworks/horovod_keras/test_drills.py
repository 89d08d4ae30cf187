"""Drills on real two-process Keras jobs: the weights a job gets without dpro, no hang, one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.horovod_torch.conftest import HorovodRanks
from tests.frameworks.launch import Result

DRILLS = "tests.frameworks.horovod_keras.drills"
JOBS = "tests.frameworks.horovod_keras.jobs"
#: Jobs without dpro that were run already, by what they are: several drills compare with the same.
_without: dict[str, list[Any]] = {}


def both(
    ranks: HorovodRanks,
    folder: Path,
    target: str,
    tune: str = "plan",
    env: dict[str, str] | None = None,
    same: tuple[str, ...] = ("weights",),
    like: str = "",
    **arguments: Any,
) -> Result:
    """Run a job with and without dpro; what is the ``same`` must be so. Returns the run with dpro.

    Args:
        like: a job that trains as ``target`` does, and was or will be run without dpro anyhow.
    """
    alone = {} if like else {key: value for key, value in arguments.items() if key != "kept"}
    key = f"{like or target} {sorted(alone.items())}"
    if key not in _without:
        run = ranks.run(like or target, folder / "without", tune="", **alone).ok()
        assert run.lines() == []
        _without[key] = run.values
    without = _without[key]
    found = ranks.run(target, folder / "with", tune=tune, env=env, **arguments).ok()
    for what in same:
        assert [value[what] for value in found.values] == [value[what] for value in without], what
    assert len({value["weights"] for value in without}) == 1
    assert len({value["verdict"] for value in found.values}) == 1
    return found


def one_line(found: Result, says: str) -> None:
    """dpro stepped aside, and said so once."""
    assert found.values[0]["verdict"] == "STEPPED_ASIDE", found.values[0]
    lines = found.lines("stepped aside")
    assert len(lines) == 1, lines
    assert says in lines[0]
    assert "Traceback" not in "".join(found.logs)


def kept(found: Result, sizes: list[int] | None = None) -> None:
    """A plan is in force on all ranks alike."""
    assert found.values[0]["verdict"] == "KEPT", found.values[0]
    for value in found.values:
        assert value["groups"] == (sizes or [1, 2, 3])


# -- the ordinary job ---------------------------------------------------------------------------


@pytest.mark.parametrize("tune", ["plan", "search"])
def test_groups_kept_leave_weights_bit_equal(ranks: HorovodRanks, tmp_path: Path, tune: str) -> None:
    """And what the job is told of its losses and metrics."""
    found = both(ranks, tmp_path, f"{JOBS}:plain", tune, same=("weights", "history"))
    assert found.values[0]["verdict"] == "KEPT", found.logs
    assert found.values[0]["groups"] == found.values[1]["groups"] is not None
    if tune == "search":
        files = {path.name for path in next((tmp_path / "with" / "runs").iterdir()).iterdir()}
        assert {"plan.json", "report.txt", "outcome.json", "meta.json"} <= files, files


def test_groups_rolled_back_leave_weights_bit_equal(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{JOBS}:plain", kept=False)
    assert found.values[0]["verdict"] == "ROLLED_BACK"
    assert found.values[0]["groups"] is None


@pytest.mark.parametrize(
    "arguments",
    [{"compression": "fp16", "op": "Sum"}, {"gradient_predivide_factor": 2.0}],
    ids=["compression and sum", "predivide"],
)
def test_the_users_optimizer_survives(ranks: HorovodRanks, tmp_path: Path, arguments: dict[str, Any]) -> None:
    kept(both(ranks, tmp_path, f"{JOBS}:plain", **arguments))


@pytest.mark.parametrize("is_kept", [True, False])
def test_schedules_state_and_metrics_survive(ranks: HorovodRanks, tmp_path: Path, is_kept: bool) -> None:
    same = ("weights", "history", "state", "updates")
    found = both(ranks, tmp_path, f"{DRILLS}:scheduled", same=same, kept=is_kept)
    assert found.values[0]["verdict"] == ("KEPT" if is_kept else "ROLLED_BACK")
    assert len(found.values[0]["history"]["val_loss"]) == 2


# -- kinds of models and loops --------------------------------------------------------------------


def test_a_train_step_of_the_users(ranks: HorovodRanks, tmp_path: Path) -> None:
    kept(both(ranks, tmp_path, f"{DRILLS}:own_step", same=("weights", "own")))


def test_mixed_precision(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:mixed", "search", policy="mixed_float16")
    assert found.values[0]["verdict"] == "KEPT", found.logs
    assert found.values[0]["scaled"]  # Keras put an optimizer of its own around Horovod's


def test_random_numbers_kept_in_variables_go_on(ranks: HorovodRanks, tmp_path: Path) -> None:
    kept(both(ranks, tmp_path, f"{DRILLS}:drawing"))


def test_accumulation_counts_updates_not_batches(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:accumulated", "search")
    assert found.values[0]["verdict"] == "KEPT", found.logs
    assert found.values[0]["updates"] == 30


def test_a_loop_of_batches_with_evaluations(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:loop")
    kept(found)
    assert [(value["left"], value["idle"]) for value in found.values] == [([], True)] * 2


@pytest.mark.parametrize(
    ("how", "tune"), [("first", "plan"), ("second", "search"), ("autotune", "plan"), ("frozen", "plan")]
)
def test_two_fits(ranks: HorovodRanks, tmp_path: Path, how: str, tune: str) -> None:
    """What the first one kept is in force in the second; the step was traced before dpro came; tuned across both."""
    found = both(ranks, tmp_path, f"{DRILLS}:again", tune, how=how)
    assert found.values[0]["verdict"] == "KEPT", found.logs
    assert found.values[0]["groups"] == found.values[1]["groups"] is not None


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("seeded", "draws random numbers from a seed"),
        ("namesakes", "several variables are called 'a/kernel'"),
        ("sparse", "there are sparse gradients, which can't be grouped"),
        ("own groups", "the job has groups of its own"),
    ],
)
def test_what_groups_could_disturb_is_left_alone(ranks: HorovodRanks, tmp_path: Path, kind: str, says: str) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:unusual", kind=kind)
    one_line(found, "the train step can't be changed here: ")
    assert says in found.lines("stepped aside")[0]


def test_gradients_that_horovod_makes_dense_are_grouped(ranks: HorovodRanks, tmp_path: Path) -> None:
    kept(both(ranks, tmp_path, f"{DRILLS}:unusual", kind="made dense"), [1, 2])


def test_several_steps_in_one_execution(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:unusual", kind="steps_per_execution", like=f"{JOBS}:plain")
    assert len(found.lines("stepped aside: several steps are one execution")) == 2  # each rank sees it for itself


# -- trouble ----------------------------------------------------------------------------------------


def test_a_job_shorter_than_the_tuning(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{JOBS}:plain", steps=10, epochs=1)
    one_line(found, "training ended after 10 steps")


def test_a_model_compiled_anew_in_mid_tuning(ranks: HorovodRanks, tmp_path: Path) -> None:
    one_line(both(ranks, tmp_path, f"{DRILLS}:compiled_anew", at=10), "the model was compiled anew")


def test_horovod_started_anew_in_mid_tuning(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:started_anew", at=10)
    assert found.values[0]["verdict"] == "STEPPED_ASIDE"
    assert len(found.lines("stepped aside: Horovod was shut down or started anew")) >= 1
    assert all(value["restored"] for value in found.values)


@pytest.mark.parametrize(
    ("method", "changed"), [("prepare", "nothing was changed"), ("apply", "your settings are back")]
)
def test_a_failure_on_one_rank(ranks: HorovodRanks, tmp_path: Path, method: str, changed: str) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:failing", method=method, like=f"{JOBS}:plain")
    one_line(found, f"rank 1: OSError: no luck; {changed}")
    assert [value["groups"] for value in found.values] == [None, None]


def test_a_step_that_cannot_be_traced_again(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:untraceable", like=f"{DRILLS}:own_step")
    assert found.values[0]["verdict"] == "STEPPED_ASIDE"
    assert "the user's own" in found.lines("stepped aside: rank 1")[0]
    assert [value["groups"] for value in found.values] == [None, None]


@pytest.mark.parametrize("off", [0, 1])
def test_dpro_switched_off_on_one_rank(ranks: HorovodRanks, tmp_path: Path, off: int) -> None:
    found = ranks.run(f"{DRILLS}:alone", tmp_path, tune="plan", off=off).ok()
    assert found.values[0]["weights"] == found.values[1]["weights"]
    # rank 0 speaks for all, also by its silence
    assert len(found.lines()) == off == len(found.lines(f"rank {off} left the tuning; nothing was changed"))
    assert found.values[0]["took_s"] < 15  # far from DPRO_TIMEOUT_S: nobody waited


@pytest.mark.parametrize(("state", "victim"), [("APPLY", 1)])
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


@pytest.mark.parametrize(("ended", "verdict"), [([40, 34], "KEPT"), ([10, 30], "STEPPED_ASIDE")], ids=str)
def test_a_rank_that_joins_early(ranks: HorovodRanks, tmp_path: Path, ended: list[int], verdict: str) -> None:
    """With a kept plan; and while one is on trial: the rank leaves the tuning, nobody waits for it."""
    found = both(ranks, tmp_path, f"{DRILLS}:joined", ended=ended)
    for value in found.values:
        assert value["verdict"] == verdict, found.logs
        assert value["restored"]
        assert value["took_s"] < 15  # far from DPRO_TIMEOUT_S


def test_an_exception_of_the_users_ends_the_job_as_ever(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = ranks.run(f"{DRILLS}:raising", tmp_path, last=True, tune="plan", at=10)
    assert not found.timed_out, found.logs
    assert found.exits == [1, 1]
    assert "ZeroDivisionError: the user's own" in found.logs[1]


@pytest.mark.parametrize(
    ("first", "says"), [(5, "the job's own profiler is running"), (7, "the job's own profiler took over")]
)
def test_a_profiler_of_the_users_comes_first(ranks: HorovodRanks, tmp_path: Path, first: int, says: str) -> None:
    """It runs already when dpro's turn comes, or starts in the midst of it: steps 7 and 8 are captured."""
    env = {"DPRO_CAPTURE_STEPS": "2"}
    found = both(ranks, tmp_path, f"{DRILLS}:profiled", "search", env, first=first, until=12, like=f"{JOBS}:plain")
    one_line(found, says)
    for value in found.values:
        assert value["profiles"] >= 1
        assert not value["running"]


def test_checkpoints_are_what_they_were(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{DRILLS}:checkpointed", same=("weights", "names", "resumed"))
    kept(found)
    assert found.values[0]["resumed_groups"] is None


# -- activation by environment --------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "own_call"), [("fit", False), ("fit", True), ("loop", False)])
def test_activation_tunes_and_leaves_nothing_behind(
    ranks: HorovodRanks, tmp_path: Path, how: str, own_call: bool
) -> None:
    like = f"{JOBS}:plain" if how == "fit" else f"{DRILLS}:loop"
    found = both(ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"}, like=like, how=how, own_call=own_call)
    assert len(found.lines("trying")) == 1, found.logs
    assert len(found.lines("stepped aside")) == 0
    assert found.values[0]["groups"] == found.values[1]["groups"] is not None
    assert all(value["restored"] for value in found.values)


def test_activation_with_two_models_steps_aside(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = both(
        ranks, tmp_path, f"{DRILLS}:activated", env={"DPRO": "apply"}, like=f"{DRILLS}:loop", how="loop", models=2
    )
    assert len(found.lines("the job trains two distributed models")) == 1
    assert all(value["restored"] for value in found.values)
