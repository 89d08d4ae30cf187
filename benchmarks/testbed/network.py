"""Hosts and links made of the kernel's own parts: network namespaces, veth pairs, one bridge, ``tc tbf``.

Knows how to build such a network, take it down, and tell whether this machine allows it. Nothing is added to the
machine's own namespace, so a testbed can neither reach outside nor collide with another one. It knows nothing of
processes except how to end those that were left inside a namespace of a testbed whose owner is dead.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "dpro"
SUBNET = "10.77.0"
#: Where ``ip netns exec`` looks for files that a namespace sees in place of those in /etc.
_ETC = Path("/etc/netns")
MAX_HOSTS = 250
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-(?:switch|host\d+)")
_serial = itertools.count()
#: A link that nothing holds back: the bare veth pair.
UNSHAPED = "none"


class TestbedError(Exception):
    """The network could not be built; the message is one line."""

    __test__ = False  # not a test class, whatever pytest makes of its name


def parse_rate(text: str) -> int:
    """Bits per second of ``200mbit``, ``1gbit``, …

    Raises:
        ValueError: not a positive number followed by kbit, mbit or gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"rate {text!r}: expected a number with kbit, mbit or gbit, such as 1gbit")
    return round(float(match[1]) * _UNITS[match[2]])


def available() -> tuple[bool, str]:
    """Whether namespaces with shaped links can be made here, and if not, why not."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False, "needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return False, f"needs iproute2 ({', '.join(missing)} not found)"
    return _probe()


def _probe() -> tuple[bool, str]:
    """Build the smallest network once: containers are often root without the right to do this."""
    try:
        with Network(hosts=1, rate="1gbit"):
            return True, "network namespaces and tbf work"
    except TestbedError as error:
        return False, str(error)


def install() -> bool:
    """Install iproute2 by apt where that is possible (root on Debian); True when ``ip`` and ``tc`` are there after."""
    if shutil.which("ip") and shutil.which("tc"):
        return True
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for args in (["update"], ["install", "-y", "--no-install-recommends", "iproute2"]):
        subprocess.run(["apt-get", "-qq", *args], env=env, check=False, capture_output=True)
    return bool(shutil.which("ip") and shutil.which("tc"))


def _sh(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise TestbedError(f"{' '.join(argv)}: {reason[0] if reason else f'exit {done.returncode}'}")
    return done.stdout


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which ``pid`` started, None when there is no such process.

    With the pid it names one process for good; a pid alone is used again.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def namespaces() -> list[str]:
    """Names of all testbed namespaces on this machine, whoever owns them."""
    try:
        listed = os.listdir("/run/netns")
    except FileNotFoundError:
        return []
    return sorted(name for name in listed if _NAME.fullmatch(name))


def clean_stale() -> list[str]:
    """Take down the namespaces of testbeds whose owner is dead, with what still runs inside; returns their names."""
    stale = []
    for name in namespaces():
        match = _NAME.fullmatch(name)
        if match and _start_time(int(match[1])) != int(match[2]):
            _delete(name)
            stale.append(name)
    return stale


def _delete(name: str) -> None:
    """End what runs in the namespace, by pid, and delete it. Never raises: it is the way out of every error."""
    for pid in _pids(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while _pids(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(_ETC / name, ignore_errors=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _pids(name: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()] if done.returncode == 0 else []


@dataclass
class Network:
    """``hosts`` namespaces around one bridge, each host's egress held to ``rate`` by a token bucket.

    ``rate`` is as :func:`parse_rate` reads it, or :data:`UNSHAPED`. A context manager: built on entry, taken down on
    exit. A host's interface is ``eth0``, its address ``address(i)``.
    """

    hosts: int
    rate: str
    names: list[str] = field(default_factory=list, init=False)  # one per host

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"hosts: {self.hosts} is not between 1 and {MAX_HOSTS}")
        if self.rate != UNSHAPED:
            parse_rate(self.rate)
        self._stem = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_serial)}"
        self._made: list[str] = []

    def address(self, host: int) -> str:
        """IPv4 address of a host, seen only inside the testbed."""
        return f"{SUBNET}.{host + 1}"

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _build(self) -> None:
        switch = self._add("switch")
        _sh("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _sh("ip", "-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            name, port = self._add(f"host{host}"), f"port{host}"
            veth = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _sh("ip", "-n", switch, *veth)
            _sh("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _sh("ip", "-n", name, "link", "set", "lo", "up")
            _sh("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _sh("ip", "-n", name, "link", "set", "eth0", "up")
            self._write_hosts(host, name)
            self.names.append(name)
        if self.rate != UNSHAPED:
            self._shape()

    def _write_hosts(self, host: int, name: str) -> None:
        """The host's /etc/hosts: all hosts as host0, host1, …, and the machine's own name for its own address.

        Horovod 0.28.1 needs it: for a process set it forgets the interface and takes the address of the host's name.
        """
        lines = ["127.0.0.1 localhost", f"{self.address(host)} {socket.gethostname()}"]
        lines += [f"{self.address(other)} host{other}" for other in range(self.hosts)]
        (_ETC / name).mkdir(parents=True)
        (_ETC / name / "hosts").write_text("\n".join(lines) + "\n")

    def set_rate(self, rate: str) -> None:
        """Hold every host's egress to another rate, at once, whatever runs on it.

        Raises:
            ValueError: not a rate, and not :data:`UNSHAPED`.
        """
        if rate != UNSHAPED:
            parse_rate(rate)
        shaped, self.rate = self.rate != UNSHAPED, rate
        if rate != UNSHAPED:
            self._shape()
        elif shaped:
            for name in self.names:
                _sh("tc", "-n", name, "qdisc", "del", "dev", "eth0", "root")

    def _shape(self) -> None:
        bits_per_s = parse_rate(self.rate)
        # A bucket must hold a whole GSO packet (64 KiB) and what the rate passes between two timer ticks.
        burst_bytes = max(64 * 1024, bits_per_s // 8 // 1000)
        tbf = ("tbf", "rate", f"{bits_per_s}bit", "burst", str(burst_bytes), "latency", "50ms")
        for name in self.names:
            _sh("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *tbf)

    def _add(self, role: str) -> str:
        name = f"{self._stem}-{role}"
        self._made.append(name)  # before it exists: a signal may come between
        _sh("ip", "netns", "add", name)
        return name

    def close(self) -> None:
        """Take everything down. Safe to call twice."""
        for name in reversed(self._made):
            _delete(name)
        self._made.clear()
        self.names.clear()
