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


#: What need not have a process of its own. BytePS knows a name by one size, so that fp16 is another job.
FP16 = {"compression_params": {"fp16": True}}
SHARED: list[tuple[str, dict[str, Any]]] = [
    ("train", {"plans": False}),
    ("train", {"plans": True}),
    *(("frozen", {"flow": flow}) for flow in (True, False)),
    ("foreign", {}),
    ("one_rank_fails", {}),
    ("meeting", {}),
    *(("tuned", {"plan": plan, "kept": kept}) for plan in (True, False) for kept in (True, False)),
    *(("tuned", {"plan": False, "kept": kept, "flow": True}) for kept in (True, False)),
]
SHARED_FP16: list[tuple[str, dict[str, Any]]] = [("train", {"plans": plans} | FP16) for plans in (False, True)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """What each rank returned for one of :data:`SHARED` or :data:`SHARED_FP16`."""

    @cache
    def all_of(fp16: bool) -> list[Any]:
        folder = tmp_path_factory.mktemp("shared")
        runs = {"runs": str(folder / "runs")}
        calls = SHARED_FP16 if fp16 else [(f, given | runs if f == "tuned" else given) for f, given in SHARED]
        return run("several", folder, calls=calls)

    def one(function: str, **given: Any) -> list[Any]:
        shared = SHARED_FP16 if "compression_params" in given else SHARED
        return [results[shared.index((function, given))] for results in all_of(shared is SHARED_FP16)]

    return one


def test_sums_are_right_before_under_and_after_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every element on every rank in every round, of what the job pushes itself as well.

    How many parts BytePS itself says it makes: 240,000 bytes are 4 of 65,536, 15 of 16,384, 2 of 131,072.
    """
    monkeypatch.setenv("BYTEPS_LOG_LEVEL", "DEBUG")
    found = run("sums_under_plans", tmp_path, rounds=8)
    said = "".join(capfd.readouterr())
    parts = set(re.findall(r"byteps\.(\S+) partitioned to (\d+) part", said))
    assert {("gradient_5", "4"), ("gradient_5~1", "15"), ("gradient_5~2", "2"), ("own", "4")} <= parts
    pieces = {(name, count) for name, count in parts if re.search("~[3-9]", name)}
    names = {f"gradient_5.{k}~{made}" for k in range(15) for made in (3, 4)}  # two orders of the same pieces
    assert names <= {name for name, _ in pieces} and {count for _, count in pieces} == {"1"}
    assert {name.rpartition("~")[2] for name, _ in pieces} == {"3", "4"}
    for one in found:
        assert one["wrong"] == []
        assert one["checks"] == 15 * 8 * (len(sums.ELEMENTS) + 1)
        seen = dict(one["seen"])
        assert all(state == seen["before"] for label, state in one["seen"] if label == "after")
        assert [label for label, _ in one["seen"]].count("after") == 5
        assert seen["small"][1] == 16384 and seen["large"][1] == 131072
        assert seen["flow1"][1] == seen["copies"][1] == sums.PARTITION_BYTES


@pytest.mark.parametrize("more", [{}, FP16], ids=["", "fp16"])
def test_weights_are_bit_equal_with_and_without_plans(more: dict[str, Any], told: Callable[..., list[Any]]) -> None:
    without = told("train", plans=False, **more)
    assert told("train", plans=True, **more) == without
    assert without[0] == without[1]
    assert without[0]["moved"]


def test_a_foreign_plan_or_another_global_changes_nothing(told: Callable[..., list[Any]]) -> None:
    for one in told("foreign"):
        assert one["same"] and one["why_not"] == ""
        assert len(one["errors"]) == 16 and "accepted" not in one["errors"]
        assert "BytePS' bound reads 69632, not 65536" in one["differs"][0] and one["differs"][1] == 0
        assert "a way of its own" in one["own way"]


def test_bounds_that_cost_memory_for_good_are_limited(tmp_path: Path) -> None:
    for said in run("bounds_without_end", tmp_path):
        assert said[:5] == [""] * 5
        assert all("5 partition sizes were tried" in one for one in said[5:]) and len(said) == 7


def test_an_apply_that_fails_on_one_rank_leaves_all_alike(told: Callable[..., list[Any]]) -> None:
    found = told("one_rank_fails")
    assert [one["failed"] for one in found] == ["", "on purpose"]
    assert all(one["wrong"] == [] for one in found)


def test_ranks_meet_at_a_store_that_byteps_tells_them_of(told: Callable[..., list[Any]]) -> None:
    found = told("meeting")
    assert [one["met"] for one in found] == [[["0", "1"], "0"] * 2, [[], "0"] * 2]
    assert found[0]["error"] == ""


def test_a_rank_that_does_not_come_costs_the_tuning_alone(tmp_path: Path, told: Callable[..., list[Any]]) -> None:
    """What the job trains to is right; it has to be ended, since BytePS' own shutdown waits for what nobody answers."""
    with Testbed(2, loopback=True) as bed:
        job = begin(bed, "rank", tmp_path, f"{JOBS}:meeting", json.dumps({"absent": True}))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("?.json"))) < 2:
            assert time.monotonic() < deadline and job.poll() is None, "the job hangs, or failed"
            time.sleep(0.1)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["met"] for one in found] == [[], []]
    assert found[0]["error"] == "the ranks can't meet for tuning: not all ranks came within 3 s"
    assert [one["weights"] for one in found] == [one["weights"] for one in told("train", plans=False)]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "rolled back"])
