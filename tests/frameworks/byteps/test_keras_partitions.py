"""Partitions of gradients, recorded and changed in a running Keras job of BytePS: real workers, a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Testbed
from tests.frameworks.byteps import sums
from tests.frameworks.byteps.launch import begin

JOBS = "tests.frameworks.byteps.keras_partition_jobs"


def run(function: str, folder: Path, **arguments: Any) -> list[Any]:
    """What each rank returned."""
    folder.mkdir(parents=True, exist_ok=True)
    with Testbed(2, loopback=True) as bed:
        code = begin(bed, "keras_rank", folder, f"{JOBS}:{function}", json.dumps(arguments)).wait(100)
    assert code == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_sums_are_right_before_under_and_after_plans(tmp_path: Path) -> None:
    """Every element on every rank in every round; plans that don't fit change nothing."""
    for one in run("sums_under_plans", tmp_path, rounds=4):
        assert one["wrong"] == []
        assert one["checks"] == 4 * 7 * len(sums.ELEMENTS)
        seen = dict(one["seen"])
        assert seen["after"] == seen["before"]
        assert seen["small"][2] == 16384 and seen["large"][2] == 131072
        assert len(one["foreign"]) == 5 and "accepted" not in one["foreign"]
        assert one["error"] == ""


@pytest.mark.parametrize("fp16", [False, True], ids=["kept", "fp16, rolled back"])
def test_fit_is_recorded_searched_and_tuned_as_it_runs(fp16: bool, tmp_path: Path) -> None:
    """Weights are those of a job without dpro, on both ranks; what is kept can be set when the next job starts."""
    told = run("tuned", tmp_path / "with", kept=not fp16, dpro=True, runs=str(tmp_path / "runs"), fp16=fp16)
    alone = run("tuned", tmp_path / "without", kept=True, dpro=False, runs=str(tmp_path / "runs"), fp16=fp16)
    assert alone[0]["weights"] == alone[1]["weights"]
    for one, other in zip(told, alone, strict=True):
        assert one["verdict"] == ("ROLLED_BACK" if fp16 else "KEPT"), one["reason"]
        assert one["weights"] == other["weights"]
        assert one["shutdown"]
        assert bool(one["start"]) == (not fp16)
