"""The testbed is measured, not believed: hosts reach each other, links carry their rate, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed, TestbedError, available, clean_stale, namespaces
from benchmarks.testbed.network import Network, parse_rate
from benchmarks.testbed.throughput import measure

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "benchmarks.testbed", "run"]
possible, reason = available()
needs_namespaces = pytest.mark.skipif(not possible, reason=f"no network namespaces: {reason}")


def own_namespaces(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"dpro-{pid}-")]


def wait_for(condition, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    """Running, not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
    clean_stale()


def start(processes: list[subprocess.Popen[bytes]], *command: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([*RUN, *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    processes.append(process)
    return process


@pytest.mark.parametrize(
    ("text", "bits_per_s"), [("1gbit", 10**9), ("200mbit", 2 * 10**8), ("2.5Gbit", 2_500_000_000), ("64kbit", 64_000)]
)
def test_rate_in_bits_per_second(text: str, bits_per_s: int) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["", "fast", "1gb", "-1gbit", "0mbit", "1e3mbit"])
def test_a_bad_rate_names_itself(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number with kbit"):
        Testbed(rate=text)


@pytest.mark.parametrize("hosts", [0, 251])
def test_number_of_hosts_is_bounded(hosts: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 250"):
        Network(hosts, "1gbit")


@needs_namespaces
@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_link_carries_its_rate(rate: str) -> None:
    """Within 15 %. A busy machine can make it slower, never faster: it gets some tries for the lower bound."""
    asked_mb_per_s = parse_rate(rate) / 8e6
    with Testbed(hosts=2, rate=rate) as bed:
        for _ in range(15):
            seen_mb_per_s = measure(bed, seconds=0.5)
            assert seen_mb_per_s < 1.15 * asked_mb_per_s
            if seen_mb_per_s > 0.85 * asked_mb_per_s:
                return
    pytest.fail(f"{seen_mb_per_s:.1f} MB/s, asked for {asked_mb_per_s:.1f}")


@needs_namespaces
def test_every_host_reaches_every_other(tmp_path: Path) -> None:
    """Each of three ranks listens, connects to all, and writes down whom it heard."""
    script = tmp_path / "mesh.py"
    script.write_text(
        "import os, socket, sys, threading, time\n"
        "rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "base = os.environ['MASTER_ADDR'].rpartition('.')[0]\n"
        "heard, server = set(), socket.create_server((f'{base}.{rank + 1}', 4000))\n"
        "def listen():\n"
        "    while len(heard) < world:\n"
        "        peer, _ = server.accept(); heard.add(int(peer.recv(8))); peer.close()\n"
        "thread = threading.Thread(target=listen); thread.start()\n"
        "for other in range(world):\n"
        "    for _ in range(200):\n"
        "        try: link = socket.create_connection((f'{base}.{other + 1}', 4000), timeout=5); break\n"
        "        except OSError: time.sleep(0.05)\n"
        "    link.sendall(str(rank).encode()); link.close()\n"
        "thread.join(20)\n"
        "open(os.path.join(sys.argv[1], str(rank)), 'w').write(repr(sorted(heard)))\n"
    )
    with Testbed(hosts=3) as bed:
        assert bed.run([sys.executable, str(script), str(tmp_path)], timeout_s=60) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["[0, 1, 2]"] * 3


@needs_namespaces
def test_hosts_have_no_way_out() -> None:
    """Each host knows lo, eth0 and one route: its own subnet."""
    with Network(2, "1gbit") as network:
        for name in network.names:
            links = json.loads(subprocess.check_output(["ip", "-n", name, "-j", "link"]))
            assert [link["ifname"] for link in links] == ["lo", "eth0"]
            routes = json.loads(subprocess.check_output(["ip", "-n", name, "-j", "route"]))
            assert [route["dst"] for route in routes] == ["10.77.0.0/24"]


@needs_namespaces
def test_two_testbeds_side_by_side() -> None:
    with Testbed(rate="100mbit") as slow, Testbed(rate="1gbit") as fast:
        assert len(own_namespaces(os.getpid())) == 6
        assert measure(slow, seconds=0.3) < 20 < measure(fast, seconds=0.3)
    assert own_namespaces(os.getpid()) == []


@needs_namespaces
def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(2, "1gbit")
    monkeypatch.setattr(Network, "address", lambda self, host: "not an address")
    with pytest.raises(TestbedError, match="not an address"):
        network.__enter__()
    assert own_namespaces(os.getpid()) == []


@pytest.mark.parametrize("place", ["--loopback", pytest.param("--pin", marks=needs_namespaces)])
def test_environment_output_and_exit_code(place: str, tmp_path: Path) -> None:
    """A rank's environment is torchrun's; rank 1's lines are marked; the first failure is the exit code."""
    # Rank 1 fails only when rank 0 has printed: a failure ends the other rank, whatever it still had to say.
    shell = (
        'echo "$RANK/$WORLD_SIZE $LOCAL_RANK $GROUP_RANK $OMP_NUM_THREADS"; '
        f"if test $RANK = 0; then touch {tmp_path}/printed; sleep 30; fi; "
        f"until test -e {tmp_path}/printed; do sleep 0.05; done; exit 7"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [*RUN, place, "--", "bash", "-c", shell], cwd=ROOT, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 7
    assert time.monotonic() - begin < 20  # rank 0 did not sleep to its end
    assert sorted(done.stdout.splitlines()) == ["0/2 0 0 1", "[rank1] 1/2 0 1 1"]


@needs_namespaces
def test_pinned_hosts_have_a_core_each() -> None:
    shell = "grep Cpus_allowed_list /proc/self/status"
    done = subprocess.run(
        [*RUN, "--pin", "--", "bash", "-c", shell], cwd=ROOT, text=True, capture_output=True, timeout=60
    )
    cores = [line.rpartition("\t")[2] for line in done.stdout.splitlines()]
    usable = sorted(os.sched_getaffinity(0))
    assert sorted(cores) == sorted(str(usable[host % len(usable)]) for host in range(2))


def test_keep_going_lets_the_others_finish(tmp_path: Path) -> None:
    shell = f"test $RANK = 1 && exit 3; sleep 1; touch {tmp_path}/done"
    command = [*RUN, "--loopback", "--keep-going", "--", "bash", "-c", shell]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 3
    assert (tmp_path / "done").exists()


def test_time_limit() -> None:
    done = subprocess.run(
        [*RUN, "--loopback", "--timeout", "0.5", "--", "sleep", "60"], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 124
    assert b"not done after 0.5 s" in done.stderr


def test_no_command_is_one_line() -> None:
    done = subprocess.run(RUN, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no command given" in done.stderr


@needs_namespaces
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_testbed_takes_all_down(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, signum: int
) -> None:
    process = start(started, "--", "bash", "-c", f"echo $$ > {tmp_path}/$RANK; sleep 300")
    assert wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    assert len(own_namespaces(process.pid)) == 3
    process.send_signal(signum)
    assert process.wait(timeout=20) == 128 + signum
    assert own_namespaces(process.pid) == []
    assert not any(alive(int((tmp_path / rank).read_text())) for rank in "01")


@needs_namespaces
def test_a_rank_killed_by_9_ends_the_job(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = start(started, "--", "bash", "-c", f"echo $$ > {tmp_path}/$RANK; sleep 300")
    assert wait_for(lambda: all((tmp_path / r).exists() and (tmp_path / r).read_text() for r in "01"))
    os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)
    assert process.wait(timeout=20) == 128 + signal.SIGKILL
    assert own_namespaces(process.pid) == []


@needs_namespaces
def test_what_a_killed_testbed_left_is_cleaned(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """SIGKILL leaves no time to clean: its ranks die with it, their workers and the namespaces by the next testbed."""
    process = start(started, "--", "bash", "-c", f"sleep 300 & echo $! > {tmp_path}/worker$RANK; wait")
    assert wait_for(lambda: all((tmp_path / f"worker{r}").exists() for r in "01"))
    workers = [int((tmp_path / f"worker{rank}").read_text()) for rank in "01"]
    process.kill()
    process.wait()
    assert len(own_namespaces(process.pid)) == 3
    with Testbed():
        assert own_namespaces(process.pid) == []
        assert len(own_namespaces(os.getpid())) == 3  # a living testbed is left alone
    assert wait_for(lambda: not any(alive(pid) for pid in workers))


def test_without_the_right_it_says_so_and_uses_loopback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.testbed.bed.available", lambda: (False, "needs root"))
    with Testbed() as bed:
        assert bed.mode == "loopback"
        assert bed.run(["bash", "-c", "echo $MASTER_ADDR $GLOO_SOCKET_IFNAME"], timeout_s=30) == 0
    out, err = capfd.readouterr()
    assert err.splitlines() == ["testbed: no network namespaces (needs root): running on loopback"]
    assert "127.0.0.1 lo" in out