def test_a_given_plan_is_verified_in_the_running_job(kept: bool, told: Callable[..., list[Any]]) -> None:
    """Weights are those of a job without dpro; the bound in force is the plan's at some steps and, kept, at the end."""
    with_plan = told("tuned", plan=True, kept=kept)
    for one, other in zip(with_plan, told("train", plans=False), strict=True):
        assert one["verdict"] == ("KEPT" if kept else "ROLLED_BACK")
        assert one["weights"] == other["weights"]
        assert set(one["bounds"]) == {16384, 65536}
        assert one["bounds"] == with_plan[0]["bounds"]
        assert one["left"] == (not kept) and one["under"] == (16384 if kept else 65536)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "rolled back"])
def test_a_job_is_recorded_searched_and_tuned_as_it_runs(kept: bool, told: Callable[..., list[Any]]) -> None:
    """Weights are those of a job without dpro; what is kept can be set when the next job is started."""
    with_dpro = told("tuned", plan=False, kept=kept)
    for one, other in zip(with_dpro, told("train", plans=False), strict=True):
        assert one["verdict"] == ("KEPT" if kept else "ROLLED_BACK"), one["reason"]
        assert one["weights"] == other["weights"]
        assert one["bounds"] == with_dpro[0]["bounds"] and len(set(one["bounds"])) == 2
        assert one["under"] == one["bounds"][-1]
        assert one["left"] == (not kept)
        assert one["start"] == (one["under"] if kept else 0)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "rolled back"])
def test_so_many_bytes_at_once_is_tried_and_judged_as_the_job_runs(kept: bool, told: Callable[..., list[Any]]) -> None:
    """Weights are those of a job without dpro, to the bit; the job's own bound is in force, but while recorded."""
    for one, other in zip(told("tuned", plan=False, kept=kept, flow=True), told("train", plans=False), strict=True):
        assert one["verdict"] == ("KEPT" if kept else "ROLLED_BACK"), one["reason"]
        assert one["weights"] == other["weights"]
        assert one["flowed"] == [False, True]
        assert one["left"] == (not kept) and one["under"] == sums.PARTITION_BYTES
        assert one["start"] == 0


def test_a_layer_frozen_under_a_kept_plan_costs_nothing(told: Callable[..., list[Any]]) -> None:
    """Its gradient goes no more, and then, from another array, by the same names again."""
    for one, other in zip(told("frozen", flow=True), told("frozen", flow=False), strict=True):
        assert one["weights"] == other["weights"]
        assert one["frozen"] and not any(name.startswith(f"gradient_{one['place']}.") for name in one["frozen"])
        assert all("~" in name for name in one["at the end"])
        assert sum(name.startswith(f"gradient_{one['place']}.") for name in one["at the end"]) > 1
