"""The wire tracer on plain sockets: a small library's calls, with the other end in Python or in the library too."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dpro.trace import wire
from tests.trace.wire_ends import NAME, Ends, buffer, connected, rows, stream_name

pytestmark = pytest.mark.skipif(bool(wire.supported()), reason=wire.supported() or "-")

TRUSTED_S = 1e-3  # 20 times as long as the tracer trusts a number whose close it did not see

# -- what is seen --------------------------------------------------------------------------------


def test_every_call_is_seen_with_its_bytes(each_library: ctypes.CDLL, ends: Ends) -> None:
    opener, acceptor = ends
    data, room = buffer(1000), buffer(1000)
    out, into = opener.fileno(), acceptor.fileno()
    lib, expected, offset = each_library, [], 0
    with wire.capture(NAME) as seen:
        calls = [
            (lib.x_write, lib.x_read, ()),
            (lib.x_send, lib.x_recv, (0,)),
            (lib.x_sendto, lib.x_recvfrom, (0,)),
            (lib.x_writev, lib.x_readv, ()),
            (lib.x_sendmsg, lib.x_recvmsg, (0,)),
        ]
        for size, (send, receive, flags) in enumerate(calls, 100):
            assert send(out, data, size, *flags) == size
            assert receive(into, room, 1000, *flags) == size
            assert room.raw[: size // 2] == data.raw[: size // 2]
            expected += [("SEND", stream_name(opener), offset, size), ("RECV", stream_name(opener), offset, size)]
            offset += size
    assert rows(seen) == expected
    assert (seen.dropped, seen.why) == (0, "")
    assert (seen.events.end >= seen.events.start).all()
    assert (np.diff(seen.events.end) >= 0).all()
    first = seen.events.head[0]
    assert bytes(first) == data.raw[:48]
    assert seen.events.head_bytes.tolist()[:2] == [48, 48]


def test_head_is_of_the_first_part_and_no_longer_than_what_moved(library: ctypes.CDLL, ends: Ends) -> None:
    opener, acceptor = ends
    with wire.capture(NAME) as seen:
        library.x_writev(opener.fileno(), buffer(60), 60)  # parts of 30 bytes
        library.x_recv(acceptor.fileno(), buffer(1000), 1000, 0)
        library.x_write(opener.fileno(), buffer(5), 5)
    assert seen.events.head_bytes.tolist() == [30, 48, 5]
    assert bytes(seen.events.head[0]) == buffer(30).raw + bytes(18)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_offsets_of_a_capture_that_begins_in_mid_stream(library: ctypes.CDLL, family: socket.AddressFamily) -> None:
    """What both ends moved before counts, and so does what is still under way; whichever end opened."""
    try:
        pair = connected(family)
    except OSError as error:
        pytest.skip(f"no such sockets here: {error}")
    with pair[0], pair[1]:
        for sender, receiver, size in ((*pair, 5000), (pair[1], pair[0], 77_000)):
            sender.sendall(bytes(size))
            receiver.recv(1234, socket.MSG_WAITALL)  # the rest is in flight, or in the receiver's queue
        with wire.capture(NAME) as seen:
            for sender, receiver, size in ((*pair, 5000), (pair[1], pair[0], 77_000)):
                assert library.x_pour(sender.fileno(), 300, 100) == 3
                assert library.x_drain(receiver.fileno(), size - 1234 + 300) > 0
        assert len({name.removeprefix("wire/") for name in seen.events.resources}) == 2
        for sender, size in ((pair[0], 5000), (pair[1], 77_000)):
            name = f"wire/{_printed(sender.getsockname())}>{_printed(sender.getpeername())}"
            mine = [row for row in rows(seen) if row[1] == name]
            sent, received = ([(o, n) for kind, _, o, n in mine if kind == k] for k in ("SEND", "RECV"))
            assert sent == [(size, 100), (size + 100, 100), (size + 200, 100)]
            assert received[0][0] == 1234
            assert sum(n for _, n in received) == size - 1234 + 300
            assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(received))


def _printed(name: tuple[object, ...]) -> str:
    ip, port = name[:2]
    return f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}"


def test_offsets_of_captures_that_begin_under_load(library: ctypes.CDLL, ends: Ends) -> None:
    """Attached again and again while bytes are under way in both directions: the bytes tell where they stand."""
    total = 160 << 20
    threads = [
        threading.Thread(target=work, args=(end.fileno(), total))
        for sender, receiver in (ends, ends[::-1])
        for work, end in ((library.x_count, sender), (library.x_drain, receiver))
    ]
    for thread in threads:
        thread.start()
    checked: dict[tuple[str, str], int] = dict.fromkeys(itertools.product(("SEND", "RECV"), map(stream_name, ends)), 0)
    captures = 0
    while any(thread.is_alive() for thread in threads):
        with wire.capture(NAME) as seen:
            threading.Event().wait(0.002)
        captures += 1
        for (kind, name, offset, nbytes), head in zip(rows(seen), seen.events.head, strict=True):
            skip = -offset % 8  # a receiver may begin within eight bytes
            if offset >= 0 and nbytes >= skip + 8:
                assert int(head[skip : skip + 8].view(np.uint64)[0]) * 8 == offset + skip
                checked[kind, name] += 1
    for thread in threads:
        thread.join()
    assert captures > 5
    assert all(count > 5 for count in checked.values()), checked


def test_both_threads_of_a_socket_and_many_sockets(library: ctypes.CDLL) -> None:
    pairs = [connected() for _ in range(4)]
    with wire.capture(NAME) as seen:
        made = [0] * 16
        jobs = [
            (work, (end.fileno(), *args))
            for pair in pairs
            for end in pair
            for work, args in ((library.x_pour, (3_000_000, 10_000)), (library.x_drain, (3_000_000,)))
        ]

        def run(k: int) -> None:
            made[k] = jobs[k][0](*jobs[k][1])

        threads = [threading.Thread(target=run, args=(k,)) for k in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen.events) == sum(made)
    seen_rows = rows(seen)
    for end in itertools.chain(*pairs):
        for kind in ("SEND", "RECV"):
            mine = [(o, n) for k, name, o, n in seen_rows if (k, name) == (kind, stream_name(end))]
            assert [o for o, _ in mine] == [0, *itertools.accumulate(n for _, n in mine[:-1])]
            assert sum(n for _, n in mine) == 3_000_000
        end.close()


def test_more_calls_than_there_is_room_for_are_counted(library: ctypes.CDLL, ends: Ends) -> None:
    calls = (1 << 19) + 5000
    drain = threading.Thread(target=lambda: ends[1].recv(calls, socket.MSG_WAITALL))
    drain.start()
    with wire.capture(NAME) as seen:
        assert library.x_pour(ends[0].fileno(), calls, 1) == calls
    drain.join()
    assert len(seen.events) == 1 << 19
    assert seen.dropped == 5000
    with wire.capture(NAME) as seen:  # offsets are not led astray, and there is room again
        library.x_pour(ends[0].fileno(), 1, 1)
    assert rows(seen) == [("SEND", stream_name(ends[0]), calls, 1)]


# -- what is not ---------------------------------------------------------------------------------


def test_files_pipes_and_other_sockets_are_not_traced(library: ctypes.CDLL, tmp_path: Path) -> None:
    data = buffer(64)
    reader, writer = os.pipe()
    unix = socket.socketpair()
    udp = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    udp[1].bind(("127.0.0.1", 0))
    udp[0].connect(udp[1].getsockname())
    with (tmp_path / "file").open("w+b") as file, wire.capture(NAME) as seen:
        for out in (file.fileno(), writer, unix[0].fileno(), udp[0].fileno()):
            assert library.x_write(out, data, 64) == 64
        file.seek(0)
        for into in (file.fileno(), reader, unix[1].fileno(), udp[1].fileno()):
            assert library.x_read(into, data, 64) == 64
    assert len(seen.events) == 0
    for end in (*unix, *udp):
        end.close()
    os.close(reader)
    os.close(writer)


def test_nothing_moved_is_no_event_and_errno_is_the_calls_own(library: ctypes.CDLL, ends: Ends) -> None:
    opener, acceptor = ends
    data = buffer(100)
    closed = os.dup(opener.fileno())
    os.close(closed)
    with wire.capture(NAME) as seen:
        assert library.x_errno_of_recv(acceptor.fileno(), data, 100) == errno.EAGAIN
        assert library.x_errno_of_recv(closed, data, 100) == errno.EBADF
        assert library.x_errno_of_write(opener.fileno(), None, 100) == errno.EFAULT
        assert library.x_errno_of_recv(-1, data, 100) == errno.EBADF
        assert library.x_errno_kept(opener.fileno(), data, 10) == 77
        opener.shutdown(socket.SHUT_WR)
        assert library.x_recv(acceptor.fileno(), data, 100, 0) == 10
        assert library.x_recv(acceptor.fileno(), data, 100, 0) == 0  # the end of the stream
    assert [(kind, o, n) for kind, _, o, n in rows(seen)] == [("SEND", 0, 10), ("RECV", 0, 10)]


def test_first_look_after_the_peer_has_finished(library: ctypes.CDLL, ends: Ends) -> None:
    opener, acceptor = ends
    opener.sendall(bytes(500))
    opener.shutdown(socket.SHUT_WR)
    acceptor.recv(200, socket.MSG_WAITALL)
    with wire.capture(NAME) as seen:
        assert library.x_recv(acceptor.fileno(), buffer(1000), 1000, socket.MSG_WAITALL) == 300
    assert rows(seen) == [("RECV", stream_name(opener), 200, 300)]


def test_a_look_ahead_moves_nothing_and_a_discarding_read_does(library: ctypes.CDLL, ends: Ends) -> None:
    opener, acceptor = ends
    into, room = acceptor.fileno(), buffer(100)
    with wire.capture(NAME) as seen:
        library.x_send(opener.fileno(), buffer(90), 90, 0)
        assert library.x_recv(into, room, 50, socket.MSG_PEEK) == 50
        assert library.x_recvmsg(into, room, 50, socket.MSG_PEEK) == 50
        assert library.x_recvfrom(into, room, 50, socket.MSG_PEEK) == 50
        assert library.x_recv(into, None, 30, socket.MSG_TRUNC) == 30
        assert library.x_recv(into, room, 60, 0) == 60
    assert [(kind, o, n) for kind, _, o, n in rows(seen)] == [("SEND", 0, 90), ("RECV", 0, 30), ("RECV", 30, 60)]
    assert seen.events.head_bytes.tolist() == [48, 0, 48]


def test_no_such_library_gives_an_empty_capture_that_says_why(ends: Ends, library: ctypes.CDLL) -> None:
    with wire.capture(["no-such-library"]) as seen:
        library.x_write(ends[0].fileno(), buffer(8), 8)
    assert (len(seen.events), seen.slots) == (0, 0)
    assert "no-such-library" in seen.why


def test_one_capture_at_a_time(ends: Ends, library: ctypes.CDLL) -> None:
    with wire.capture(NAME) as outer:
        with wire.capture(NAME) as inner:
            library.x_write(ends[0].fileno(), buffer(8), 8)
        library.x_write(ends[0].fileno(), buffer(8), 8)
    assert (len(inner.events), len(outer.events)) == (0, 2)
    assert inner.why == "the wire is traced already"


# -- lives of a file descriptor ------------------------------------------------------------------


@pytest.mark.parametrize("seen_close", [True, False])
def test_a_number_used_again_is_another_stream(library: ctypes.CDLL, seen_close: bool) -> None:
    """Also where the tracer cannot see the close, because no traced library made it."""
    data, numbers, names = buffer(10), set(), []
    with wire.capture(NAME) as seen:
        for _ in range(5):
            opener, acceptor = connected()
            numbers.add(opener.fileno())
            names.append(stream_name(opener))
            library.x_write(opener.fileno(), data, 10)
            library.x_write(opener.fileno(), data, 7)
            if seen_close:
                assert library.x_close(opener.detach()) == 0
            else:
                opener.close()
                time.sleep(TRUSTED_S)
            acceptor.close()
    assert len(numbers) == 1
    assert rows(seen) == [("SEND", name, o, n) for name in names for o, n in ((0, 10), (10, 7))]


def test_a_file_whose_number_becomes_a_socket(library: ctypes.CDLL, tmp_path: Path) -> None:
    with wire.capture(NAME) as seen:
        file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
        library.x_write(file, buffer(10), 10)
        os.close(file)
        time.sleep(TRUSTED_S)
        opener, acceptor = connected()
        if file not in (opener.fileno(), acceptor.fileno()):
            os.dup2(opener.fileno(), file)
        library.x_write(file, buffer(10), 10)
    opener.close()
    acceptor.close()
    assert [(kind, o, n) for kind, _, o, n in rows(seen)] == [("SEND", 0, 10)]


def test_the_same_two_ports_again_are_another_stream(library: ctypes.CDLL) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, wire.capture(NAME) as seen:
        port = 0
        for _ in range(2):
            opener = socket.socket()
            opener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # leaves no TIME_WAIT
            opener.bind(("127.0.0.1", port))
            port = opener.getsockname()[1]
            opener.connect(server.getsockname())
            acceptor, _ = server.accept()
            name = stream_name(opener)
            library.x_write(opener.fileno(), buffer(10), 10)
            library.x_read(acceptor.fileno(), buffer(10), 10)
            library.x_close(opener.detach())
            library.x_close(acceptor.detach())
    assert rows(seen) == [(kind, n, 0, 10) for n in (name, f"{name}#2") for kind in ("SEND", "RECV")]


def test_send_offset_where_the_kernel_does_not_tell_the_opener() -> None:
    """Then it is the end whose port nobody listens at, and its count has the SYN in it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        opener, acceptor = connected()
        free = opener.getsockname()[1]
        opener.close()
        acceptor.close()
        streams = [("1.2.3.4", port, "1.2.3.5", 9, 1, True), ("1.2.3.4", free, "1.2.3.5", 9, 2, True)]
        assert wire._directed(streams)[1] == [0, 1]
        assert wire._directed([(*stream[:5], False) for stream in streams])[1] == [0, 0]
