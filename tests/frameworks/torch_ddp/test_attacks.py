"""What an attacker found: every job here once had other weights than without dpro, crashed, hung or was noisy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.launch import Ranks
from tests.frameworks.torch_ddp.test_drills import JOBS, both, one_line

ATTACKS = "tests.frameworks.torch_ddp.attacks"
STRAYED = "parameters were frozen, unfrozen or replaced since DDP was made; nothing was changed"


# -- profilers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wait", "warmup"), [(6, 1), (5, 2), (5, 1), (4, 2)])
def test_a_scheduled_profiler(ranks: Ranks, tmp_path: Path, wait: int, warmup: int) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:scheduled_profiler", wait=wait, warmup=warmup)
    one_line(found, "the job's own profiler")
    assert [value["addmm"] for value in found.values] == [[3 * 5]] * 2


def test_a_profiler_started_behind_torchs_back(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:raw_profiler")
    one_line(found, "the job's own profiler took over; nothing was changed")
    assert found.values[0]["seen"][1], "after ours gave way, the user's sees again"


def test_an_object_that_does_not_tell_its_class(ranks: Ranks, tmp_path: Path) -> None:
    assert both(ranks, tmp_path, f"{ATTACKS}:proxies").values[0]["verdict"] == "KEPT"


def test_an_optimizer_replaced_while_we_profile(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:replaced_optimizer")
    one_line(found, "training ended after 6 steps, in the capture phase; nothing was changed")
    assert [(value["running"], value["still"]) for value in found.values] == [(True, False)] * 2


# -- what belongs to the job ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["apply", "observe"])
def test_seeded_generators_are_not_drawn_from(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    without = ranks.run(f"{ATTACKS}:seeded", tmp_path / "without", tune="").ok()
    found = ranks.run(f"{ATTACKS}:seeded", tmp_path / "with", tune="search", env={"DPRO_MODE": mode}).ok()
    assert len(found.lines("wrote")) == 1  # the table was drawn
    for key in ("weights", "drawn", "drawn_by_torch"):
        assert [value[key] for value in found.values] == [value[key] for value in without.values]


def test_a_capture_larger_than_a_message_of_the_store(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:large_capture", nbytes=20 << 20)
    assert found.values[0]["sizes"] == [20 << 20] * 2
    assert [value["total"] for value in found.values] == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["full", "closed", "none"])
def test_a_broken_stderr(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:broken_stderr", kind=kind)
    assert found.values[0]["verdict"] != ""
    assert found.values[0]["printed"] == ""


def test_a_wrapper_pickled_and_copied_at_every_step(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:copied")
    assert found.values[0]["verdict"] == "KEPT"
    assert found.values[0]["left"] == 0
    assert found.values[0]["foreign"] == 0, "a saved model must load without dpro"


def test_a_forked_child_that_ends_is_no_rank_that_leaves(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:child_ends")
    assert found.values[0]["verdict"] == "KEPT"
    assert found.values[0]["statuses"] == [0, 0]


@pytest.mark.parametrize("allowed", [False, True])
def test_bucket_views_only_if_allowed(ranks: Ranks, tmp_path: Path, allowed: bool) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:views", allowed=allowed)
    offered = found.values[0]["offered"]
    assert "BUCKET_CAP" in offered
    assert ("BUCKET_VIEW" in offered) is allowed


# -- jobs that a new reducer would change -------------------------------------------------------------


@pytest.mark.parametrize("tune", ["search", "plan"])
@pytest.mark.parametrize("at", [7, 9])
def test_a_communication_hook_registered_in_mid_tuning(ranks: Ranks, tmp_path: Path, tune: str, at: int) -> None:
    one_line(both(ranks, tmp_path, f"{ATTACKS}:late_comm_hook", tune, at=at), "a communication hook was registered")


def test_a_constructor_that_fails_leaves_the_wrapper_as_it_was(ranks: Ranks, tmp_path: Path) -> None:
    one_line(both(ranks, tmp_path, f"{ATTACKS}:failing_constructor", "plan"), "MemoryError: no room for buckets")


@pytest.mark.parametrize("tune", ["search", "plan", "activated"])
@pytest.mark.parametrize("layers", [1, 9])
def test_parameters_frozen_around_the_step(ranks: Ranks, tmp_path: Path, tune: str, layers: int) -> None:
    env = {"DPRO": "apply"} if tune == "activated" else None
    found = both(ranks, tmp_path, f"{ATTACKS}:frozen_in_step", tune, env=env, layers=layers)
    assert [STRAYED in line for line in found.lines()] == [True]


def test_a_layer_that_starts_to_train_in_mid_tuning(ranks: Ranks, tmp_path: Path) -> None:
    one_line(both(ranks, tmp_path, f"{ATTACKS}:unfrozen"), STRAYED)


@pytest.mark.parametrize("tune", ["plan", "activated"])
def test_a_module_that_is_not_the_one_ddp_was_made_with(ranks: Ranks, tmp_path: Path, tune: str) -> None:
    env = {"DPRO": "apply"} if tune == "activated" else None
    found = both(ranks, tmp_path, f"{ATTACKS}:other_module", tune, env=env)
    assert [STRAYED in line for line in found.lines()] == [True]


def test_delayed_gradients_with_a_given_plan(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:delayed_gradients", "plan")
    one_line(found, "buckets can't be changed here: the next forward runs before the optimizer's step")
    assert found.values[0]["hooks"] == 0


def test_delayed_gradients_are_observed(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{ATTACKS}:delayed_gradients")
    assert found.values[0]["verdict"] == "NO_BETTER_PLAN"
    assert found.values[0]["reason"] == "the next forward runs before the optimizer's step"


@pytest.mark.parametrize("tune", ["search", "plan"])
def test_an_uneven_step_and_an_impatient_process_group(ranks: Ranks, tmp_path: Path, tune: str) -> None:
    one_line(both(ranks, tmp_path, f"{ATTACKS}:short_timeout", tune), "rank 1 did not answer within 0.4 s")


def test_a_plan_with_a_cap_beyond_reason(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 1, "bucket_caps": [1e300]}')
    env = {"DPRO_PLAN": str(tmp_path / "plan.json")}
    without = ranks.run(f"{JOBS}:plain", tmp_path / "without", tune="", steps=15).ok()
    found = ranks.run(f"{JOBS}:plain", tmp_path / "with", tune="search", steps=15, env=env).ok()
    assert [value["weights"] for value in found.values] == [value["weights"] for value in without.values]
    assert all("stepped aside" in line for line in found.lines("bucket_caps"))
    assert found.lines("bucket_caps")
    assert "Traceback" not in "".join(found.logs)
