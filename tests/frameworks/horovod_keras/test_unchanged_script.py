"""``DPRO=apply horovodrun … train.py``: the real launcher, the real .pth file, a script that knows nothing."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from dpro.outcome import Verdict
from tests.backends.build import PYTHON
from tests.frameworks.horovod_torch.conftest import HorovodRanks
from tests.frameworks.launch import QUICK, ROOT, clean_environment

SCRIPT = ROOT / "tests" / "frameworks" / "scripts" / "unchanged_keras.py"
EXAMPLE = ROOT / "examples" / "horovod_keras.py"


def horovodrun(script: Path, folder: Path, **env: str) -> str:
    """Output of the script on two ranks; the launcher must end well."""
    folder.mkdir()
    command = [str(PYTHON.with_name("horovodrun")), "--gloo", "-np", "2", "-H", "localhost:2", str(PYTHON), str(script)]
    quick = QUICK | {"DPRO_RUNS_DIR": str(folder / "runs"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(**(quick | env)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def verdict(folder: Path) -> str:
    (run,) = (folder / "runs").iterdir()
    return str(json.loads((run / "outcome.json").read_text())["verdict"])


def weights(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d trained to [0-9a-f]{64}", output))


MEASURED = {Verdict.KEPT.value, Verdict.ROLLED_BACK.value, Verdict.NO_BETTER_PLAN.value}


def test_an_unchanged_keras_script_is_tuned_and_trains_to_the_same_bits(ranks: HorovodRanks, tmp_path: Path) -> None:
    without = horovodrun(SCRIPT, tmp_path / "without")
    found = horovodrun(SCRIPT, tmp_path / "with", DPRO="apply", DPRO_CAPTURE_STEPS="3", DPRO_MIN_GAIN="0")
    assert len(weights(without)) == 2
    assert weights(found) == weights(without)
    assert "dpro" not in without.replace(str(ROOT), "")
    assert "dpro: profiling steps 10 to 12 of 2 ranks" in found
    assert verdict(tmp_path / "with") in MEASURED, found


def test_the_example_runs(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = horovodrun(EXAMPLE, tmp_path / "example")
    assert "stepped aside" not in found
    assert verdict(tmp_path / "example") in MEASURED, found
