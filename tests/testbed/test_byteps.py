"""BytePS on the testbed: where its processes are, what they are told, how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed, TestbedError
from benchmarks.testbed.byteps import start, worker_environment
from tests.backends.build import PYTHON, ROOT, VENV
from tests.frameworks.byteps.launch import alive, begin
from tests.frameworks.byteps.sums import ELEMENTS
from tests.testbed.test_testbed import needs_namespaces

needs_byteps = pytest.mark.skipif(not (VENV / ".byteps").exists(), reason="no BytePS here: `make backends` makes it")


def test_what_a_worker_is_told(tmp_path: Path) -> None:
    """Worker 1 of two on host 2 of three. BytePS counts workers from 0 and names files by the local rank, 0 for all."""
    bed = Testbed(hosts=3, loopback=True)
    told = worker_environment(
        bed, 2, [0, 2], tmp_path, {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": "t"}, str(tmp_path)
    )
    assert {key: told[key] for key in ("DMLC_ROLE", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK", "RANK", "WORLD_SIZE")} == {
        "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "1", "BYTEPS_LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2",
    }  # fmt: skip
    assert Path(told["BYTEPS_SOCKET_PATH"]).is_dir()
    assert told["BYTEPS_TRACE_DIR"] == str(tmp_path / "t" / "worker1") and (tmp_path / "t" / "worker1" / "0").is_dir()


def test_places_that_are_not_there() -> None:
    bed = Testbed(hosts=2, loopback=True)
    for places in ({"servers": (2,)}, {"workers": (0, 5)}, {"servers": ()}):
        with pytest.raises(ValueError, match="not hosts of this testbed"):
            start(bed, ["true"], python=str(PYTHON), **places)
    with pytest.raises(TestbedError, match="no BytePS"):
        start(bed, ["true"], python="/nowhere/bin/python")


@needs_byteps
def test_a_worker_that_fails_before_it_begins() -> None:
    """Its exit code is the job's, and scheduler and server, which wait for it, are ended."""
    with Testbed(hosts=2, loopback=True) as bed:
        fails_on_1 = "import os, sys, time; os.environ['DMLC_WORKER_ID'] == '1' and sys.exit(3); time.sleep(60)"
        job = start(bed, [sys.executable, "-c", fails_on_1], python=str(PYTHON))
        assert job.wait(60) == 3
        left = [p.pid for part in (job.workers, *job.roles.values()) for p in part.processes if alive(p.pid)]
        assert not left


@needs_byteps
def test_a_role_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with Testbed(hosts=2, loopback=True) as bed:
        job = start(bed, ["sleep", "60"], {"BYTEPS_SERVER_ENGINE_THREAD": "0"}, python=str(PYTHON))
        assert job.wait(60) == 128 + signal.SIGABRT
    said = capfd.readouterr().err
    # the scheduler runs the same code with the same setting: whichever ends first is named
    first = re.search(r"testbed: (server0|scheduler) failed \(exit code 134\)", said)
    assert first and f"[{first[1]}]" in said


@needs_byteps
@needs_namespaces
def test_sums_between_hosts_with_clocks_of_their_own(tmp_path: Path) -> None:
    """Two workers, one server beside a worker and one on a host of its own; the job's environment reaches them all."""
    with Testbed(hosts=3, clock_offsets_ns=[0, 5_000_000, -5_000_000]) as bed:
        os.environ["DPRO_TEST_BED"] = "reaches all"
        try:
            job = begin(bed, "mxnet_job", tmp_path, "10", servers=(0, 2), workers=(0, 1))
        finally:
            del os.environ["DPRO_TEST_BED"]
        deadline = time.monotonic() + 10
        servers = [job.roles[f"server{i}"].processes[0].pid for i in range(2)]
        while not all(b"DMLC_ROLE=server" in Path(f"/proc/{pid}/environ").read_bytes() for pid in servers):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert all(b"DPRO_TEST_BED=reaches all" in Path(f"/proc/{pid}/environ").read_bytes() for pid in servers)
        assert job.wait(100) == 0
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["sums"] == {"checks": 10 * len(ELEMENTS), "wrong": []}


@needs_byteps
def test_from_the_shell() -> None:
    """``benchmarks.testbed run --byteps``: the command runs as the workers; scheduler and server end with them."""
    shell = 'echo "$DMLC_ROLE $DMLC_WORKER_ID of $DMLC_NUM_WORKER"'
    command = [sys.executable, "-m", "benchmarks.testbed", "run", "--loopback", "--byteps", str(PYTHON), "--"]
    done = subprocess.run([*command, "bash", "-c", shell], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank1] worker 1 of 2", "worker 0 of 2"]
