"""A Horovod job on a testbed: one process per host, gloo as controller and for the data, nothing but stock parts.

What ``horovodrun --gloo`` does over ssh, for hosts that are namespaces: Horovod's own rendezvous server on host 0, and
for each rank the environment that says where it is and which rank it is. The server runs in the Python that the job
uses, since that one has Horovod; this module itself imports Horovod nowhere but in the server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.job import Job
from benchmarks.testbed.network import TestbedError

ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0


def start(
    bed: Testbed,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    quiet: bool = False,
    python: str = sys.executable,
) -> Job:
    """Start ``command`` once per host of ``bed`` as a Horovod job. The server lives until ``bed`` is closed.

    ``python``: interpreter that has Horovod. A testbed on loopback gives all ranks one host, as ``horovodrun`` would.

    Raises:
        TestbedError: the rendezvous server did not start.
    """
    port = _serve(bed, python)

    def rank(host: int) -> dict[str, str]:
        return environment(bed, host, port)

    return bed.start(command, env, cwd, quiet, each=rank)


def find_python() -> str:
    """An interpreter that has Horovod for torch: this one, or that of the project's ``.venv-backends``.

    Raises:
        TestbedError: neither has it.
    """
    for python in (sys.executable, str(ROOT / ".venv-backends" / "bin" / "python")):
        if shutil.which(python):
            done = subprocess.run([python, "-c", "import horovod.torch"], capture_output=True, check=False)
            if not done.returncode:
                return python
    raise TestbedError("no Python with Horovod for torch (make backends)")


def environment(bed: Testbed, host: int, port: int) -> dict[str, str]:
    """What ``horovodrun`` sets for the rank on ``host``, with the server's ``port``."""
    ranks, one = str(bed.hosts), bed.mode == "loopback"
    return {
        "HOROVOD_HOSTNAME": bed.address(host),
        "HOROVOD_RANK": str(host), "HOROVOD_SIZE": ranks,
        "HOROVOD_LOCAL_RANK": str(host if one else 0), "HOROVOD_LOCAL_SIZE": ranks if one else "1",
        "HOROVOD_CROSS_RANK": str(0 if one else host), "HOROVOD_CROSS_SIZE": "1" if one else ranks,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": bed.address(0), "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": bed.interface,
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def _serve(bed: Testbed, python: str) -> int:
    """Start the rendezvous server on host 0; its port."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "port"
        hosts = ",".join(f"{bed.address(host)}:1" for host in range(bed.hosts))
        if bed.mode == "loopback":
            hosts = f"{bed.address(0)}:{bed.hosts}"
        server = bed.start([python, "-m", "benchmarks.testbed.horovod", hosts, str(told)], cwd=str(ROOT), hosts=[0])
        _wait_until(told.exists, lambda: server.poll() is not None)
        return int(told.read_text())


def _wait_until(ready: Callable[[], bool], dead: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        if dead() or time.monotonic() > deadline:
            raise TestbedError("Horovod's rendezvous server did not start (is Horovod in this Python?)")
        time.sleep(0.02)


def main() -> None:
    """Serve: HOSTS as ``address:slots,…``, FILE to write the port to. Runs until it is ended."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    hosts, told = sys.argv[1], Path(sys.argv[2])
    slots = parse_hosts(hosts)
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(slots, sum(host.slots for host in slots)))
    fresh = told.with_suffix(".new")
    fresh.write_text(str(port))
    os.replace(fresh, told)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
