"""Gradients reduced in 16 bit: in force only where the user allows it, measured, and taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.launch import Ranks
from tests.frameworks.torch_ddp.test_drills import both, one_line

JOBS = "tests.frameworks.torch_ddp.lossy_jobs"
ALLOWED = {"DPRO_LOSSY": "1"}
HOOK = "fp16_compress_hook"


@pytest.mark.parametrize(("kept", "verdict"), [(True, "KEPT"), (False, "ROLLED_BACK")])
def test_a_given_plan_is_applied_measured_and_taken_back(
    ranks: Ranks, tmp_path: Path, kept: bool, verdict: str
) -> None:
    without = ranks.run(f"{JOBS}:given", tmp_path / "without", tune="").ok()
    file = str(tmp_path / "plan")
    found = ranks.run(f"{JOBS}:given", tmp_path / "with", tune="plan", env=ALLOWED, file=file, kept=kept).ok()
    for value, plain in zip(found.values, without.values, strict=True):
        assert value["verdict"] == verdict
        assert value["measured_ms"] > 0
        assert HOOK in value["seen"]  # it was in force, and is where it was kept
        assert value["hooks"] == ([HOOK, HOOK] if kept else [""])
        assert len(value["buckets"]) == (3 if kept else 1)
        # another result, and near: 11 bits of a gradient, over 50 steps of 0.01
        assert value["weights"] != plain["weights"]
        assert value["values"] == pytest.approx(plain["values"], abs=1e-3)
    assert found.values[0]["weights"] == found.values[1]["weights"]


def test_without_permission_a_plan_is_refused_in_a_line(ranks: Ranks, tmp_path: Path) -> None:
    found = both(ranks, tmp_path, f"{JOBS}:given", "plan", file=str(tmp_path / "plan"))
    one_line(found, "the plan's gradient_dtype changes the training's result: DPRO_LOSSY=1 allows that; nothing was")
    assert found.values[0]["hooks"] == [""] and found.values[0]["seen"] == [""]


def test_bfloat16_over_gloo_is_refused_as_torch_would(ranks: Ranks, tmp_path: Path) -> None:
    file = str(tmp_path / "plan")
    found = both(ranks, tmp_path, f"{JOBS}:given", "plan", env=ALLOWED, file=file, dtype="bfloat16")
    one_line(found, "DDP can't reduce this model's gradients in bfloat16 over gloo; nothing was changed")


@pytest.mark.parametrize("allowed", [False, True])
def test_the_search_may_only_if_allowed(ranks: Ranks, tmp_path: Path, allowed: bool) -> None:
    env = ALLOWED if allowed else None
    found = ranks.run(f"{JOBS}:offered", tmp_path, tune="search", env=env).ok()
    [[knobs, dtypes]] = found.values[0]["told"]
    assert "BUCKET_CAP" in knobs
    assert ("COMPRESSION" in knobs) is allowed
    assert dtypes == ["float16"]


def test_plans_in_turns_and_a_hook_of_the_users(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(f"{JOBS}:switched", tmp_path).ok()
    for value in found.values:
        assert value["found"] == [
            [[HOOK, HOOK], "", "", True],
            [[""], "", "", True],
            [[HOOK, HOOK], "", "", True],
            [[""], "", "", True],
        ]
        assert value["foreign"] == ["a communication hook is registered", "a communication hook was registered"]


def test_gradients_of_16_bit_are_left_alone(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(f"{JOBS}:halves", tmp_path).ok()
    assert "BUCKET_CAP" in found.values[0]["knobs"] and "COMPRESSION" not in found.values[0]["knobs"]
