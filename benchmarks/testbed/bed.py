"""A testbed: hosts, links and the environment a distributed job expects on them.

Where namespaces cannot be made the same jobs run over loopback: ``mode`` says which, and figures must be shown with it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.testbed.job import Job
from benchmarks.testbed.network import UNSHAPED, Network, TestbedError, available, clean_stale, parse_rate

_FIRST_PORT = 29500
_CLOCK = str(Path(__file__).with_name("clock.py"))


class Testbed:
    """``hosts`` hosts with links of ``rate``; a context manager.

    Args:
        hosts: number of hosts; a job runs one process (rank) on each.
        rate: of each host's egress, as ``1gbit`` or ``200mbit``; ``none``: nothing holds it back.
        pin: give every host one core of its own (taken in turn when there are fewer cores).
        loopback: True: do not even try namespaces.
        clock_offsets_ns: per host, what its monotonic clock is ahead of the machine's, ns. Such a host has a name
            of its own as well (``host0``, …); without, all hosts share clock and name. Needs namespaces.

    Raises:
        ValueError: a bad rate, or not one offset per host.
    """

    __test__ = False  # not a test class, whatever pytest makes of its name

    def __init__(
        self,
        hosts: int = 2,
        rate: str = "1gbit",
        pin: bool = False,
        loopback: bool = False,
        clock_offsets_ns: Sequence[int] | None = None,
    ) -> None:
        if rate != UNSHAPED:
            parse_rate(rate)
        if clock_offsets_ns is not None and len(clock_offsets_ns) != hosts:
            raise ValueError(f"{len(clock_offsets_ns)} clock offsets for {hosts} hosts")
        self.hosts, self.rate, self.pin = hosts, rate, pin
        self.clock_offsets_ns = None if clock_offsets_ns is None else list(clock_offsets_ns)
        self._loopback = loopback
        self._network: Network | None = None
        self._jobs: list[Job] = []
        self._ports = itertools.count(_FIRST_PORT)

    @property
    def mode(self) -> str:
        """``namespaces`` or ``loopback``."""
        return "namespaces" if self._network else "loopback"

    def describe(self) -> str:
        """One line for the reader of a figure."""
        rate = "unshaped" if self.rate == UNSHAPED else self.rate
        link = f"{self.hosts} network namespaces, {rate} links" if self._network else "loopback (no shaped link)"
        clocks = ", each with its own clock" if self._network and self.clock_offsets_ns else ""
        return link + clocks + (", each pinned to one core" if self.pin else "")

    def __enter__(self) -> Testbed:
        possible, reason = (False, "asked for") if self._loopback else available()
        if not possible:
            if not self._loopback:
                print(f"testbed: no network namespaces ({reason}): running on loopback", file=sys.stderr)
            return self
        clean_stale()
        self._network = Network(self.hosts, self.rate).__enter__()
        try:
            self._check_clocks()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for job in self._jobs:
                job.stop()
        finally:
            if self._network:
                self._network.close()
                self._network = None

    def set_rate(self, rate: str) -> None:
        """Change the rate of all links, while jobs run on them; on loopback it changes nothing."""
        if rate != UNSHAPED:
            parse_rate(rate)
        if self._network:
            self._network.set_rate(rate)
        self.rate = rate

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        quiet: bool = False,
        each: Callable[[int], Mapping[str, str]] | None = None,
        hosts: Sequence[int] | None = None,
    ) -> Job:
        """Start ``command`` once per host, with ``env``, then ``each(host)``, on top of this process's environment.

        ``hosts``: only on these (something beside the job: a server).
        """
        port = next(self._ports) if self._network else _free_port()
        argvs, envs = [], []
        for host in range(self.hosts) if hosts is None else hosts:
            argvs.append([*self._prefix(host), *command])
            own = each(host) if each else {}
            envs.append({**os.environ, **self.environment(host, port), **(env or {}), **own})
        job = Job(argvs, envs, cwd, quiet)
        self._jobs.append(job)
        return job

    def _prefix(self, host: int) -> list[str]:
        """The command line that puts what follows it on ``host``."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        prefix: list[str] = []
        if shutil.which("setpriv"):  # a killed testbed must not leave its ranks running
            prefix += ["setpriv", "--pdeathsig", "KILL"]
        if self.pin and cores and shutil.which("taskset"):
            prefix += ["taskset", "-c", str(cores[host % len(cores)])]
        if self._network:
            prefix += ["ip", "netns", "exec", self._network.names[host]]
            if self.clock_offsets_ns:
                prefix += [sys.executable, "-I", _CLOCK, f"host{host}", str(self.clock_offsets_ns[host])]
        return prefix

    def _check_clocks(self) -> None:
        """The hosts' clocks are what was asked for: an older kernel may enter a time namespace at a fork alone.

        Raises:
            TestbedError: they are not.
        """
        tell = [sys.executable, "-I", "-c", "import time; print(time.monotonic_ns())"]
        for host, offset_ns in enumerate(self.clock_offsets_ns or ()):
            before_ns = time.monotonic_ns()
            done = subprocess.run([*self._prefix(host), *tell], capture_output=True, text=True, check=False)
            after_ns = time.monotonic_ns()
            if done.returncode:
                raise TestbedError(done.stderr.strip() or f"host {host}: no clock of its own")
            if not before_ns <= int(done.stdout) - offset_ns <= after_ns:
                raise TestbedError(f"host {host}: its clock is not {offset_ns} ns ahead of the machine's")

    def address(self, host: int) -> str:
        """IPv4 address of a host, as the other hosts reach it."""
        return self._network.address(host) if self._network else "127.0.0.1"

    @property
    def interface(self) -> str:
        """Name of every host's network interface."""
        return "eth0" if self._network else "lo"

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        quiet: bool = False,
        timeout_s: float | None = None,
        keep_going: bool = False,
    ) -> int:
        """Start, wait and return the exit code, as :meth:`Job.wait` gives it."""
        return self.start(command, env, cwd, quiet).wait(timeout_s, keep_going)

    def environment(self, host: int, port: int) -> dict[str, str]:
        """What torchrun sets for the only process of a node.

        ``TORCHELASTIC_RUN_ID`` is what Lightning and torch know a torchrun job by. ``TORCHELASTIC_USE_AGENT_STORE``
        stays unset, so that rank 0 opens the store itself: here is no agent that would have done so.
        """
        rank, world = str(host), str(self.hosts)
        return {
            "RANK": rank, "LOCAL_RANK": "0", "GROUP_RANK": rank, "NODE_RANK": rank, "ROLE_RANK": rank,
            "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": self.address(0), "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "testbed", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1",
        }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
