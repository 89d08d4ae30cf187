"""A BytePS job on a testbed: a scheduler, servers, and one worker per host, over ZeroMQ.

What ``bpslaunch`` does on every machine, for hosts that are namespaces: each process gets the environment that says
which role it has and where the scheduler is. Stock BytePS in the Python that the job uses; this module imports none of
it. What stands in for a GPU there (``libhostcuda.so``, beside that Python) is preloaded into every process, and keeps
the workers' rounds in step: see ``tests/backends/byteps/hostcuda.c``.

A worker that dies takes the job with it, and so does a scheduler or server that dies while workers run: without that
the rest would wait for good, since BytePS has no time-out.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.job import TIMED_OUT, Interrupted, Job
from benchmarks.testbed.network import TestbedError

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libhostcuda.so"
#: How long scheduler and servers may take to end by themselves after the last worker.
END_S = 10.0
_FIRST_PORT = 9100
_ports = itertools.count(_FIRST_PORT)

#: One core per host: as few threads as BytePS allows, and such that sleep when there is nothing to do. ``naive``: the
#: other hash functions read a string after it was freed. The job's environment comes first.
_SETTINGS = {
    "BYTEPS_KEY_HASH_FN": "naive",
    "BYTEPS_OMP_THREAD_PER_GPU": "1",
    "BYTEPS_SERVER_ENGINE_THREAD": "1",
    "BYTEPS_ZMQ_NTHREADS": "1",
    "HOSTCUDA_IDLE_US": "500",
    "HOSTCUDA_POLL_US": "200",
    "OMP_WAIT_POLICY": "passive",
    "PYTHONUNBUFFERED": "1",
}


class BytePSJob:
    """Workers, and the scheduler and servers that end with them. To be used as a :class:`Job` (of the workers)."""

    def __init__(self, workers: Job, roles: Mapping[str, Job], folder: Path) -> None:
        self.workers, self.roles = workers, dict(roles)
        self._folder = folder
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The workers' processes, by rank."""
        return self.workers.processes

    def poll(self) -> int | None:
        """As :meth:`Job.poll` of the workers; a scheduler or server that failed while they run has failed the job."""
        code = self.workers.poll()
        if code is None:
            code = next((failed for role in self.roles.values() if (failed := role.poll())), None)
        return code

    def wait(self, timeout_s: float | None = None, keep_going: bool = False) -> int:
        """Wait for the end of the workers, as :meth:`Job.wait`; what else belongs to the job has ended by then, too.

        ``keep_going``: do not end the other workers when one fails; those that wait for it wait on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while (code := self.poll()) is None or (keep_going and any(p.poll() is None for p in self.processes)):
                if deadline is not None and time.monotonic() > deadline:
                    print(f"testbed: not done after {timeout_s:g} s, ending the job", file=sys.stderr)
                    code = code or TIMED_OUT
                    break
                time.sleep(0.02)
            if code == 0:
                self._let_end()
            elif not self.workers.poll():
                self._tell_who_failed()
            self.stop()
        except BaseException as error:
            self.stop(error.signum if isinstance(error, Interrupted) else signal.SIGINT)
            raise
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process group of every worker that still runs."""
        self.workers.send_signal(signum)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """End every process of the job, by its id. Safe to call twice."""
        self.workers.stop(signum)
        for role in self.roles.values():
            role.stop()
        self._remove()

    def _let_end(self) -> None:
        """Workers that end well shut the servers down with them: give these the time to do so."""
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and any(role.poll() is None for role in self.roles.values()):
            time.sleep(0.02)

    def _tell_who_failed(self) -> None:
        for name, role in self.roles.items():
            if code := role.poll():
                print(f"testbed: {name} failed (exit code {code})", file=sys.stderr)
                log = self._folder / f"{name}.log"
                for line in log.read_text(errors="replace").splitlines()[-10:] if log.exists() else ():
                    print(f"[{name}] {line}", file=sys.stderr)


