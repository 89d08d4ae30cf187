"""A testbed: hosts, links and the environment a distributed job expects on them.

Where namespaces cannot be made the same jobs run over loopback: ``mode`` says which, and figures must be shown with it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence

from benchmarks.testbed.job import Job
from benchmarks.testbed.network import Network, available, clean_stale, parse_rate

_FIRST_PORT = 29500


class Testbed:
    """``hosts`` hosts with links of ``rate``; a context manager.

    Args:
        hosts: number of hosts; a job runs one process (rank) on each.
        rate: of each host's egress, as ``1gbit`` or ``200mbit``.
        pin: give every host one core of its own (they share when there are fewer cores).
        loopback: True: do not even try namespaces.
    """

    __test__ = False  # not a test class, whatever pytest makes of its name

    def __init__(self, hosts: int = 2, rate: str = "1gbit", pin: bool = False, loopback: bool = False) -> None:
        parse_rate(rate)
        self.hosts, self.rate, self.pin = hosts, rate, pin
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
        link = f"{self.hosts} network namespaces, {self.rate} links" if self._network else "loopback (no shaped link)"
        return link + (", each pinned to one core" if self.pin else "")

    def __enter__(self) -> Testbed:
        possible, reason = (False, "asked for") if self._loopback else available()
        if not possible:
            if not self._loopback:
                print(f"testbed: no network namespaces ({reason}): running on loopback", file=sys.stderr)
            return self
        clean_stale()
        self._network = Network(self.hosts, self.rate).__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for job in self._jobs:
                job.stop()
        finally:
            if self._network:
                self._network.close()
                self._network = None

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None, quiet: bool = False
    ) -> Job:
        """Start ``command`` once per host, with ``env`` on top of this process's environment."""
        port = next(self._ports) if self._network else _free_port()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        argvs, envs = [], []
        for host in range(self.hosts):
            prefix: list[str] = []
            if shutil.which("setpriv"):  # a killed testbed must not leave its ranks running
                prefix += ["setpriv", "--pdeathsig", "KILL"]
            if self.pin and cores and shutil.which("taskset"):
                prefix += ["taskset", "-c", str(cores[host % len(cores)])]
            if self._network:
                prefix += ["ip", "netns", "exec", self._network.names[host]]
            argvs.append([*prefix, *command])
            envs.append({**os.environ, **self.environment(host, port), **(env or {})})
        job = Job(argvs, envs, cwd, quiet)
        self._jobs.append(job)
        return job

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
            "MASTER_ADDR": self._network.address(0) if self._network else "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "testbed", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "GLOO_SOCKET_IFNAME": "eth0" if self._network else "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
