"""BytePS 0.2.5 for MXNet and TensorFlow where there is no GPU: a wheel, and the library it runs on.

Standard library only, and nothing of ``build.py``, which calls it.
The sources are those of PyPI's sdist, unchanged, with the ps-lite and the ZeroMQ that are in it. What they lack is put
around them: a compiler that includes what GCC's own headers no longer do, CUDA's and NCCL's headers from PyPI (nothing
of these is installed), and from ``byteps/include`` a header that TensorFlow dropped and one for libnuma.
The libraries are linked against ``libhostcuda.so`` (``byteps/hostcuda.c``), which stands in for CUDA, NCCL and libnuma
when a job runs. ``build.py`` keeps the wheel in its cache; the stand-in is compiled anew, in a second, where it lies.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent / "byteps"
BYTEPS = "byteps==0.2.5.post15"
#: The runtime's headers include some of the two after it. NCCL: 300 MB for one header, all that is unpacked.
HEADERS = (
    "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88", "nvidia-cuda-cccl==13.0.85", "nvidia-nccl-cu13==2.32.3",
)  # fmt: skip
ZEROMQ = "zeromq-4.1.4.tar.gz"
LIBRARY = "libhostcuda.so"
#: By which names BytePS links against it; what is recorded in the plugins is its own.
LINKED_AS = ("libcudart.so", "libnccl.so", "libnuma.so")
#: setup.py asks for the machine's own instructions; the cache may outlive the machine, so the last word is another one.
#: Less than v3 will not do: the sources know half precision only where the processor does.
COMPILER = """#!/bin/sh
exec g++ -include memory -include string -include functional "$@" -march=x86-64-v3 -g0 -w
"""
SETTINGS = {
    "BYTEPS_NCCL_LINK": "SHARED",
    "BYTEPS_WITHOUT_PYTORCH": "1",  # its plugin uses a C API that torch no longer has
}
#: Two runs, because a plugin for TensorFlow sets HAVE_CUDA, which then is refused for an MXNet without CUDA.
PLUGINS = {
    "tensorflow": {"BYTEPS_WITH_TENSORFLOW": "1", "BYTEPS_WITHOUT_MXNET": "1"},
    "mxnet": {"BYTEPS_WITH_MXNET": "1", "BYTEPS_WITHOUT_TENSORFLOW": "1"},
}
Pip = Callable[..., None]


def ingredients() -> str:
    """A short hash of what goes into the wheel, besides the versions of the frameworks."""
    parts = [BYTEPS, *HEADERS, COMPILER, repr(SETTINGS), repr(PLUGINS)]
    parts += [path.read_text() for path in sorted(HERE.glob("include/**/*.h"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def recipe() -> str:
    """A short hash of all that an environment gets from here."""
    parts = [ingredients(), *(path.read_text() for path in sorted(HERE.iterdir()) if path.is_file())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def wheel(python: Path, pip: Pip, scratch: Path) -> Path:
    """Compile a wheel for the frameworks that ``python`` has; its path, in ``scratch``."""
    pip("download", "--no-deps", "--no-cache-dir", "-d", str(scratch), *HEADERS)
    pip("download", "--no-deps", "--no-binary", "byteps", "--no-build-isolation", "-d", str(scratch), BYTEPS)
    (archive,) = scratch.glob("byteps-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(scratch, filter="data")
    source = scratch / archive.name.removesuffix(".tar.gz")
    gpu = no_gpu(scratch)
    compiler = scratch / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    jobs = os.cpu_count() or 1
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")},
        **SETTINGS,
        "CXX": str(compiler), "BYTEPS_CUDA_HOME": str(gpu), "BYTEPS_NCCL_HOME": str(gpu),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    ps = ("make", f"-j{jobs}", "ps", f"CXX={compiler}", "WGET=cp", f"ZMQ_URL={source / ZEROMQ} .")
    run(ps, source / "3rdparty" / "ps-lite", environment, scratch / "ps-lite.log")

    def plugin(name: str) -> Path:
        """Build one plugin in a tree of its own; the tree."""
        tree = scratch / name
        shutil.copytree(source, tree)
        command = [str(python), "setup.py", "build", "--build-lib", "lib"]
        if name != "mxnet":  # the server is built with MXNet's: here a file in its place looks up to date
            stale = tree / "lib" / "byteps" / "server"
            stale.mkdir(parents=True)
            (stale / f"c_lib{suffix(python)}").touch()
        mine = {**environment, **PLUGINS[name], "CPATH": str(tree)}
        run(command, tree, mine, scratch / f"{name}.log")
        return tree

    with ThreadPoolExecutor(len(PLUGINS)) as pool:
        trees = dict(zip(PLUGINS, pool.map(plugin, PLUGINS), strict=True))
    tree = trees["mxnet"]
    for library in (trees["tensorflow"] / "lib" / "byteps" / "tensorflow").glob("c_lib*"):
        shutil.copy(library, tree / "lib" / "byteps" / "tensorflow")
    pack = [str(python), "setup.py", "build", "--build-lib", "lib", "bdist_wheel", "--skip-build"]
    run(pack, tree, {**environment, **PLUGINS["mxnet"], "CPATH": str(tree)}, scratch / "wheel.log")
    (made,) = (tree / "dist").glob("byteps-*.whl")
    check(made)
    return made


def check(made: Path) -> None:
    """Three libraries are in the wheel, none of them empty."""
    with zipfile.ZipFile(made) as packed:
        sizes = {info.filename: info.file_size for info in packed.infolist() if "/c_lib" in info.filename}
    rooms = {name.split("/")[1] for name, size in sizes.items() if size > 100_000}
    if rooms != {"server", "mxnet", "tensorflow"}:
        raise SystemExit(f"[backends] {made.name}: libraries for {sorted(rooms)} only")


def suffix(python: Path) -> str:
    """How an extension module of ``python`` ends."""
    ask = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    return subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def no_gpu(scratch: Path) -> Path:
    """A folder laid out like an installed CUDA: headers from the wheels in ``scratch``, ours, and the stand-in."""
    home = scratch / "gpu"
    for folder in ("include", "lib", "lib64/stubs"):
        (home / folder).mkdir(parents=True)
    for archive in scratch.glob("nvidia_*.whl"):
        with zipfile.ZipFile(archive) as packed:
            for name in packed.namelist():
                _, found, header = name.partition("/include/")
                if found and header and not name.endswith("/"):
                    target = home / "include" / header
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(packed.read(name))
    shutil.copytree(HERE / "include", home / "include", dirs_exist_ok=True)
    stand_in(home / "lib" / LIBRARY)
    for name in LINKED_AS:
        (home / "lib" / name).symlink_to(LIBRARY)
    return home


def install_beside(venv: Path) -> None:
    """Into an environment that has the wheel: the stand-in, and what mends BytePS for its frameworks."""
    stand_in(venv / "lib" / LIBRARY)
    (site,) = venv.glob("lib/python3*/site-packages")
    shutil.copy(HERE / "compat.py", site / "byteps_compat.py")
    (site / "byteps_compat.pth").write_text("import byteps_compat\n")


def stand_in(target: Path) -> None:
    """Compile ``hostcuda.c``. Processes that have the library of before mapped keep it."""
    partial = target.with_suffix(".partial")
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(partial)]
    subprocess.run([*command, str(HERE / "hostcuda.c"), "-lpthread", "-ldl"], check=True)
    partial.replace(target)


def run(command: Sequence[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    """Run a step of the build; its output is shown only where it fails.

    Raises:
        SystemExit: it failed.
    """
    with log.open("w") as out:
        code = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=out, check=False).returncode
    if code:
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:]))
        raise SystemExit(f"[backends] BytePS: {log.stem} failed ({code}): {' '.join(command)}")
