"""One command run once per host, as torchrun would start it, and ended as a whole.

Knows processes, their output and their end. It does not know how hosts are made: it gets a command prefix for each.
Every rank leads a session of its own, so its process group (and with it data-loader workers) can be ended by id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

GRACE_S = 5.0
TIMED_OUT = 124  # as coreutils' timeout says it


class Interrupted(BaseException):
    """SIGTERM, SIGHUP or SIGINT came: unwinds like KeyboardInterrupt, so that every ``finally`` runs."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGTERM, SIGHUP and SIGINT raise :class:`Interrupted` (once) in the main thread."""
    signums = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        for each in signums:  # a second Ctrl-C must not interrupt the teardown
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signum)

    before = {signum: signal.signal(signum, interrupt) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Job:
    """The processes of one command, one per host; started on construction.

    Args:
        argvs: per rank, the whole command line.
        envs: per rank, the whole environment.
        cwd: working directory of all ranks.
        quiet: throw the output away instead of printing it.
    """

    def __init__(
        self,
        argvs: Sequence[Sequence[str]],
        envs: Sequence[Mapping[str, str]],
        cwd: str | None = None,
        quiet: bool = False,
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pumps: list[threading.Thread] = []
        self._failed = 0
        try:
            for rank, (argv, env) in enumerate(zip(argvs, envs, strict=True)):
                self._start(rank, argv, env, cwd, quiet)
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def _start(self, rank: int, argv: Sequence[str], env: Mapping[str, str], cwd: str | None, quiet: bool) -> None:
        # Rank 0 keeps the caller's own stdout (a terminal stays a terminal); the others are prefixed line by line.
        sink = subprocess.DEVNULL if quiet else (None if rank == 0 else subprocess.PIPE)
        process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
        self.processes.append(process)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                pump = threading.Thread(target=_pump, args=(source, target, f"[rank{rank}] "), daemon=True)
                pump.start()
                self._pumps.append(pump)

    def poll(self) -> int | None:
        """None while all ranks run well; the exit code of the first that failed, or 0 when all have ended.

        A rank that was killed by signal n counts as 128 + n.
        """
        for process in self.processes:
            code = _reap(process)
            if code and not self._failed:
                self._failed = code if code > 0 else 128 - code
        return self._failed or (None if self._running() else 0)

    def wait(self, timeout_s: float | None = None, keep_going: bool = False) -> int:
        """Wait for the end; the exit code as :meth:`poll` gives it, or :data:`TIMED_OUT`.

        When one rank fails the others are ended, unless ``keep_going``. An exception (Ctrl-C, :class:`Interrupted`)
        is forwarded to the ranks as a signal, then raised.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while (code := self.poll()) is None or (keep_going and self._running()):
                if deadline is not None and time.monotonic() > deadline:
                    print(f"testbed: not done after {timeout_s:g} s, ending the job", file=sys.stderr)
                    code = code or TIMED_OUT
                    break
                time.sleep(0.02)
            self.stop()
        except BaseException as error:
            self.stop(error.signum if isinstance(error, Interrupted) else signal.SIGINT)
            raise
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process group of every rank that still runs."""
        for process in self._running():
            os.killpg(process.pid, signum)

    def stop(self, signum: int = signal.SIGTERM, grace_s: float = GRACE_S) -> None:
        """End every rank: ``signum`` first, SIGKILL for what is left after ``grace_s``. Safe to call twice."""
        self.send_signal(signum)
        deadline = time.monotonic() + grace_s
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.send_signal(signal.SIGKILL)
        while self._running():
            time.sleep(0.005)
        for pump in self._pumps:
            pump.join(timeout=1.0)

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if _reap(process) is None]


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code, None while it runs; what an ended rank left behind in its process group is ended too.

    In this order: as long as the leader is not reaped, the group's id can't have become someone else's.
    """
    if process.returncode is None and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def _pump(source: IO[bytes], target: IO[str], prefix: str) -> None:
    with source:
        for line in source:
            target.write(prefix + line.decode(errors="replace").rstrip("\n") + "\n")
            target.flush()
