"""``DPRO=apply horovodrun … train.py``: the real launcher, the real .pth file, a script that knows nothing."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from dpro.outcome import Verdict
from dpro.plan import Plan
from dpro.trace.store import load
from tests.backends.build import PYTHON
from tests.frameworks.horovod_torch.conftest import HorovodRanks
from tests.frameworks.launch import QUICK, ROOT, clean_environment

SCRIPT = ROOT / "tests" / "frameworks" / "scripts" / "unchanged_horovod.py"
ELASTIC = SCRIPT.with_name("elastic_horovod.py")


def horovodrun(folder: Path, samples: int = 8, **env: str) -> str:
    """Output of the script on two ranks, with so many samples a batch; the launcher must end well."""
    folder.mkdir()
    command = [str(PYTHON.with_name("horovodrun")), "--gloo", "-np", "2", "-H", "localhost:2", str(PYTHON), str(SCRIPT)]
    command += [str(samples)]
    given = clean_environment(**(QUICK | {"DPRO_RUNS_DIR": str(folder / "runs")} | env))
    done = subprocess.run(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def weights(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d trained to [0-9a-f]{64}", output))


def test_an_unchanged_horovod_script_is_tuned_and_trains_to_the_same_bits(ranks: HorovodRanks, tmp_path: Path) -> None:
    without = horovodrun(tmp_path / "without")
    found = horovodrun(tmp_path / "with", DPRO="apply", DPRO_CAPTURE_STEPS="3", DPRO_MIN_GAIN="0")
    assert len(weights(without)) == 2
    assert weights(found) == weights(without)
    assert "dpro" not in without.replace(str(ROOT), "")
    assert "dpro: profiling steps 7 to 9 of 2 ranks" in found
    (run,) = (tmp_path / "with" / "runs").iterdir()
    verdict = json.loads((run / "outcome.json").read_text())["verdict"]
    assert verdict in {Verdict.KEPT.value, Verdict.ROLLED_BACK.value, Verdict.NO_BETTER_PLAN.value}, found


def test_an_unchanged_script_over_its_budget_is_made_to_fit(ranks: HorovodRanks, tmp_path: Path) -> None:
    """What four layers make of 2,048 samples is half a megabyte each, twice; weights and Adam's sums are a quarter."""
    without = horovodrun(tmp_path / "without", samples=2048)
    found = horovodrun(tmp_path / "with", samples=2048, DPRO="apply", DPRO_MEMORY_BYTES="4400000")
    assert weights(found) == weights(without) != []
    (run,) = (tmp_path / "with" / "runs").iterdir()
    outcome = json.loads((run / "outcome.json").read_text())
    assert outcome["verdict"] == Verdict.KEPT.value and "it fits" in outcome["reason"], found
    assert Plan.load(run / "plan.json").recompute


def test_a_job_starts_with_the_cycle_time_of_its_plan(ranks: HorovodRanks, tmp_path: Path) -> None:
    """By what the capture of that job says of its Horovod; with nothing else in the plan the job is tuned as ever."""
    plan = tmp_path / "at_start.json"
    Plan(cycle_time=4.5).save(plan)
    without = horovodrun(tmp_path / "without")
    found = horovodrun(tmp_path / "with", DPRO="apply", DPRO_CAPTURE_STEPS="3", DPRO_PLAN=str(plan))
    assert weights(found) == weights(without) != []
    assert "dpro: profiling" in found and "stepped aside" not in found
    (run,) = (tmp_path / "with" / "runs").iterdir()
    assert [trace.meta.extra["graph_info"]["cycle_ns"] for trace in load(run)] == [4_500_000, 4_500_000]


def test_an_elastic_job_is_left_alone_and_resets(ranks: HorovodRanks, tmp_path: Path) -> None:
    """A real reset: Horovod goes down on two workers and starts again with three."""
    slots, discover = tmp_path / "slots", tmp_path / "discover.sh"
    slots.write_text("localhost:2\n")
    discover.write_text(f"#!/bin/sh\ncat {slots}\n")
    discover.chmod(0o755)
    command = [str(PYTHON.with_name("horovodrun")), "--gloo", "-np", "2", "--min-np", "2", "--max-np", "3"]
    # unless it is told the interface, it waits for two hosts to find one that they share
    command += ["--network-interfaces", "lo", "--host-discovery-script", str(discover)]
    command += [str(PYTHON), str(ELASTIC), str(slots)]
    given = clean_environment(**(QUICK | {"DPRO_RUNS_DIR": str(tmp_path / "runs"), "DPRO": "apply"}))
    done = subprocess.run(
        command, cwd=tmp_path, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout
    ends = re.findall(r"trained by \[(.*)\] workers, at the end 3, sum (\S+)", done.stdout)
    assert sorted(sizes for sizes, _ in ends) == ["2, 3", "2, 3", "3"], done.stdout
    assert len({total for _, total in ends}) == 1
    assert done.stdout.count("stepped aside: the job is elastic") >= 2, done.stdout
    assert "profiling" not in done.stdout
    assert "Traceback" not in done.stdout
