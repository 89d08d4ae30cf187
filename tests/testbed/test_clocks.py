"""Hosts with clocks of their own, links that change their rate under a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed, TestbedError, namespaces
from benchmarks.testbed.network import parse_rate
from benchmarks.testbed.throughput import measure
from tests.testbed.test_testbed import ROOT, RUN, alive, needs_namespaces, own_namespaces, wait_for

TELL = (
    "import json, os, socket, sys, time\n"
    "told = {'clock': time.monotonic_ns(), 'name': socket.gethostname(), 'pid': os.getpid(), 'group': os.getpgid(0)}\n"
    "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(json.dumps(told))\n"
)


@needs_namespaces
def test_each_host_has_the_clock_and_the_name_it_was_given(tmp_path: Path) -> None:
    """Ahead and behind; what a rank reads lies between two readings outside, and it leads its own process group."""
    offsets_ns = [5_000_000, -5_000_000, 500_000_000]
    with Testbed(hosts=3, clock_offsets_ns=offsets_ns) as bed:
        assert "each with its own clock" in bed.describe()
        before_ns = time.monotonic_ns()
        job = bed.start([sys.executable, "-c", TELL, str(tmp_path)])
        assert job.wait(60) == 0
        after_ns = time.monotonic_ns()
    for host, offset_ns in enumerate(offsets_ns):
        told = json.loads((tmp_path / str(host)).read_text())
        assert before_ns < told["clock"] - offset_ns < after_ns
        assert told["name"] == f"host{host}"
        assert told["pid"] == told["group"] == job.processes[host].pid


@needs_namespaces
def test_names_lead_to_addresses(tmp_path: Path) -> None:
    """host0, host1 by name from both; a host's own name, with and without a clock of its own, is its own address."""
    script = (
        "import os, socket, sys\n"
        "told = map(socket.gethostbyname, ('host0', 'host1', socket.gethostname()))\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(' '.join(told))\n"
    )
    for clocks in (None, [0, 5_000_000]):
        with Testbed(hosts=2, clock_offsets_ns=clocks) as bed:
            assert bed.run([sys.executable, "-c", script, str(tmp_path)], timeout_s=60) == 0
        told = [(tmp_path / rank).read_text().split() for rank in "01"]
        assert told == [["10.77.0.1", "10.77.0.2", own] for own in ("10.77.0.1", "10.77.0.2")]
    assert not list(Path("/etc/netns").glob(f"dpro-{os.getpid()}-*"))


@needs_namespaces
def test_a_clock_cannot_be_turned_back_to_before_zero() -> None:
    with pytest.raises(TestbedError, match="host0: clock offset"), Testbed(clock_offsets_ns=[-(10**18), 0]):
        pass
    assert own_namespaces(os.getpid()) == []


def test_one_offset_per_host() -> None:
    with pytest.raises(ValueError, match="1 clock offsets for 2 hosts"):
        Testbed(hosts=2, clock_offsets_ns=[0])


@needs_namespaces
def test_what_runs_on_hosts_with_own_clocks_ends_with_the_testbed(tmp_path: Path) -> None:
    """By a signal, and by SIGKILL, which only the death signal of the ranks answers."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        command = ["--clocks-ms", "5", "-5", "--", "bash", "-c", f"echo $$ > {tmp_path}/{int(signum)}-$RANK; sleep 300"]
        process = subprocess.Popen([*RUN, *command], cwd=ROOT, stderr=subprocess.DEVNULL)
        told = [tmp_path / f"{int(signum)}-{rank}" for rank in (0, 1)]
        try:
            assert wait_for(lambda told=told: all(file.exists() and file.read_text() for file in told))
        finally:
            process.send_signal(signum)
            process.wait(20)
        assert wait_for(lambda told=told: not any(alive(int(file.read_text())) for file in told))
    with Testbed():  # takes down what SIGKILL left
        assert [name for name in namespaces() if name.startswith(f"dpro-{process.pid}-")] == []


@needs_namespaces
def test_the_rate_can_be_changed() -> None:
    """Slow, free, slower: each limit is felt, and gone when it is lifted."""
    with Testbed(hosts=2, rate="100mbit") as bed:
        slow = measure(bed, 0.3)
        bed.set_rate("none")
        assert "unshaped" in bed.describe()
        free = measure(bed, 0.3)
        bed.set_rate("50mbit")
        assert measure(bed, 0.3) < 1.15 * parse_rate("50mbit") / 8e6 < slow < 1.15 * parse_rate("100mbit") / 8e6 < free


def test_a_bad_rate_changes_nothing() -> None:
    bed = Testbed(rate="none", loopback=True)
    with pytest.raises(ValueError, match="expected a number with kbit"):
        bed.set_rate("fast")
    assert bed.rate == "none"
