"""A key-value store over TCP, where ranks meet that have no store of their framework's.

A :class:`Server` on rank 0 keeps the values and answers in threads; every rank has a :class:`Client`. Both prove in the
handshake that they know the job's secret, which is itself never sent (HMAC of two nonces): strangers on the network
can neither read nor write. Then frames: 4 bytes of length, fields of 4 bytes of length and content; the first field is
the operation. Nothing is unpickled, and nothing is larger than :data:`MOST_FRAME_BYTES`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable

#: Of one request or answer.
MOST_FRAME_BYTES = 8 << 20
#: Of all keys and values together.
_MOST_BYTES = 4 << 30
#: What a value costs beside its bytes.
_ENTRY_BYTES = 128
_MAGIC = b"dpro store 1\n"
_NONCE_BYTES, _DIGEST_BYTES = 16, 32
#: How long a stranger may take over the handshake, and how many at once; who comes after waits in the backlog.
_HANDSHAKE_S = 5.0
_STRANGERS = 32
_LENGTH = struct.Struct(">I")


class Table:
    """The values. Any thread may call; a key is text, a value bytes or text."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Raises OSError where there is no room."""
        with self._lock:
            self._set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Raises LookupError where there is none."""
        with self._lock:
            if key not in self._values:
                raise LookupError(f"the store has no {key[:80]!r}")
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        with self._lock:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set to ``desired`` what is ``expected`` ("": not there); what is there afterwards, or else ``expected``."""
        with self._lock:
            if self._values.get(key, b"") == _bytes(expected):
                self._set(key, _bytes(desired))
            return self._values.get(key, _bytes(expected))

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        with self._lock:
            value = self._values.pop(key, None)
            if value is None:
                return False
            self._bytes -= _cost(key, value)
            return True

    def _set(self, key: str, value: bytes) -> None:
        former = self._values.get(key)
        total = self._bytes + _cost(key, value) - (0 if former is None else _cost(key, former))
        if total > _MOST_BYTES:
            raise OSError(f"the store is full ({_MOST_BYTES >> 20} MiB)")
        self._values[key], self._bytes = value, total


