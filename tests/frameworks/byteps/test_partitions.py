"""Partitions of gradients, changed in a running job of BytePS: real workers, a real server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Testbed
from tests.frameworks.byteps import sums
from tests.frameworks.byteps.launch import begin

JOBS = "tests.frameworks.byteps.partition_jobs"


def run(function: str, folder: Path, **arguments: Any) -> list[Any]:
    """What each rank returned."""
    folder.mkdir(parents=True, exist_ok=True)
    with Testbed(2, loopback=True) as bed:
        code = begin(bed, "rank", folder, f"{JOBS}:{function}", json.dumps(arguments)).wait(100)
    assert code == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def untuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """By compression (JSON), what each rank of a job without dpro returned; of one job each."""

    @cache
    def trained(compression: str) -> list[Any]:
        folder = tmp_path_factory.mktemp("untuned")
        return run("train", folder, plans=False, compression_params=json.loads(compression))

    return trained


def test_sums_are_right_before_under_and_after_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every element on every rank in every round, of what the job pushes itself as well.

    How many parts BytePS itself says it makes: 240,000 bytes are 4 of 65,536, 15 of 16,384, 2 of 131,072.
    """
    monkeypatch.setenv("BYTEPS_LOG_LEVEL", "DEBUG")
    told = run("sums_under_plans", tmp_path, rounds=8)
    said = "".join(capfd.readouterr())
    parts = set(re.findall(r"byteps\.(\S+) partitioned to (\d+) part", said))
    assert {("gradient_5", "4"), ("gradient_5~1", "15"), ("gradient_5~2", "2"), ("own", "4")} <= parts
    assert {name for name, _ in parts if "~3" in name} == set()
    for one in told:
        assert one["wrong"] == []
        assert one["checks"] == 8 * 8 * (len(sums.ELEMENTS) + 1)
        seen = dict(one["seen"])
        assert seen["after"] == seen["before"]
        assert seen["small"][1] == 16384 and seen["large"][1] == 131072


@pytest.mark.parametrize("compression", [None, {"fp16": True}], ids=["", "fp16"])
def test_weights_are_bit_equal_with_and_without_plans(
    compression: Any, tmp_path: Path, untuned: Callable[[str], list[Any]]
) -> None:
    with_plans = run("train", tmp_path / "with", plans=True, compression_params=compression)
    without = untuned(json.dumps(compression))
    assert with_plans == without
    assert without[0] == without[1]
    assert without[0]["moved"]


def test_a_foreign_plan_or_another_global_changes_nothing(tmp_path: Path) -> None:
    for one in run("foreign", tmp_path):
        assert one["same"] and one["why_not"] == ""
        assert len(one["errors"]) == 12 and "accepted" not in one["errors"]
        assert "BytePS' bound reads 69632, not 65536" in one["differs"][0] and one["differs"][1] == 0
        assert "a way of its own" in one["own way"]


def test_bounds_that_cost_memory_for_good_are_limited(tmp_path: Path) -> None:
    for said in run("bounds_without_end", tmp_path):
        assert said[:5] == [""] * 5
        assert all("5 partition sizes were tried" in one for one in said[5:]) and len(said) == 7


def test_an_apply_that_fails_on_one_rank_leaves_all_alike(tmp_path: Path) -> None:
    told = run("one_rank_fails", tmp_path)
    assert [one["failed"] for one in told] == ["", "on purpose"]
    assert all(one["wrong"] == [] for one in told)


def test_ranks_meet_at_a_store_that_byteps_tells_them_of(tmp_path: Path) -> None:
    told = run("meeting", tmp_path / "met")
    assert [one["met"] for one in told] == [[["0", "1"], "0"] * 2, [[], "0"] * 2]
    assert told[0]["error"] == ""


def test_a_rank_that_does_not_come_costs_the_tuning_alone(tmp_path: Path, untuned: Callable[[str], list[Any]]) -> None:
    """What the job trains to is right; it has to be ended, since BytePS' own shutdown waits for what nobody answers."""
    alone = untuned("null")
    folder = tmp_path / "absent"
    folder.mkdir()
    with Testbed(2, loopback=True) as bed:
        job = begin(bed, "rank", folder, f"{JOBS}:meeting", json.dumps({"absent": True}))
        deadline = time.monotonic() + 60
        while len(list(folder.glob("?.json"))) < 2:
            assert time.monotonic() < deadline and job.poll() is None, "the job hangs, or failed"
            time.sleep(0.1)
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["met"] for one in told] == [[], []]
    assert told[0]["error"] == "the ranks can't meet for tuning: not all ranks came within 3 s"
    assert [one["weights"] for one in told] == [one["weights"] for one in alone]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "rolled back"])
def test_a_given_plan_is_verified_in_the_running_job(
    kept: bool, tmp_path: Path, untuned: Callable[[str], list[Any]]
) -> None:
    """Weights are those of a job without dpro; the bound in force is the plan's at some steps and, kept, at the end."""
    runs = str(tmp_path / "runs")
    with_plan = run("tuned", tmp_path / "with", plan=True, kept=kept, runs=runs)
    alone = untuned("null")
    for one, other in zip(with_plan, alone, strict=True):
        assert one["verdict"] == ("KEPT" if kept else "ROLLED_BACK")
        assert one["weights"] == other["weights"]
        assert set(one["bounds"]) == {16384, 65536}
        assert one["bounds"] == with_plan[0]["bounds"]
        assert one["left"] == (not kept) and one["under"] == (16384 if kept else 65536)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "rolled back"])
def test_a_job_is_recorded_searched_and_tuned_as_it_runs(
    kept: bool, tmp_path: Path, untuned: Callable[[str], list[Any]]
) -> None:
    """Weights are those of a job without dpro; what is kept can be set when the next job is started."""
    with_dpro = run("tuned", tmp_path / "with", plan=False, kept=kept, runs=str(tmp_path / "runs"))
    alone = untuned("null")
    for one, other in zip(with_dpro, alone, strict=True):
        assert one["verdict"] == ("KEPT" if kept else "ROLLED_BACK"), one["reason"]
        assert one["weights"] == other["weights"]
        assert one["bounds"] == with_dpro[0]["bounds"] and len(set(one["bounds"])) == 2
        assert one["under"] == one["bounds"][-1]
        assert one["left"] == (not kept)
        assert one["start"] == (one["under"] if kept else 0)
