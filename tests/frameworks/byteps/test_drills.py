"""A BytePS job that loses a process ends: BytePS itself would wait for good."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.testbed import Testbed
from benchmarks.testbed.byteps import BytePSJob
from tests.frameworks.byteps.launch import alive, begin


def pids(job: BytePSJob) -> list[int]:
    return [process.pid for part in (job.workers, *job.roles.values()) for process in part.processes]


def wait_for_rounds(job: BytePSJob, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < deadline and job.poll() is None, "the job does not get going"
        time.sleep(0.02)


def test_a_killed_worker_ends_the_job(tmp_path: Path) -> None:
    with Testbed(2, loopback=True) as bed:
        job = begin(bed, "drill_job", tmp_path, "killed")
        assert job.wait(60) == 128 + signal.SIGKILL
        assert not [pid for pid in pids(job) if alive(pid)]


def test_a_killed_server_ends_the_job(tmp_path: Path) -> None:
    with Testbed(2, loopback=True) as bed:
        job = begin(bed, "drill_job", tmp_path, "never")
        wait_for_rounds(job, tmp_path)
        os.kill(job.roles["server0"].processes[0].pid, signal.SIGKILL)
        assert job.wait(30) == 128 + signal.SIGKILL
        assert not [pid for pid in pids(job) if alive(pid)]


def test_a_job_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    """As the testbed does at its end, whatever happened."""
    with Testbed(2, loopback=True) as bed:
        job = begin(bed, "drill_job", tmp_path, "never")
        wait_for_rounds(job, tmp_path)
    assert not [pid for pid in pids(job) if alive(pid)]