class Server:
    """Serves a :class:`Table` until :meth:`close`, or until its process ends.

    Args:
        address: of this host; nobody is heard at others.
    """

    def __init__(self, address: str) -> None:
        self.secret = secrets.token_hex(16)
        self._table = Table()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._listening = socket.create_server((address, 0))
        self.host, self.port = self._listening.getsockname()[:2]
        _alive.add(self)
        self._start(self._accept)

    def close(self) -> None:
        """Hang up on everybody."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listening.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def forget(self) -> None:
        """In a forked child: let go of the parent's sockets, which stay open there."""
        for held in (self._listening, *self._connections):
            held.close()

    @staticmethod
    def _start(target: Callable[..., None], *args: socket.socket) -> None:
        threading.Thread(target=target, args=args, name="dpro-store", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._strangers.acquire()
            try:
                connection, _ = self._listening.accept()
            except OSError:
                self._strangers.release()
                self._closed.wait(0.1)  # out of file descriptors, perhaps for a while only
                continue
            with self._lock:
                self._connections.add(connection)
            try:
                self._start(self._serve, connection)
            except RuntimeError:  # no more threads
                self._drop(connection)
                self._strangers.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            try:
                self._admit(connection)
            finally:
                self._strangers.release()
            connection.settimeout(None)
            while not self._closed.is_set():
                _send(connection, self._answer(_receive(connection)))
        except (OSError, ValueError):
            pass  # it went away, or talks nonsense: its rank will notice
        finally:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _admit(self, connection: socket.socket) -> None:
        """Raises ConnectionError where the other one does not know the secret."""
        deadline = time.monotonic() + _HANDSHAKE_S
        own = secrets.token_bytes(_NONCE_BYTES)
        _tune(connection)
        connection.settimeout(_HANDSHAKE_S)
        connection.sendall(_MAGIC + own)
        given = _read(connection, _NONCE_BYTES + _DIGEST_BYTES, deadline)
        nonces = own + given[:_NONCE_BYTES]
        if not hmac.compare_digest(given[_NONCE_BYTES:], _digest(self.secret, b"client" + nonces)):
            raise ConnectionError("wrong secret")
        connection.sendall(_digest(self.secret, b"server" + nonces))

    def _answer(self, fields: list[bytes]) -> list[bytes]:
        """Raises ValueError where it is no request."""
        table = self._table
        operation, *given = fields
        try:
            if operation == b"set" and len(given) == 2:
                table.set(given[0].decode(), given[1])
                return [b"+"]
            if operation == b"get" and len(given) == 1:
                return [b"+", table.get(given[0].decode())]
            if operation == b"check":
                return [b"+", b"1" if table.check([key.decode() for key in given]) else b"0"]
            if operation == b"compare_set" and len(given) == 3:
                return [b"+", table.compare_set(given[0].decode(), given[1], given[2])]
            if operation == b"delete_key" and len(given) == 1:
                return [b"+", b"1" if table.delete_key(given[0].decode()) else b"0"]
        except LookupError as error:
            return [b"?", str(error.args[0]).encode()]
        except OSError as error:
            return [b"-", str(error).encode()]
        raise ValueError("no such request")


class Client:
    """One rank's way to the store; the methods of :class:`Table`. Any thread may call.

    Raises ConnectionError at once where the server is gone, TimeoutError where it does not answer; after either there
    is no way back.

    Args:
        timeout_s: for the connection, and for every answer.
    """

    def __init__(self, host: str, port: int, secret: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._broken = ""
        deadline = time.monotonic() + timeout_s
        self._socket = socket.create_connection((host, port), timeout_s)
        _alive.add(self)
        try:
            _tune(self._socket)
            self._introduce(secret, deadline)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(b"set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask(b"get", key)

    def check(self, keys: list[str]) -> bool:
        return self._ask(b"check", *keys) == b"1"

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask(b"compare_set", key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete_key", key) == b"1"

    def close(self) -> None:
        self._broken = self._broken or "the connection to the store was closed"
        self._socket.close()

    def forget(self) -> None:
        """In a forked child: let go of the parent's socket, which stays open there."""
        self._socket.close()

    def _introduce(self, secret: str, deadline: float) -> None:
        hello = _read(self._socket, len(_MAGIC) + _NONCE_BYTES, deadline)
        if not hello.startswith(_MAGIC):
            raise ConnectionError("what answers there is no store of dpro's")
        own = secrets.token_bytes(_NONCE_BYTES)
        nonces = hello[len(_MAGIC) :] + own
        self._socket.sendall(own + _digest(secret, b"client" + nonces))
        if not hmac.compare_digest(_read(self._socket, _DIGEST_BYTES, deadline), _digest(secret, b"server" + nonces)):
            raise ConnectionError("the store does not know the secret")

    def _ask(self, operation: bytes, *fields: bytes | str) -> bytes:
        if os.getpid() != self._pid:
            raise ConnectionError("a forked child is no rank")
        with self._lock:
            if self._broken:
                raise ConnectionError(self._broken)
            request = _frame([operation, *map(_bytes, fields)])
            try:
                deadline = time.monotonic() + self._timeout_s
                self._socket.settimeout(self._timeout_s)
                self._socket.sendall(request)
                status, *answer = _receive(self._socket, deadline)
            except BaseException as error:  # also an interrupt: the next answer would be that of this request
                self._socket.close()
                if isinstance(error, TimeoutError):
                    self._broken = f"the store did not answer within {self._timeout_s:g} s"
                    raise TimeoutError(self._broken) from error
                self._broken = "the store is gone (rank 0 has ended?)"
                if isinstance(error, (OSError, ValueError)):
                    raise ConnectionError(self._broken) from error
                raise
        if status == b"?":
            raise LookupError(answer[0].decode())
        if status == b"-":
            raise OSError(answer[0].decode())
        return answer[0] if answer else b""


# -- frames ------------------------------------------------------------------------------------------


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _cost(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES


def _digest(secret: str, text: bytes) -> bytes:
    return hmac.digest(secret.encode(), text, "sha256")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _frame(fields: list[bytes]) -> bytes:
    """Raises ValueError where it is too large to be sent."""
    body = b"".join(part for field in fields for part in (_LENGTH.pack(len(field)), field))
    if len(body) > MOST_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes are more than the store takes at once")
    return _LENGTH.pack(len(body)) + body


def _send(connection: socket.socket, fields: list[bytes]) -> None:
    connection.sendall(_frame(fields))


def _receive(connection: socket.socket, deadline: float | None = None) -> list[bytes]:
    """The fields of the next frame, at least one.

    Raises:
        ValueError: it is none, or too large.
        OSError: the other end is gone, or ``deadline`` (of ``time.monotonic()``) is past.
    """
    (size,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    if size > MOST_FRAME_BYTES:
        raise ValueError("oversized frame")
    body = _read(connection, size, deadline)
    fields, at = [], 0
    while at < size:
        (length,) = _LENGTH.unpack(body[at : at + _LENGTH.size].ljust(_LENGTH.size, b"\xff"))
        at += _LENGTH.size
        if at + length > size:
            raise ValueError("malformed frame")
        fields.append(body[at : at + length])
        at += length
    if not fields:
        raise ValueError("empty frame")
    return fields


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    buffer = bytearray(size)
    at = 0
    while at < size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        got = connection.recv_into(memoryview(buffer)[at:])
        if not got:
            raise ConnectionError("the other end has closed")
        at += got
    return bytes(buffer)


# -- fork --------------------------------------------------------------------------------------------

_alive: weakref.WeakSet[Server | Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # a socket that a child holds open would hide from the other ranks that this process has died
    for one in list(_alive):
        one.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
