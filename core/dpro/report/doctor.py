"""What this machine and environment allow, each finding with what to do about it.

Imports no framework: versions come from package metadata, abilities from the text of installed
files. So it is quick, and works where a framework is broken, which is when people ask.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import site
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dpro.errors import DproError
from dpro.settings import Settings, active

#: distribution names; the first one installed of each tuple is reported
_PACKAGES = (
    ("numpy",),
    ("torch",),
    ("lightning", "pytorch-lightning"),
    ("tensorflow", "tensorflow-cpu"),
    ("mxnet",),
    ("horovod",),
    ("byteps",),
)


@dataclass(frozen=True)
class Finding:
    """``status``: ok, note (fine, but good to know) or warn (something will not work)."""

    what: str
    status: str
    found: str
    todo: str = ""


def examine() -> list[Finding]:
    """All findings, in the order a person would ask. Never raises for what is missing."""
    found: list[Finding] = []
    for section in (_python, _packages, _native, _ddp, _activation, _machine, _clocks, _testbed):
        try:
            found += section()
        except OSError as error:  # a locked-down machine is a finding, too
            found.append(Finding(section.__name__.strip("_"), "note", f"could not look ({error.strerror})"))
    return found


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} ({platform.machine()}, {platform.system()})")


def _packages() -> Iterator[Finding]:
    missing = []
    for names in _PACKAGES:
        version = next((v for v in map(_version, names) if v), None)
        if version:
            yield Finding(names[0], "ok", version)
        else:
            missing.append(names[0])
    if missing:
        yield Finding("not installed", "note", ", ".join(missing), "only needed for jobs that use them")


def _native() -> Iterator[Finding]:
    spec = importlib.util.find_spec("dpro._native")
    if spec is None or spec.origin is None:
        yield Finding("native engine", "warn", "missing", "needs a C++17 compiler: pip install --force-reinstall dpro")
        return
    try:
        importlib.import_module("dpro._native")
    except ImportError as error:
        yield Finding("native engine", "warn", str(error), "built for another Python? pip install --force-reinstall .")
        return
    yield Finding("native engine", "ok", Path(spec.origin).name)


def _ddp() -> Iterator[Finding]:
    spec = importlib.util.find_spec("torch")  # finds, does not import
    if spec is None or spec.origin is None:
        return
    source = Path(spec.origin).parent / "nn" / "parallel" / "distributed.py"
    if not source.exists():
        yield Finding("DDP buckets", "warn", "torch without nn/parallel/distributed.py", "reinstall torch")
    elif "bucket_cap_mb_list" in source.read_text(encoding="utf-8", errors="replace"):
        yield Finding("DDP buckets", "ok", "bucket_cap_mb_list: a size for each bucket")
    else:
        todo = "torch 2.13 or newer can size each bucket"
        yield Finding("DDP buckets", "note", "bucket_cap_mb only: one size for all buckets", todo)


def _activation() -> Iterator[Finding]:
    folders = {*site.getsitepackages(), site.getusersitepackages(), *(p for p in sys.path if p.endswith("-packages"))}
    hook = next((f for folder in sorted(folders) for f in Path(folder).glob("*.pth") if _activates(f)), None)
    if hook is None:
        todo = "pip install dpro into this environment, or call dpro from the script"
        yield Finding("DPRO= activation", "warn", "no .pth file installed", todo)
    else:
        yield Finding("DPRO= activation", "ok", hook.name)
    shown = " ".join(f"{key}={value}" for key, value in sorted(os.environ.items()) if _is_ours(key))
    try:
        mode = Settings.from_env().mode
    except DproError as error:
        yield Finding("DPRO", "warn", shown, str(error))
    else:
        yield Finding(
            "DPRO", "ok", f"{shown} ({mode})" if active() else f"{shown or 'not set'}: dpro stays out of jobs"
        )


def _is_ours(key: str) -> bool:
    return key == "DPRO" or (key.startswith("DPRO_") and key != "DPRO_DEBUG")


def _activates(path: Path) -> bool:
    return "dpro_integrations.autoload" in path.read_text(encoding="utf-8", errors="replace")


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = os.cpu_count() or cores
    quota = _cgroup_cores()
    text = f"{cores} of {total}" + (f", limited to {quota:g} by the cgroup" if quota and quota < cores else "")
    if min(cores, quota or cores) < 2:
        yield Finding("cores", "warn", text, "ranks on one core take turns: times measured here mislead")
    else:
        yield Finding("cores", "ok", text)
    if (load := os.getloadavg()[0]) > cores:
        yield Finding("load", "note", f"{load:.1f} on {cores} cores", "measure when the machine is quiet")


def _cgroup_cores() -> float | None:
    limit = Path("/sys/fs/cgroup/cpu.max")
    if not limit.exists():
        return None
    quota, period = limit.read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _clocks() -> Iterator[Finding]:
    info = time.get_clock_info("monotonic")
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else "unknown"
    text = f"{info.implementation}, {info.resolution * 1e9:.0f} ns, source {name}"
    # Anything but a processor counter costs a system call, about 1 µs, per event recorded.
    quick = name in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "unknown")
    yield Finding("clock", "ok" if quick else "note", text, "" if quick else "slow clock source: more overhead")


def _testbed() -> Iterator[Finding]:
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        yield Finding("testbed", "note", "loopback only", "run as root for hosts with their own link (make demo)")
    elif tools:
        yield Finding("testbed", "note", f"loopback only: no {', '.join(tools)}", "install iproute2")
    else:
        yield Finding("testbed", "ok", "network namespaces with shaped links")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
