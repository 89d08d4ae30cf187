"""The command on profiles of TensorFlow and MXNet: right figures, one line of error, files as they really are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpro import cli
from tests.cli.kineto_files import step_of_100_us
from tests.trace.engine_files import Plane, executor_step, mx_profile, mx_step, mx_symbol, real, space


def run(*words: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(cli.app, [str(word) for word in words], prog_name="dpro")
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result.stdout, result.stderr


def ask(*words: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*words, "--json")[0])
    return document


def xplane_file(path: Path, begin_us: int = 1_000) -> Path:
    path.write_bytes(space(executor_step(begin_us)))
    return path


def test_replay_of_a_tensorflow_profile(tmp_path: Path) -> None:
    answer = ask("replay", xplane_file(tmp_path / "vm.xplane.pb"))
    assert (answer["ranks"], answer["steps"]) == (1, 1)
    assert answer["measured_ms"] == answer["replayed_ms"] == 0.1
    assert [(s["name"], s["ms"]) for s in answer["critical_path"] if s["ms"]] == [
        ("dense/MatMul", 0.04),
        ("dense/BiasAdd", 0.06),  # 0.05, and 0.01 until its thread, which was free, had taken it up
    ]


def test_replay_of_an_mxnet_profile_and_the_symbol_beside_it(tmp_path: Path) -> None:
    path = mx_profile(tmp_path / "rank0.json", mx_step())
    answer = ask("replay", path)
    assert (answer["ranks"], answer["steps"]) == (1, 1)
    assert answer["measured_ms"] == answer["replayed_ms"] == 0.1
    (tmp_path / "net-symbol.json").write_text(mx_symbol(("null", "w", []), ("FullyConnected", "fc", [0])))
    answer = ask("replay", tmp_path)
    assert [(s["name"], s["ms"]) for s in answer["critical_path"] if s["ms"]] == [
        ("fc", 0.04),
        ("fc_backward", 0.04),  # 0.03, and 0.01 until its thread had taken it up
        ("sgd_update", 0.02),
    ]


@pytest.mark.parametrize("kind", ["tensorflow", "mxnet"])
def test_a_file_for_each_rank(tmp_path: Path, kind: str) -> None:
    for rank in range(2):
        if kind == "tensorflow":
            xplane_file(tmp_path / f"rank{rank}.xplane.pb")
        else:
            mx_profile(tmp_path / f"rank{rank}.json", mx_step())
    answer = ask("replay", tmp_path)
    assert (answer["ranks"], answer["steps"], answer["measured_ms"]) == (2, 1, 0.1)
    for command, more in (("whatif", ["--scale", ".=2"]), ("align", []), ("optimize", [])):
        assert isinstance(ask(command, tmp_path, *more), dict)


def test_files_of_several_tools_in_one_folder(tmp_path: Path) -> None:
    xplane_file(tmp_path / "rank0.xplane.pb")
    mx_profile(tmp_path / "rank1.json", mx_step())
    step_of_100_us(tmp_path / "rank2.json", rank=2)
    (tmp_path / "saved_model.pb").write_bytes(b"a model")
    answer = ask("replay", tmp_path)
    assert answer["ranks"] == 3
    assert any("1 file(s) that are no traces skipped" in line for line in answer["warnings"])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.xplane.pb", b"", "empty file"),
        ("words.xplane.pb", b"no protobuf", "not a TensorFlow profile; 1 corrupt message(s) read in part"),
        ("photo.pb", bytes(range(255, -1, -1)), "not a TensorFlow profile"),
        ("idle.xplane.pb", space(Plane().add("python", "fit", 1, 2)), "no op of TensorFlow's executor in it"),
        ("idle.json", b'[{"ph": "M", "name": "process_name", "args": {"name": "cpu/0"}}]', "no op of MXNet's engine"),
    ],
)
def test_useless_files_are_one_line_and_exit_code_2(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for command, more in (("replay", []), ("export", ["--perfetto", tmp_path / "out.json"])):
        out, err = run(command, path, *more, code=2)
        assert not out and err.startswith(f"{path}: {reason}") and err.count("\n") == 1


def test_a_cut_profile_warns_and_is_replayed(tmp_path: Path) -> None:
    blob = space(executor_step(), executor_step(2_000, step=1))
    path = tmp_path / "rank0.xplane.pb"
    path.write_bytes(blob[: len(blob) * 3 // 4])
    answer = ask("replay", path)
    assert answer["steps"] == 1 and answer["replayed_ms"] == 0.1
    assert any(f"file ends early, at byte {len(blob) * 3 // 4}" in line for line in answer["warnings"])


@pytest.mark.parametrize(
    ("framework", "job", "file"),
    [("tensorflow", "tensorflow_job.py", "job.xplane.pb"), ("mxnet", "mxnet_job.py", "rank0.json")],
)
def test_files_as_the_frameworks_write_them(tmp_path: Path, framework: str, job: str, file: str) -> None:
    shutil.copy(real(framework, job) / file, tmp_path / file)
    answer = ask("replay", tmp_path)
    assert (answer["ranks"], answer["steps"]) == (1, 2)
    assert answer["ops"] > 20 and 0 < answer["replayed_ms"] <= 2 * answer["measured_ms"]
    run("report", tmp_path, "-o", tmp_path / "page.html")
    run("export", tmp_path, "--perfetto", tmp_path / "out.json.gz")
