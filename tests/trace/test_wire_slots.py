"""The wire tracer's hold on a library: slots patched and put back, whoever else is at them, forks included."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dpro import _native
from dpro.trace import wire
from tests.trace import wire_library
from tests.trace.wire_ends import NAME, Ends, buffer, connected, rows

pytestmark = pytest.mark.skipif(bool(wire.supported()), reason=wire.supported() or "-")


def _protections(addresses: list[int]) -> list[str]:
    ranges = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    edges = [([int(edge, 16) for edge in span.split("-")], rights) for span, rights in ranges]
    return [next(rights for (low, high), rights in edges if low <= address < high) for address in addresses]


def test_slots_are_patched_and_put_back_with_their_protection(each_library: ctypes.CDLL) -> None:
    name = [Path(each_library._name).name]
    before = _native.wire_slots(name)
    addresses = [address for _, _, address, _ in before]
    assert {symbol for _, symbol, _, _ in before} == {
        *("read", "write", "readv", "writev", "send", "recv", "sendto", "recvfrom", "sendmsg", "recvmsg", "close")
    }
    rights = _protections(addresses)
    assert set(rights) == ({"rw-p"} if "lazy" in name[0] else {"r--p"})
    with wire.capture(name) as seen:
        assert seen.slots == len(before)
        assert all(now[3] != was[3] for now, was in zip(_native.wire_slots(name), before, strict=True))
        assert _protections(addresses) == rights
    assert _native.wire_slots(name) == before
    assert _protections(addresses) == rights


def test_a_slot_that_somebody_else_changed_meanwhile_is_his(tmp_path: Path) -> None:
    """His wrapper may call ours; ours then passes calls on for ever."""
    library = wire_library.build(tmp_path, "lazy", "libchained.so")
    name = ["libchained.so"]
    opener, acceptor = connected()
    with opener, acceptor:
        library.x_write(opener.fileno(), None, 0)  # now it is bound
        was = next(value for _, symbol, _, value in _native.wire_slots(name) if symbol == "write")
        with wire.capture(name):
            at = {symbol: address for _, symbol, address, _ in _native.wire_slots(name)}
            slot = ctypes.c_void_p.from_address(at["write"])
            ours = slot.value
            his = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
            called = []
            theirs = his(lambda fd, data, size: called.append(size) or his(ours)(fd, data, size))  # type: ignore[func-returns-value]
            slot.value = ctypes.cast(theirs, ctypes.c_void_p).value
        assert slot.value != ours
        assert library.x_write(opener.fileno(), buffer(9), 9) == 9
        assert called == [9]
        with wire.capture(name) as seen:  # his slot is left alone, the others are patched
            assert seen.slots == 10
            library.x_read(acceptor.fileno(), buffer(9), 9)
        assert slot.value == ctypes.cast(theirs, ctypes.c_void_p).value
        slot.value = was


def test_a_thousand_times_on_and_off_under_load(library: ctypes.CDLL, ends: Ends) -> None:
    """Nothing leaks, nothing is lost on the way, the slots are as they were."""
    before = _native.wire_slots(NAME)
    total, stop = 1 << 20, threading.Event()
    failed = []

    def load(work: object, *args: int) -> None:
        while not stop.is_set():
            if work(*args) <= 0:  # type: ignore[operator]
                failed.append(args)
                return

    opener, acceptor = ends
    threads = [
        threading.Thread(target=load, args=(library.x_pour, opener.fileno(), total, 4096)),
        threading.Thread(target=load, args=(library.x_drain, acceptor.fileno(), 1)),
    ]
    for thread in threads:
        thread.start()

    def cycles(count: int) -> int:
        events = 0
        for _ in range(count):
            with wire.capture(NAME) as seen:
                stop.wait(0.0002)
            events += len(seen.events)
        return events

    try:
        assert cycles(100) > 0
        files, resident = len(os.listdir("/proc/self/fd")), _resident_kib()
        ranges = len(Path("/proc/self/maps").read_text().splitlines())
        assert cycles(900) > 0
        assert len(os.listdir("/proc/self/fd")) == files
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= ranges + 8  # threads' heaps come and go
        assert _resident_kib() < resident + 8 * 1024
    finally:
        stop.set()
        opener.shutdown(socket.SHUT_RDWR)
        acceptor.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    assert _native.wire_slots(NAME) == before


def _resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_a_block_that_raises_still_detaches(library: ctypes.CDLL) -> None:
    before = _native.wire_slots(NAME)
    with pytest.raises(KeyError), wire.capture(NAME):
        raise KeyError
    assert _native.wire_slots(NAME) == before


def test_fork_while_recording(library: ctypes.CDLL, ends: Ends) -> None:
    """The child's calls work and are nobody's; its own detach does not disturb the parent."""
    with wire.capture(NAME) as seen:
        library.x_write(ends[0].fileno(), buffer(10), 10)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                wrote = library.x_write(ends[0].fileno(), buffer(20), 20) == 20
                mine = _native.wire_detach()["nbytes"].tolist()
                wrote &= library.x_write(ends[0].fileno(), buffer(5), 5) == 5
                status = 0 if wrote and mine == [10] else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert library.x_drain(ends[1].fileno(), 35) == 1
    assert [(kind, n) for kind, _, _, n in rows(seen)] == [("SEND", 10), ("RECV", 35)]


def test_child_process_started_while_recording(library: ctypes.CDLL) -> None:
    with wire.capture(NAME):
        assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"
