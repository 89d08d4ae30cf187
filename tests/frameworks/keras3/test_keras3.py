"""Keras 3 in one process, in an environment of its own: op fusion, and nothing else."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpro.trace.regions import REGIONS, load
from dpro.trace.store import load as load_run
from tests.frameworks.launch import QUICK, ROOT, clean_environment

PYTHON = ROOT / ".venv-keras3" / "bin" / "python"
JOB = Path(__file__).with_name("job.py")


@pytest.fixture(autouse=True, scope="session")
def _needs_keras3() -> None:
    if not PYTHON.exists():
        pytest.skip("no .venv-keras3 here: `make test` makes it")


def run(kind: str, folder: Path, **given: Any) -> tuple[dict[str, Any], list[str]]:
    """What the job told, and dpro's lines."""
    env = clean_environment(**QUICK, DPRO_RUNS_DIR=str(folder / "runs"))
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'core'}"
    command = [str(PYTHON), str(JOB), kind, json.dumps(given)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("dpro")]
    return json.loads(done.stdout.splitlines()[-1]), lines


@cache
def without(kind: str, folder: Path) -> dict[str, Any]:
    return run(kind, folder)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plain")
    return lambda kind="fit": without(kind, folder)


@pytest.mark.parametrize("kept", [True, False])
def test_a_plan_is_put_in_force_and_taken_back(kept: bool, tmp_path: Path, plain: Any) -> None:
    """Two layers, of which one has the name that TensorFlow gives to the other's scope."""
    found, lines = run("fit", tmp_path, layers=["norm_1", "act_norm"], regions_s=1.0, kept=kept)
    assert int(found["keras"].partition(".")[0]) >= 3
    assert found["verdict"] == ("KEPT" if kept else "ROLLED_BACK"), lines
    assert (found["compiled"] > 0) == kept
    assert found["left"] == (["act_norm", "norm_1"] if kept else [])
    for mine, other in zip(found["weights"], plain()["weights"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fit", "loop"])
def test_a_job_is_captured_and_its_layers_are_timed(kind: str, tmp_path: Path, plain: Any) -> None:
    """Every norm's ops carry its own name; weights are those of a job without dpro where nothing is compiled."""
    found, lines = run(kind, tmp_path, regions_s=5.0, kept=False, mode="suggest")
    assert found["verdict"] in {"SUGGESTED", "NO_BETTER_PLAN"}, lines
    assert found["weights"] == plain(kind)["weights"]
    assert found["left"] == []
    (folder,) = (tmp_path / "runs").iterdir()
    (trace,) = load_run(folder)
    assert not trace.warnings
    timed = load(trace.meta.extra[REGIONS])
    assert {layer for region in timed for layer in region.layers} >= {"norm", "norm_1"}
    for layer in ("norm", "norm_1"):
        ops = {name.rpartition("/")[2] for name in trace.names if name.startswith(f"functional/{layer}/")}
        assert "Rsqrt" in ops or "FusedBatchNormV3" in ops, sorted(trace.names)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("fit", {"mode": "apply"}, "one process only: there is nothing to synchronise"),
        ("jit", {"regions_s": 5.0}, "stepped aside: the whole step is one XLA program"),
    ],
)
def test_what_is_not_tuned_is_said_in_one_line(kind: str, given: dict[str, Any], says: str, tmp_path: Path) -> None:
    found, lines = run(kind, tmp_path, **given)
    assert len(lines) == 1 and says in lines[0]
    assert found["verdict"] == "" and found["left"] == []


def test_blocks_are_not_recomputed(tmp_path: Path, plain: Any) -> None:
    found, lines = run("fit", tmp_path, blocks=["norm"], memory_bytes=1 << 30)
    assert found["verdict"] == "STEPPED_ASIDE" and found["left"] == []
    assert sum("blocks are recomputed in Keras 2 only" in line for line in lines) == 1, lines
    assert found["weights"] == plain()["weights"]
