"""Processes for the tests of the store: ``python -m tests.frameworks.store_peer ROLE …``. Standard library alone.

Each prints a line when it is there, then waits for one on stdin before it goes on.
"""

from __future__ import annotations

import os
import sys
import time

from dpro_integrations import store


def serve(fork: str) -> None:
    """A server until it is killed; ``fork``: with a child that lives on, as data loaders have them."""
    server = store.Server("127.0.0.1")
    table = store.Client(server.host, server.port, server.secret, 20.0)
    table.set("of rank 0", "here")
    child = 0
    if fork == "fork":
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, b"!")
            time.sleep(100)
            os._exit(0)
        os.read(reader, 1)
    print(server.host, server.port, server.secret, child, flush=True)
    sys.stdin.readline()


def propose(host: str, port: str, secret: str, own: str) -> None:
    """Waits for the start, then proposes for many keys at once."""
    client = store.Client(host, int(port), secret, 20.0)
    print("ready", flush=True)
    sys.stdin.readline()
    print(*(client.compare_set(f"key {k}", "", own).decode() for k in range(200)), flush=True)


def half(host: str, port: str, secret: str) -> None:
    """Hands in half a request and waits to be killed."""
    client = store.Client(host, int(port), secret, 20.0)
    client.set("whole", "1")
    frame = store._frame([b"set", b"half", b"x" * 1000])
    client._socket.sendall(frame[: len(frame) // 2])
    print("ready", flush=True)
    sys.stdin.readline()


def forked(host: str, port: str, secret: str) -> None:
    """What a forked child gets when it uses its parent's client; the parent goes on."""
    client = store.Client(host, int(port), secret, 20.0)
    reader, writer = os.pipe()
    if not os.fork():
        try:
            client.set("by the child", "1")
            said = "it was let in"
        except ConnectionError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.wait()
    client.set("by the parent", "1")
    print(os.read(reader, 100).decode(), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
