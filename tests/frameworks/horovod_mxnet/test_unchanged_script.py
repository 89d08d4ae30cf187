"""``DPRO=apply horovodrun … train.py``: the real launcher, the real .pth file, scripts that know little or nothing."""

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

SCRIPT = ROOT / "tests" / "frameworks" / "scripts" / "unchanged_gluon.py"
EXAMPLE = ROOT / "examples" / "horovod_mxnet.py"
REAL = {Verdict.KEPT.value, Verdict.ROLLED_BACK.value, Verdict.NO_BETTER_PLAN.value}


def horovodrun(folder: Path, script: Path = SCRIPT, **env: str) -> str:
    """Output of the script on two ranks; the launcher must end well."""
    folder.mkdir()
    command = [str(PYTHON.with_name("horovodrun")), "--gloo", "-np", "2", "-H", "localhost:2", str(PYTHON), str(script)]
    given = clean_environment(**(QUICK | {"DPRO_RUNS_DIR": str(folder / "runs")} | env))
    done = subprocess.run(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def weights(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d trained to [0-9a-f]{64}", output))


def test_an_unchanged_gluon_script_is_tuned_and_trains_to_the_same_bits(ranks: HorovodRanks, tmp_path: Path) -> None:
    plan = tmp_path / "at_start.json"
    Plan(cycle_time=4.5).save(plan)
    without = horovodrun(tmp_path / "without")
    given = {"DPRO": "apply", "DPRO_CAPTURE_STEPS": "3", "DPRO_MIN_GAIN": "0", "DPRO_PLAN": str(plan)}
    found = horovodrun(tmp_path / "with", **given)
    assert len(weights(without)) == 2
    assert weights(found) == weights(without)
    assert "dpro" not in without.replace(str(ROOT), "")
    assert "dpro: profiling steps 7 to 9 of 2 ranks" in found and "stepped aside" not in found
    (run,) = (tmp_path / "with" / "runs").iterdir()
    verdict = json.loads((run / "outcome.json").read_text())["verdict"]
    assert verdict in REAL, found
    # a plan's cycle time was set before Horovod read it
    assert [trace.meta.extra["graph_info"]["cycle_ns"] for trace in load(run)] == [4_500_000, 4_500_000]


def test_the_example(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = horovodrun(tmp_path / "example", EXAMPLE, DPRO_CAPTURE_STEPS="3")
    (run,) = (tmp_path / "example" / "runs").iterdir()
    assert json.loads((run / "outcome.json").read_text())["verdict"] in REAL, found
