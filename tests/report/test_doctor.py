"""The doctor on this machine and on pretended ones. No framework may be imported by it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpro.report import doctor


def by_name() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine()}


def test_versions_are_those_installed() -> None:
    found = by_name()
    assert found["numpy"].found == importlib.metadata.version("numpy")
    assert found["python"].found.startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert found["native engine"].status == "ok"


def test_every_problem_comes_with_what_to_do() -> None:
    assert [f for f in doctor.examine() if f.status == "warn" and not f.todo] == []


def test_imports_no_framework() -> None:
    code = (
        "import sys; from dpro.report.doctor import examine; examine();"
        "sys.exit(bool({'torch', 'tensorflow', 'mxnet', 'horovod', 'lightning', 'networkx'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("value", "status"), [(None, "ok"), ("apply", "ok"), ("observe", "ok"), ("yes please", "warn"), ("0", "ok")]
)
def test_dpro_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, status: str) -> None:
    monkeypatch.delenv("DPRO", raising=False)
    if value is not None:
        monkeypatch.setenv("DPRO", value)
    assert by_name()["DPRO"].status == status


def test_a_setting_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPRO_WARMUP_STEPS", "many")
    assert "DPRO_WARMUP_STEPS" in by_name()["DPRO"].todo


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("def __init__(self, bucket_cap_mb=None, bucket_cap_mb_list=None): ...", "ok"),
        ("def __init__(self, bucket_cap_mb=None): ...", "note"),
        (None, "warn"),
    ],
)
def test_bucket_list_is_read_from_the_installed_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str | None, status: str
) -> None:
    package = tmp_path / "torch" / "nn" / "parallel"
    package.mkdir(parents=True)
    if source is not None:
        (package / "distributed.py").write_text(source)
    spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    assert [f.status for f in doctor._ddp()] == [status]


def test_one_core_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert by_name()["cores"].status == "warn"


def test_without_root_the_testbed_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert by_name()["testbed"].status == "note"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: None)
    assert "ip, tc" in by_name()["testbed"].found


def test_a_locked_down_machine_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "getloadavg", refuse)
    assert any(f.what == "machine" and "Permission denied" in f.found for f in doctor.examine())
