"""What a user pays for having dpro installed: imports, start-up, and what ``DPRO`` switches on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOOK = ROOT / "dpro_autoload.pth"
FRAMEWORKS = ["torch", "lightning", "pytorch_lightning", "tensorflow", "keras", "mxnet", "horovod", "byteps"]
#: The rest is the inside of an adapter, imported once its framework is there.
INTEGRATIONS = sorted(
    p.stem
    for p in (ROOT / "dpro_integrations").glob("*.py")
    if p.stem.endswith("_autoload") or not p.stem.startswith(("_", "torch_", "horovod_", "keras", "mxnet"))
)


def python(
    code: str, *flags: str, dpro: str | None = None, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter, with ``DPRO`` as given and ``path`` first on sys.path."""
    env = {key: value for key, value in os.environ.items() if key not in ("DPRO", "PYTHONPATH")}
    if dpro is not None:
        env["DPRO"] = dpro
    if path is not None:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, *flags, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def import_ms(module: str) -> float:
    """CPU ms of importing ``module`` in a fresh interpreter, best of three (others load this machine)."""
    code = f"import time; began = time.process_time(); import {module}; print(1e3 * (time.process_time() - began))"
    runs = [python(code) for _ in range(3)]
    assert all(done.returncode == 0 for done in runs), runs[0].stderr
    return min(float(done.stdout) for done in runs)


@pytest.mark.parametrize("module", ["dpro", "dpro.cli", "dpro_integrations"])
def test_import_takes_less_than_300_ms(module: str) -> None:
    assert 0 < import_ms(module) < 300


def test_importing_all_of_dpro_imports_no_framework_and_no_solver() -> None:
    done = python(f"""
        import importlib, json, pkgutil, sys
        import dpro
        for found in pkgutil.walk_packages(dpro.__path__, "dpro."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
        heavy = {[*FRAMEWORKS, "cvxpy", "networkx", "scipy", "pandas"]}
        print(json.dumps([name for name in heavy if name in sys.modules]))
    """)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_an_integration_waits_for_the_user_to_import_its_framework(module: str) -> None:
    done = python(f"""
        import json, sys
        import dpro_integrations.{module}
        print(json.dumps([name for name in {FRAMEWORKS} if name in sys.modules]))
    """)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


# -- the .pth file ---------------------------------------------------------------------------------


def test_the_hook_is_installed_beside_the_packages() -> None:
    installed = Path(sysconfig.get_path("purelib")) / HOOK.name
    assert installed.read_text() == HOOK.read_text(), "install again: pip install -e ."


def test_without_dpro_set_the_hook_costs_under_1_ms() -> None:
    done = python(
        f"""
        import sys, time
        line = open({str(HOOK)!r}).read()
        before = set(sys.modules)
        begin = time.perf_counter_ns()
        exec(line)
        spent = time.perf_counter_ns() - begin
        assert set(sys.modules) == before
        print(spent)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1_000_000


def test_without_dpro_set_nothing_of_dpro_is_imported() -> None:
    done = python("import sys; print([n for n in sys.modules if n.split('.')[0] in ('dpro', 'dpro_integrations')])")
    assert done.stdout.strip() == "[]"


@pytest.fixture
def fake_autoload(tmp_path: Path) -> Path:
    """A folder for sys.path whose ``dpro_integrations.autoload`` does what FAKE says."""
    (tmp_path / "dpro_integrations").mkdir()
    (tmp_path / "dpro_integrations" / "__init__.py").touch()
    return tmp_path


def write_autoload(folder: Path, body: str) -> None:
    (folder / "dpro_integrations" / "autoload.py").write_text(body + "\n")


@pytest.mark.parametrize(
    ("value", "loaded"),
    [(None, False), ("", False), ("0", False), ("off", False), (" OFF ", False), ("observe", True), ("apply", True)],
)
def test_dpro_decides_whether_autoload_runs(fake_autoload: Path, value: str | None, loaded: bool) -> None:
    write_autoload(fake_autoload, "print('autoload')")
    done = python("print('job')", dpro=value, path=fake_autoload)
    assert done.stdout.split() == (["autoload", "job"] if loaded else ["job"])


@pytest.mark.parametrize("trouble", ["1 / 0", "import no_such_module", "raise SystemExit(3)", "def ("])
def test_python_starts_whatever_autoload_does(fake_autoload: Path, trouble: str) -> None:
    write_autoload(fake_autoload, trouble)
    done = python("print('job')", dpro="apply", path=fake_autoload)
    assert (done.returncode, done.stdout, done.stderr) == (0, "job\n", "")


def test_python_starts_without_any_autoload(fake_autoload: Path) -> None:
    done = python("print('job')", dpro="apply", path=fake_autoload)
    assert (done.returncode, done.stdout, done.stderr) == (0, "job\n", "")


def test_a_module_is_watched_for_until_it_is_imported(tmp_path: Path) -> None:
    """A job may ask first whether there is one."""
    (tmp_path / "late.py").touch()
    done = python(
        """
        import importlib.util, sys
        from dpro_integrations.autoload import _Finder
        sys.meta_path.insert(0, _Finder("late", lambda module: print("attached")))
        importlib.util.find_spec("late")
        import late
        print(any(isinstance(finder, _Finder) for finder in sys.meta_path))
        """,
        path=tmp_path,
    )
    assert done.stdout.split() == ["attached", "False"], done.stderr
