"""Makes ``.venv-backends``: every framework, Horovod and BytePS in one environment. Standard library only.

``python3.11 tests/backends/build.py``; ``make test`` calls it. What is slow to compile (Horovod for three
frameworks, about 15 minutes on two cores; BytePS for two, a few) is compiled once per machine into a cache outside
the checkout, ``$DPRO_CACHE`` or ``~/.cache/dpro``, as a wheel in a folder that is named by all versions that went in.
pip's own wheel cache is not used: its key lacks the frameworks, so it hands out a wheel built for others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    from tests.backends import byteps_build
except ImportError:  # run as a script
    import byteps_build  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-backends"
PYTHON = VENV / "bin" / "python"
CACHE = Path(os.environ.get("DPRO_CACHE") or Path.home() / ".cache" / "dpro")

NUMPY, TORCH, TENSORFLOW, MXNET = "numpy==1.23.5", "torch==2.13.0", "tensorflow-cpu==2.15.1", "mxnet==1.9.1"
HOROVOD = "horovod==0.28.1"
# The order matters: torch is pinned to its CPU wheel, and numpy is named again beside what would move it.
LAYERS = (
    (NUMPY, "setuptools<70", "wheel", "cffi", "cloudpickle", "psutil", "pyyaml", "packaging", "pybind11", "cmake<4"),
    (TORCH, NUMPY),
    (TENSORFLOW, MXNET, NUMPY),
    ("pytorch-lightning==2.6.6", "lightning", "cvxpy==1.7.5", "networkx", "transformers<5", TORCH, NUMPY),
    ("pytest>=7.4", "pytest-timeout", "hypothesis", NUMPY),
)
HOROVOD_SETTINGS = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_MXNET": "1",
    "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
}


def say(line: str) -> None:
    print(f"[backends] {line}", flush=True)


def pip(*arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    subprocess.run(command, cwd=cwd, env={**os.environ, **(environment or {})}, check=True)


@contextmanager
def only_one(name: str) -> Iterator[None]:
    """Two checkouts of one machine that build at once: the second waits, then finds the wheel."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def recipe() -> str:
    """A short hash of this file and of what names the machine: another recipe is another environment.

    What comes from ``byteps_build.py`` has a recipe of its own: it is replaced in an environment that stays.
    """
    text = Path(__file__).read_text() + platform.machine() + sys.version
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(library: str, *ingredients: str, make: Callable[[Path], Path]) -> Path:
    """The wheel of ``library`` for these versions from the cache; if it is not there, ``make(scratch)`` makes it."""
    parts = (*ingredients, f"py{sys.version_info[0]}{sys.version_info[1]}", platform.machine())
    folder = CACHE / "wheels" / re.sub(r"[^\w.-]+", "-", "_".join(parts))
    with only_one(library):
        for wheel in sorted(folder.glob(f"{library}-*.whl")):
            return wheel
        with tempfile.TemporaryDirectory(prefix=f"dpro-{library}-") as scratch:
            wheel = make(Path(scratch))
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{wheel.name}.partial"
            shutil.copyfile(wheel, partial)
            return partial.rename(folder / wheel.name)


def horovod_wheel(scratch: Path) -> Path:
    """Compile Horovod; the wheel, in ``scratch``."""
    say("compiling Horovod for torch, TensorFlow and MXNet, once on this machine (about 15 minutes)")
    source = horovod_source(scratch)
    built = scratch / "wheel"
    arguments = ("wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", str(built), ".")
    path = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
    pip(*arguments, cwd=source, environment={**HOROVOD_SETTINGS, "PATH": path})
    (wheel,) = built.glob("horovod-*.whl")
    return wheel


def horovod_source(scratch: Path) -> Path:
    """The sdist, unpacked. Headers of torch 2.1 and later are C++17; Horovod's CMake files say 14."""
    pip("download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation", "-d", str(scratch), HOROVOD)
    (archive,) = scratch.glob("horovod-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(scratch, filter="data")
    source = scratch / archive.name.removesuffix(".tar.gz")
    for listing in (source / "CMakeLists.txt", source / "horovod" / "torch" / "CMakeLists.txt"):
        text, changed = re.subn(r"(CMAKE_CXX_STANDARD)\s+1[14]\b", r"\1 17", listing.read_text())
        if not changed:
            raise SystemExit(f"[backends] {listing.name}: no C++ standard to raise, is this {HOROVOD}?")
        listing.write_text(text)
    return source


def byteps_wheel(scratch: Path) -> Path:
    """Compile BytePS; the wheel, in ``scratch``."""
    say("compiling BytePS for TensorFlow and MXNet, once on this machine (a few minutes)")
    return byteps_build.wheel(PYTHON, pip, scratch)


def install_byteps() -> None:
    """BytePS, the library it runs on and what mends it, into an environment that lacks them or has others."""
    stamp = VENV / ".byteps"
    if not (stamp.exists() and stamp.read_text() == byteps_build.recipe()):
        parts = (byteps_build.BYTEPS, TENSORFLOW, MXNET, byteps_build.ingredients())
        wheel = cached("byteps", *parts, make=byteps_wheel)
        pip("install", "--no-compile", "--no-deps", "--force-reinstall", str(wheel))
        byteps_build.install_beside(VENV)
        stamp.write_text(byteps_build.recipe())


def main() -> int:
    stamp = VENV / ".made"
    if not (stamp.exists() and stamp.read_text() == recipe() and PYTHON.exists()):
        say(f"{VENV.name}: torch, TensorFlow, MXNet, Lightning")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        for layer in LAYERS:
            pip("install", "--no-compile", *layer)
        wheel = cached("horovod", HOROVOD, TORCH, TENSORFLOW, MXNET, make=horovod_wheel)
        pip("install", "--no-compile", "--no-deps", str(wheel))
        stamp.write_text(recipe())
    install_byteps()
    # The engine's build is the checkout's own: an editable install of what lies here.
    pip("install", "--no-compile", "--no-build-isolation", "--no-deps", "-e", str(ROOT))
    pip("install", "--no-compile", "rich>=12", "typer>=0.9", NUMPY)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except subprocess.CalledProcessError as failed:
        raise SystemExit(f"[backends] failed ({failed.returncode}): {' '.join(map(str, failed.cmd))}") from None
