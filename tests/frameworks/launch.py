"""How the framework tests run jobs: shared processes for many small ones, ``torchrun`` for the whole way."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Short phases, so that a tuning is over after 3 + 3 + 1 + 3 * (2 + 3) = 22 steps.
QUICK = {
    "DPRO_WARMUP_STEPS": "3",
    "DPRO_BASELINE_STEPS": "3",
    "DPRO_CAPTURE_STEPS": "1",
    "DPRO_SETTLE_STEPS": "2",
    "DPRO_VERIFY_STEPS": "3",
    "DPRO_TRIALS": "1",
    "DPRO_SEARCH_S": "2",
    "DPRO_TIMEOUT_S": "20",
}


@dataclass
class Result:
    """What came of a job, by rank."""

    exits: list[int]
    #: when each rank answered or ended, seconds since the epoch
    ended_at: list[float]
    timed_out: bool
    logs: list[str]
    values: list[Any]
    folder: Path

    def ok(self) -> Result:
        """Every rank ended well, in time."""
        text = "\n".join(f"--- rank {rank}\n{log[-3000:]}" for rank, log in enumerate(self.logs))
        assert not self.timed_out, f"the job hangs\n{text}"
        assert not any(self.exits), f"exit codes {self.exits}\n{text}"
        return self

    def lines(self, containing: str = "") -> list[str]:
        """dpro's lines of all ranks."""
        said = [line for log in self.logs for line in log.splitlines() if re.match(r"dpro( \(rank \d+\))?: ", line)]
        return [line for line in said if containing in line]


def clean_environment(**more: str) -> dict[str, str]:
    """The environment less what tunes or places a job, plus what keeps a small machine quiet."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DPRO", "TORCHELASTIC", "PYTEST"))}
    # without bytecode on disk every process would compile torch anew, which takes longer than most jobs
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONDONTWRITEBYTECODE"):
        kept.pop(key, None)
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path} | more


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Worker:
    """One process of :mod:`tests.frameworks.worker`."""

    def __init__(self, python: str, modules: tuple[str, ...]) -> None:
        self.process = subprocess.Popen(
            [python, "-m", "tests.frameworks.worker", *modules],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self, deadline: float) -> str:
        """The next line; "" if the process ended or the time is up."""
        assert self.process.stdout is not None
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self.process.stdout], [], [], left)
        return self.process.stdout.readline() if ready else ""

    def end(self, deadline: float) -> int | None:
        """Its exit code (negative: a signal); None if it had to be killed."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            self.process.kill()
            self.process.wait()
            return None
        finally:
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()


class Ranks:
    """Runs jobs on processes that have imported ``modules``; see ``worker.py``."""

    def __init__(self, *modules: str, python: str = sys.executable) -> None:
        self._python = python
        self._modules = modules
        self._idle: list[_Worker] = []

    def run(
        self,
        target: str,
        folder: Path,
        *,
        ranks: int = 2,
        timeout_s: float = 60.0,
        env: dict[str, str] | None = None,
        last: bool = False,
        **arguments: Any,
    ) -> Result:
        """Run ``module:function(**arguments)`` on every rank, in ``folder``; its value must be JSON.

        With ``last`` the processes end after it, as a job's do, and ``exits`` are their exit codes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        given = QUICK | place | {"GLOO_SOCKET_IFNAME": "lo", "DPRO_RUNS_DIR": str(folder / "runs")} | (env or {})
        workers = self._take(ranks)
        deadline = time.monotonic() + timeout_s
        logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        for rank, worker in enumerate(workers):
            mine = given | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            worker.send({"target": target, "log": str(logs[rank]), "env": mine, "last": last, "arguments": arguments})
        answers: list[dict[str, Any]] = []
        ended_at: list[float] = []
        for worker in workers:
            answers.append(json.loads(worker.answer(deadline) or "{}"))
            ended_at.append(time.time())
        exits = [int("value" not in answer) for answer in answers]
        timed_out = False
        if last or any(exits):
            # a rank that answered nothing has died, or hangs and is ended now
            ended = [worker.end(deadline if last else 0) for worker in workers]
            timed_out = any(code is None and not answer for code, answer in zip(ended, answers, strict=True))
            timed_out |= last and None in ended
            if last:
                exits = [-9 if code is None else code for code in ended]
        else:
            self._idle += workers
        text = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        return Result(exits, ended_at, timed_out, text, [answer.get("value") for answer in answers], folder)

    def close(self) -> None:
        for worker in self._idle:
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        for worker in self._idle:
            worker.end(time.monotonic() + 10)

    def _take(self, ranks: int) -> list[_Worker]:
        fresh = [_Worker(self._python, self._modules) for _ in range(ranks - len(self._idle))]
        for worker in fresh:
            assert worker.answer(time.monotonic() + 100) == "ready\n", "a worker does not start"
        self._idle += fresh
        taken, self._idle = self._idle[:ranks], self._idle[ranks:]
        return taken


def torchrun(script: Path, folder: Path, *, timeout_s: float = 90.0, **env: str) -> subprocess.CompletedProcess[str]:
    """An unchanged script under the real launcher, with the real activation by environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    given = clean_environment(**(QUICK | {"DPRO_RUNS_DIR": str(folder / "runs"), "GLOO_SOCKET_IFNAME": "lo"} | env))
    process = subprocess.Popen(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        out, _ = process.communicate(timeout=30)
        raise AssertionError(f"the job hangs\n{out[-3000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, "")
