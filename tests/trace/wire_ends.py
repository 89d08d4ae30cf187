"""The two ends of a connection for the wire tracer's tests, and what a capture saw of them."""

from __future__ import annotations

import ctypes
import socket

from dpro.trace import wire
from dpro.trace.model import EventKind

#: How the test library's file name begins.
NAME = ["libwiretest_"]
Ends = tuple[socket.socket, socket.socket]


def connected(family: socket.AddressFamily = socket.AF_INET) -> Ends:
    """Opener and acceptor of one TCP connection over loopback."""
    with socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family) as server:
        opener = socket.create_connection(server.getsockname()[:2])
        acceptor, _ = server.accept()
    return opener, acceptor


def stream_name(sender: socket.socket) -> str:
    here, there = ("{}:{}".format(*name[:2]) for name in (sender.getsockname(), sender.getpeername()))
    return f"wire/{here}>{there}"


def rows(seen: wire.Seen) -> list[tuple[str, str, int, int]]:
    """(direction, stream, offset, bytes) of every event."""
    events = seen.events
    return [
        (EventKind(events.kind[k]).name, events.resources[events.resource[k]], int(events.offset[k]), int(n))
        for k, n in enumerate(events.nbytes)
    ]


def buffer(size: int) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(bytes(k % 251 for k in range(size)), size)
