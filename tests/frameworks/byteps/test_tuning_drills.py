"""BytePS jobs that are not the ordinary loop, or that lose a process, while dpro tunes them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Testbed
from tests.frameworks.byteps.launch import alive, begin
from tests.frameworks.byteps.test_drills import pids

_MODULES = {"mxnet": "rank", "keras": "keras_rank"}
#: Whatever is not named here is tuned to its verdict.
_STEPPED_ASIDE = {"short": "training ended after 5 steps", "own profiler": "the job's own profiler is running"}
DRILLS = {
    "mxnet": ["short", "accumulated", "evaluated", "own profiler"],
    "keras": ["short", "own step", "bfloat16", "float16", "evaluated", "loop", "own profiler"],
}


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """By framework, what all drills told on each rank; of one job."""

    @cache
    def told(framework: str) -> list[Any]:
        folder = tmp_path_factory.mktemp("drills")
        target = f"tests.frameworks.byteps.{framework}_drills:all_drills"
        arguments = json.dumps({"runs": str(folder / "runs")})
        with Testbed(2, loopback=True) as bed:
            code = begin(bed, _MODULES[framework], folder, target, arguments).wait(110)
        assert code == 0
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]

    return told


@pytest.mark.parametrize(("framework", "drill"), [(name, drill) for name, all_ in DRILLS.items() for drill in all_])
def test_it_trains_to_the_same_bits(framework: str, drill: str, drilled: Callable[[str], list[Any]]) -> None:
    """On both ranks, with dpro and without; where dpro can't tune, it says why."""
    told = [rank[drill] for rank in drilled(framework)]
    assert set(drilled(framework)[0]) == set(DRILLS[framework])
    for without, tuned in told:
        assert tuned["weights"] == without["weights"] == told[0][0]["weights"]
        assert not tuned.get("left")
        if drill in _STEPPED_ASIDE:
            assert tuned["verdict"] == "STEPPED_ASIDE" and _STEPPED_ASIDE[drill] in tuned["reason"]
        else:
            assert tuned["verdict"] == "KEPT", tuned["reason"]


@pytest.mark.parametrize("state", ["CAPTURE", "APPLY", "VERIFY"])
def test_a_worker_killed_while_it_is_tuned_ends_the_job(state: str, tmp_path: Path) -> None:
    target = "tests.frameworks.byteps.mxnet_drills:dying"
    arguments = json.dumps({"state": state, "runs": str(tmp_path / "runs")})
    with Testbed(2, loopback=True) as bed:
        job = begin(bed, "rank", tmp_path, target, arguments)
        assert job.wait(60) == 128 + signal.SIGKILL
        assert json.loads((tmp_path / "died").read_text()) == state
        assert not [pid for pid in pids(job) if alive(pid)]


def test_who_waits_for_a_killed_worker_says_so_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Into its next sum, for which BytePS itself waits for good: nobody ends that job here but the test."""
    target = "tests.frameworks.byteps.mxnet_drills:dying"
    arguments = json.dumps({"state": "APPLY", "runs": str(tmp_path / "runs")})
    said = ""
    with Testbed(2, loopback=True) as bed:
        job = begin(bed, "rank", tmp_path, target, arguments)
        deadline = time.monotonic() + 60
        while "stepped aside" not in said:
            assert time.monotonic() < deadline, said
            assert alive(job.processes[0].pid), said
            time.sleep(0.1)
            said += "".join(capfd.readouterr())
        job.stop()
    assert [line for line in said.splitlines() if "stepped aside: rank 1" in line], said


def test_a_server_killed_while_it_is_captured_ends_the_job(tmp_path: Path) -> None:
    target = "tests.frameworks.byteps.mxnet_drills:endless"
    with Testbed(2, loopback=True) as bed:
        job = begin(bed, "rank", tmp_path, target, json.dumps({"runs": str(tmp_path / "runs")}))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("captured-*"))) < 2:
            assert time.monotonic() < deadline and job.poll() is None, "the job does not get going"
            time.sleep(0.02)
        os.kill(job.roles["server0"].processes[0].pid, signal.SIGKILL)
        assert job.wait(30) == 128 + signal.SIGKILL
        assert not [pid for pid in pids(job) if alive(pid)]
