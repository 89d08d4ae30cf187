"""The Lightning callback on real two-process jobs, under both import names."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dpro.plan import Plan
from tests.frameworks.launch import Ranks, Result

pytest.importorskip("torch")
JOBS = "tests.frameworks.lightning.jobs"
#: Lightning believes that torchrun started it, and starts no processes of its own.
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@dataclass
class Jobs:
    name: str
    ranks: Ranks

    def run(self, folder: Path, target: str = "fit", env: dict[str, str] | None = None, **arguments: Any) -> Result:
        given = {"env": ELASTIC | (env or {}), "timeout_s": 120.0}
        return self.ranks.run(f"{JOBS}:{target}", folder, lightning=self.name, **given, **arguments).ok()

    def both(self, folder: Path, **arguments: Any) -> Result:
        """With and without the callback: same weights, same number of batches."""
        without = self.run(folder / "without", tune="", **arguments)
        found = self.run(folder / "with", tune="search", **arguments)
        for key in ("weights", "batches", "error"):
            assert [value[key] for value in found.values] == [value[key] for value in without.values]
        assert without.lines() == []
        assert found.values[0]["verdict"] == found.values[1]["verdict"]
        return found


@pytest.fixture(scope="module", params=["lightning.pytorch", "pytorch_lightning"])
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    pytest.importorskip(request.param)
    ranks = Ranks(request.param, "torch._dynamo", "torch.profiler", "dpro_integrations.torch_ddp")
    yield Jobs(request.param, ranks)
    ranks.close()


def test_a_kept_plan_leaves_weights_bit_equal_and_reaches_the_logger(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.both(tmp_path)
    value = found.values[0]
    assert value["verdict"] == "KEPT"
    assert value["batches"] == 50
    assert len(value["metrics"]) == 1
    assert {"dpro/baseline_ms", "dpro/measured_ms", "dpro/replayed_ms", "dpro/kept"} <= set(value["metrics"][0])
    assert value["metrics"][0]["dpro/kept"] == 1.0
    assert found.values[1]["metrics"] == []


def test_a_plans_submodules_are_compiled(jobs: Jobs, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    Plan(compile_regions=["net"]).save(plan)
    env = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "dpro-tests-inductor")}
    found = jobs.run(tmp_path / "with", env=env, tune="search", callback_arguments={"plan": str(plan)})
    for value in found.values:
        assert value["verdict"] == "KEPT", found.logs
        assert value["compiled"] == ["net"]
    assert found.lines("not compiled") == []
    assert found.values[0]["weights"] == found.values[1]["weights"]


def test_accumulation_counts_updates(jobs: Jobs, tmp_path: Path) -> None:
    """60 batches an epoch, 8 at a time: 7 updates and one of the remaining 4."""
    found = jobs.both(tmp_path, steps=40, accumulate_grad_batches=8)
    assert found.values[0]["verdict"] == "KEPT"
    assert found.values[0]["batches"] == 5 * 60
    assert found.values[0]["steps"] <= 40


def test_validation_between_steps_is_not_timed(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.both(tmp_path, validate=True)
    assert found.values[0]["verdict"] == "KEPT"
    assert found.values[0]["slowest_ms"] < 1000


def test_fast_dev_run_is_left_alone(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.both(tmp_path, fast_dev_run=3)
    assert found.lines() == []
    assert found.values[0]["batches"] == 3


def test_a_strategy_that_is_not_ddp(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.both(tmp_path, steps=10, other_strategy=True)
    assert found.lines() == ["dpro: stepped aside: strategy OtherStrategy is not DDP"]


def test_early_stop(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.both(tmp_path, stop_at=9)
    assert found.values[0]["batches"] == 9
    assert len(found.lines("stepped aside: training ended after 9 steps")) == 1


def test_an_exception_of_the_users(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.both(tmp_path, fail_at=8)
    assert found.values[0]["error"] == "the user's own mistake"
    assert len(found.lines("stepped aside: training ended after 8 steps")) == 1


def test_resume_verifies_the_stored_plan_and_does_not_profile(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.run(tmp_path, "resumed", place=str(tmp_path))
    first, second, stored = found.values[0]
    assert (first["verdict"], second["verdict"]) == ("KEPT", "KEPT")
    assert len(found.lines("profiling steps")) == 1
    assert len(found.lines("trying given plan")) == 1
    assert list(stored.values()) == [["plan"]]
    assert second["batches"] == 50
    assert found.values[0][1]["weights"] == found.values[1][1]["weights"]


def test_the_callback_and_the_environment_tune_once(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.ranks.run(
        f"{JOBS}:both_activations", tmp_path, env=ELASTIC | {"DPRO": "apply"}, lightning=jobs.name
    ).ok()
    assert found.values[0]["verdict"] == "KEPT"
    assert len(found.lines("profiling steps")) == 1
    assert found.values[0]["restored"]


@pytest.mark.parametrize("mode", ["observe", "suggest"])
def test_modes_that_change_nothing(jobs: Jobs, tmp_path: Path, mode: str) -> None:
    found = jobs.both(tmp_path, steps=20, callback_arguments={"mode": mode})
    assert found.values[0]["verdict"] == {"observe": "OBSERVED", "suggest": "SUGGESTED"}[mode]


def test_a_job_over_its_budget_has_its_batches_cut(jobs: Jobs, tmp_path: Path) -> None:
    """Against a job below its budget: same weights but for rounding, and nothing left on the module."""
    roomy = jobs.run(tmp_path / "roomy", "over_budget", budget=1 << 40).values
    peak = roomy[0]["peak"]
    found = jobs.run(tmp_path / "tight", "over_budget", budget=round(0.7 * peak)).values
    assert found[0]["verdict"] == "KEPT", found[0]
    assert found[0]["plan"]["accumulate"] > 1 and not roomy[0]["plan"].get("accumulate")
    assert all(measured <= 0.7 * peak for measured in found[0]["measured"])
    for tight, whole in zip(found, roomy, strict=True):
        assert tight["values"] == pytest.approx(whole["values"], abs=1e-4, rel=1e-5)
        assert tight["left"] == []


def test_a_batch_with_a_part_that_has_no_loss_runs_whole(jobs: Jobs, tmp_path: Path) -> None:
    """As without dpro, also where the first part's gradients were there already."""
    plan = tmp_path / "plan.json"
    Plan(accumulate=2).save(plan)
    without = jobs.run(tmp_path / "without", "parts_without_loss", plan="")
    found = jobs.run(tmp_path / "with", "parts_without_loss", plan=str(plan))
    for value, other in zip(found.values, without.values, strict=True):
        assert value["verdict"] == "KEPT", found.logs
        after_a_part = {value["sizes"][at - 2 : at + 1].count(4) for at, size in enumerate(value["sizes"]) if size == 8}
        assert {1, 2} <= after_a_part and set(other["sizes"]) == {8}
        for numbers, plain in zip(value["values"], other["values"], strict=True):
            assert numbers == pytest.approx(plain, abs=1e-6)
    assert len(found.lines("such batches run whole")) == 2  # one a rank


def test_a_batch_without_loss_is_what_lightning_makes_of_it(jobs: Jobs, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    Plan(accumulate=2).save(plan)
    without = jobs.run(tmp_path / "without", "parts_without_loss", plan="", skip_at=46)
    found = jobs.run(tmp_path / "with", "parts_without_loss", plan=str(plan), skip_at=46)
    assert [value["error"] for value in found.values] == [value["error"] for value in without.values]
    assert "None" in without.values[0]["error"]
    assert {value["verdict"] for value in found.values} == {"KEPT"}
    assert [value["left"] for value in found.values] == [[], []]
