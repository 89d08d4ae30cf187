"""Cells of the matrices: which there are, and the process set that measures those that differ in nothing but the link.

The driver's side of :mod:`benchmarks.matrix_job`: starts the ranks on a testbed, gives orders, collects answers.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import comms
from benchmarks.testbed import Testbed, byteps, horovod
from benchmarks.testbed.job import Job
from benchmarks.testbed.network import UNSHAPED
from dpro.verdict import slowest_rank

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("resnet50", "vgg16", "inceptionv3", "bert-base")
COMMS = tuple(name for name, comm in comms.COMMS.items() if not comm.shared)
#: Name in the matrices to rate on the testbed. "loopback" has hosts and clocks as the others, and a link that nothing
#: holds back.
LINKS = {"1gbit": "1gbit", "200mbit": "200mbit", "loopback": UNSHAPED}
#: How far the hosts' clocks are from the machine's, ns, in turn.
CLOCKS_NS = (5_000_000, -5_000_000)
#: The frameworks' own chatter is not what the figures are about.
QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
#: A rank has one core. (TensorFlow is told by its loop, torch too.)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": "1"}
#: Keep freed memory: a ResNet50 here gives back and takes again 8,000 pages a step, 0 to 16 ms of it, as chance will.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
#: Every grouping has names of its own: with all arms of a sweep they overflow the usual cache of responses.
#: And a job that is paused for minutes while another runs must not count that as a peer that is gone (30 s).
_HOROVOD = {"HOROVOD_CACHE_CAPACITY": "16384", "HOROVOD_GLOO_TIMEOUT_SECONDS": "900"}
_POLL_S = 0.02


@dataclass(frozen=True)
class Jobs:
    """One process set: its cells differ in the link alone."""

    model: str
    comm: str
    hosts: int

    def __post_init__(self) -> None:
        if self.emulated and not comms.COMMS[self.comm].emulates:
            raise ValueError(f"{self.comm}: no emulated compute, so two hosts at most")

    @property
    def emulated(self) -> bool:
        """More hosts than a two-core machine can compute for."""
        return self.hosts > 2

    def describe(self) -> str:
        """For progress lines."""
        return f"{self.model}, {self.comm}, {self.hosts} hosts" + (", emulated compute" if self.emulated else "")


class JobSet:
    """The ranks of ``jobs`` on a testbed of their own, ready for orders; a context manager.

    Args:
        jobs: what runs.
        env: on top of the ranks' environment.
        timeout_s: an order that takes longer fails.

    Raises:
        RuntimeError: a rank ended, or an order was not answered in time.
    """

    def __init__(self, jobs: Jobs, env: dict[str, str] | None = None, timeout_s: float = 300.0) -> None:
        self.jobs, self._timeout_s = jobs, timeout_s
        offsets = [CLOCKS_NS[host % len(CLOCKS_NS)] for host in range(jobs.hosts)]
        self.bed = Testbed(jobs.hosts, UNSHAPED, pin=True, clock_offsets_ns=offsets)
        self._env = {**QUIET, **_ONE_THREAD, **KEEP_MEMORY, **(env or {})}
        self._orders = 0

    def __enter__(self) -> JobSet:
        self._scratch = tempfile.TemporaryDirectory(prefix="dpro-cells-")
        self.folder = Path(self._scratch.name)
        try:
            self.bed.__enter__()
            self._job = self._start(comms.COMMS[self.jobs.comm].launcher)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc and exc[0] is None:
                self._give({"do": "end"})
                self._job.wait(30)
        finally:
            self.bed.__exit__(*exc)
            self._scratch.cleanup()

    def _start(self, launcher: str) -> Job | byteps.BytePSJob:
        arguments = ["-m", "benchmarks.matrix_job", "--folder", str(self.folder), "--model", self.jobs.model]
        arguments += ["--comm", self.jobs.comm] + ["--emulated"] * self.jobs.emulated
        if launcher == "torchrun":
            return self.bed.start([sys.executable, *arguments], self._env, str(ROOT))
        if launcher == "byteps":
            python = byteps.find_python()
            return byteps.start(self.bed, [python, *arguments], self._env, str(ROOT), python=python)
        python = horovod.find_python()
        return horovod.start(self.bed, [python, *arguments], {**_HOROVOD, **self._env}, str(ROOT), python=python)

    @property
    def mode(self) -> str:
        """``namespaces`` or ``loopback``, as the testbed says."""
        return self.bed.mode

    def ask(self, do: str, **order: Any) -> list[dict[str, Any]]:
        """Give an order to all ranks; their answers, by rank."""
        number = self._give({"do": do, **order})
        files = [self.folder / f"answer-{number}-{rank}.json" for rank in range(self.jobs.hosts)]
        deadline = time.monotonic() + self._timeout_s
        while not all(file.exists() for file in files):
            code = self._job.poll()
            if code is not None:
                raise RuntimeError(f"{self.jobs.describe()}: the job ended with exit code {code}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.jobs.describe()}: {do} not done after {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        return [json.loads(file.read_text()) for file in files]

    def pause(self) -> None:
        """Stop all ranks, so that another job has the machine: Horovod's ranks talk even when they wait."""
        self._job.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all ranks go on."""
        self._job.send_signal(signal.SIGCONT)

    def _give(self, order: dict[str, Any]) -> int:
        number, self._orders = self._orders, self._orders + 1
        fresh = self.folder / "order.new"
        fresh.write_text(json.dumps(order))
        fresh.replace(self.folder / f"order-{number}.json")
        return number


def slowest_ms(per_rank_ns: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Per step the slowest rank's time, ms; ``per_rank_ns`` is [ranks][steps]."""
    return slowest_rank(per_rank_ns) / 1e6


def place() -> dict[str, Any]:
    """Date, machine and commit of a run."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {_cpu()}, Linux {platform.release()}",
        "commit": commit.stdout.strip() + (" and changes" if changed.stdout.strip() else ""),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def say(line: str) -> None:
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)