def start(
    bed: Testbed,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    quiet: bool = False,
    python: str = sys.executable,
    servers: Sequence[int] = (0,),
    workers: Sequence[int] | None = None,
) -> BytePSJob:
    """Start ``command`` as the workers of a BytePS job.

    Args:
        bed: the hosts. On loopback all processes share one.
        env: for all processes of the job, scheduler and servers included.
        python: interpreter that has BytePS, for scheduler and servers.
        servers: the host of each server; the scheduler is on the first of them. A host may have several.
        workers: the host of each worker, one per host; all hosts if not given.

    With ``BYTEPS_TRACE_ON`` in ``env`` worker i writes ``<BYTEPS_TRACE_DIR>/worker<i>/0/comm.json``: BytePS names the
    folder by the local rank, which is 0 for all of them, and writes nothing where the folder is not there.

    Raises:
        TestbedError: there is no BytePS for ``python``.
        ValueError: no server, or a host that is not there.
    """
    hosts = list(range(bed.hosts)) if workers is None else list(workers)
    if not servers or not hosts or not set(hosts) | set(servers) <= set(range(bed.hosts)):
        raise ValueError(f"workers on hosts {hosts}, servers on {list(servers)}: not hosts of this testbed")
    library = stand_in(python)
    if not library.exists():
        raise TestbedError(f"no BytePS for {python} (make backends)")
    folder = Path(tempfile.mkdtemp(prefix="dpro-byteps-"))
    given = dict(env or {})
    port = next(_ports) if bed.mode == "namespaces" else _free_port()
    preload = os.pathsep.join(filter(None, [str(library), given.get("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))]))
    shared = {key: os.environ.get(key, value) for key, value in _SETTINGS.items()}
    shared |= {
        **given,
        "LD_PRELOAD": preload,
        "DMLC_NUM_WORKER": str(len(hosts)), "DMLC_NUM_SERVER": str(len(servers)),
        "DMLC_PS_ROOT_URI": bed.address(servers[0]), "DMLC_PS_ROOT_PORT": str(port), "DMLC_INTERFACE": bed.interface,
    }  # fmt: skip

    def worker(host: int) -> dict[str, str]:
        return worker_environment(bed, host, hosts, folder, shared, cwd)

    roles: dict[str, Job] = {}
    try:
        for number, (name, host) in enumerate([("scheduler", servers[0]), *(("server", host) for host in servers)]):
            name = name if number == 0 else f"{name}{number - 1}"
            place = {"DMLC_ROLE": name.rstrip("0123456789"), "DMLC_NODE_HOST": bed.address(host)}
            log = str(folder / f"{name}.log")
            # the shell only turns the output aside, and becomes the process: its id is the server's
            line = ["sh", "-c", 'exec "$@" >"$0" 2>&1', log, python, "-c", "import byteps.server"]
            roles[name] = bed.start(line, shared | place, cwd, hosts=[host])
        return BytePSJob(bed.start(command, shared, cwd, quiet, worker, hosts), roles, folder)
    except BaseException:
        for role in roles.values():
            role.stop()
        shutil.rmtree(folder, ignore_errors=True)
        raise


def worker_environment(
    bed: Testbed, host: int, hosts: Sequence[int], folder: Path, env: Mapping[str, str], cwd: str | None
) -> dict[str, str]:
    """What is the worker's own on ``host``; makes the folders that BytePS expects to find."""
    rank = hosts.index(host)
    sockets = folder / f"worker{rank}"  # BytePS names its local sockets by the local rank alone
    sockets.mkdir()
    own = {
        "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank), "DMLC_NODE_HOST": bed.address(host),
        "BYTEPS_LOCAL_RANK": "0", "BYTEPS_LOCAL_SIZE": "1", "BYTEPS_SOCKET_PATH": str(sockets),
        "HOSTCUDA_GUARD": env.get("HOSTCUDA_GUARD", str(folder / "rounds")),
    }  # fmt: skip
    for name in ("RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"):
        own[name] = str(rank)
    for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        own[name] = str(len(hosts))
    if env.get("BYTEPS_TRACE_ON", os.environ.get("BYTEPS_TRACE_ON", "0")) == "1":
        base = env.get("BYTEPS_TRACE_DIR", os.environ.get("BYTEPS_TRACE_DIR", "trace"))
        trace = Path(cwd or ".").resolve() / base / f"worker{rank}"
        (trace / "0").mkdir(parents=True, exist_ok=True)
        own["BYTEPS_TRACE_DIR"] = str(trace)
    return own


def stand_in(python: str) -> Path:
    """Where the library that stands in for a GPU lies for ``python``, whether it is there or not."""
    return Path(python).absolute().parent.parent / "lib" / LIBRARY  # not resolved: a venv's python is a link


def find_python() -> str:
    """An interpreter that has BytePS: this one, or that of the project's ``.venv-backends``.

    Raises:
        TestbedError: neither has it.
    """
    for python in (sys.executable, str(ROOT / ".venv-backends" / "bin" / "python")):
        if stand_in(python).exists():
            return python
    raise TestbedError("no Python with BytePS (make backends)")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
