"""``DPRO=apply DPRO_PLAN=plan.json``: the real .pth file, scripts that know little or nothing, real workers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.testbed import Testbed
from benchmarks.testbed.byteps import start
from dpro.graph.assemble import assemble
from dpro.plan import Plan
from dpro.trace.byteps import PULL, PUSH
from dpro.trace.store import load
from tests.backends.build import PYTHON
from tests.frameworks.launch import QUICK, ROOT, clean_environment

SCRIPT = ROOT / "tests" / "frameworks" / "scripts" / "unchanged_byteps.py"
KERAS = ROOT / "tests" / "frameworks" / "scripts" / "unchanged_byteps_keras.py"
EXAMPLES = [ROOT / "examples" / "byteps_mxnet.py", ROOT / "examples" / "byteps_keras.py"]
#: 256 x 256 floats are 262,144 bytes
PARTITION_BYTES = 65536
Without = Callable[[Path, pytest.CaptureFixture[str]], str]


def job(
    folder: Path, capfd: pytest.CaptureFixture[str], script: Path = SCRIPT, own_bound: bool = True, **env: str
) -> str:
    """Output of the script on two workers; they must end well."""
    folder.mkdir()
    given = QUICK | {"DPRO_RUNS_DIR": str(folder / "runs"), "DPRO_MIN_GAIN": "0"}
    given |= {"BYTEPS_PARTITION_BYTES": str(PARTITION_BYTES)} if own_bound else {}
    given |= env
    capfd.readouterr()
    with Testbed(2, loopback=True) as bed:
        command = [str(PYTHON), str(script)]
        code = start(bed, command, clean_environment(**given), str(folder), python=str(PYTHON)).wait(100)
    out = "".join(capfd.readouterr())
    assert code == 0, out
    return out


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Without:
    """Output of a script without dpro; of one job each."""
    outputs: dict[Path, str] = {}

    def output(script: Path, capfd: pytest.CaptureFixture[str]) -> str:
        if script not in outputs:
            outputs[script] = job(tmp_path_factory.mktemp("scripts") / "without", capfd, script)
        return outputs[script]

    return output


def plan_for(folder: Path, layers: int, prefix: str = "net_") -> str:
    file = folder / "plan.json"
    Plan(partitions={f"{prefix}dense{k}_weight": 4 * PARTITION_BYTES for k in range(layers)}).save(file)
    return str(file)


def weights(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d trained to [0-9a-f]{64}", output))


def test_an_unchanged_script_with_a_plan_trains_to_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], without: Without
) -> None:
    alone = without(SCRIPT, capfd)
    found = job(tmp_path / "with", capfd, DPRO="apply", DPRO_PLAN=plan_for(tmp_path, 3))
    assert len(weights(alone)) == 2
    assert weights(found) == weights(alone)
    assert "dpro: trying given plan" in found and "stepped aside" not in found
    (run,) = (tmp_path / "with" / "runs").iterdir()
    assert json.loads((run / "outcome.json").read_text())["verdict"] in {"KEPT", "ROLLED BACK"}


@pytest.mark.parametrize("script", [SCRIPT, KERAS], ids=["mxnet", "keras"])
def test_an_unchanged_script_is_tuned_and_trains_to_the_same_bits(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], without: Without
) -> None:
    """Recorded, searched and judged as it runs: in each captured step a push and a pull of every partition."""
    alone = without(script, capfd)
    found = job(tmp_path / "with", capfd, script, DPRO="apply", DPRO_CAPTURE_STEPS="3")
    assert len(weights(alone)) == 2
    assert weights(found) == weights(alone)
    assert "stepped aside" not in found
    (run,) = (tmp_path / "with" / "runs").iterdir()
    assert json.loads((run / "outcome.json").read_text())["verdict"] in {"KEPT", "ROLLED BACK", "NO BETTER PLAN"}
    traces = load(run)
    assert [trace.meta.rank for trace in traces] == [0, 1]
    for trace in traces:
        assert sorted(tensor.nbytes for tensor in trace.tensors) == [1024] * 3 + [262144] * 3
        for name in (PUSH, PULL):
            rows = np.flatnonzero(trace.name == trace.names.index(name))
            seen = list(
                zip(trace.step[rows].tolist(), trace.tensor[rows].tolist(), trace.flow[rows].tolist(), strict=True)
            )
            assert len(set(seen)) == len(seen) == 3 * (3 * 4 + 3)
            assert sorted(set(trace.nbytes[rows].tolist())) == [1024, PARTITION_BYTES]
    assert len(assemble(traces).buckets) == 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples(example: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = job(tmp_path / "example", capfd, example, BYTEPS_PARTITION_BYTES=str(1 << 20))
    assert "dpro: profiling steps" in found and "stepped aside" not in found


def test_a_job_is_started_with_the_bound_of_its_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``partition_bytes`` of a kept plan's at_start.json, where the job has no bound of its own."""
    file = tmp_path / "at_start.json"
    Plan(fingerprint={"world_size": "2"}, partition_bytes=PARTITION_BYTES).save(file)
    env = {"DPRO": "apply", "DPRO_PLAN": str(file), "BYTEPS_LOG_LEVEL": "DEBUG"}
    found = job(tmp_path / "with", capfd, own_bound=False, **env)
    assert f"started with the plan's partitions, BYTEPS_PARTITION_BYTES={PARTITION_BYTES}" in found
    assert re.search(r"gradient_\d+ partitioned to 4 part", found)


def test_a_capture_has_what_bytepss_own_trace_has_of_its_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rounds 7 to 9 are traced, steps 7 to 9 captured: in each a push and a pull of every gradient, whole.

    Nothing is changed in that job: what is better is for one that is started anew.
    """
    env = {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "7", "BYTEPS_TRACE_END_STEP": "9"}
    # with one partition per gradient stock BytePS does not crash while it records
    env |= {"BYTEPS_PARTITION_BYTES": str(1 << 30), "DPRO": "apply", "DPRO_CAPTURE_STEPS": "3"}
    # an unchanged script is tuned from the end of its first step on
    found = job(tmp_path / "with", capfd, **env, DPRO_WARMUP_STEPS="3", DPRO_BASELINE_STEPS="3")
    (run,) = (tmp_path / "with" / "runs").iterdir()
    assert json.loads((run / "outcome.json").read_text())["verdict"] == "NO BETTER PLAN", found
    traces = load(run)
    assert [trace.meta.rank for trace in traces] == [0, 1]
    for trace in traces:
        assert trace.steps == 3
        sizes = [tensor.nbytes for tensor in trace.tensors]
        assert sorted(sizes) == [1024] * 3 + [262144] * 3
        for name in (PUSH, PULL):
            rows = np.flatnonzero(trace.name == trace.names.index(name))
            seen = sorted(zip(trace.step_at(trace.start[rows]).tolist(), trace.tensor[rows].tolist(), strict=True))
            assert seen == [(step, tensor) for step in range(3) for tensor in range(6)]
            assert trace.nbytes[rows].tolist() == [sizes[tensor] for tensor in trace.tensor[rows]]
    graph = assemble(traces)
    assert len(graph.buckets) == 6
