"""What the links really carry: one TCP stream from rank 1 to rank 0, in MB/s.

Run on every host of a testbed (``RANK``, ``MASTER_ADDR``, ``MASTER_PORT``); rank 0 writes the figure to the file named
by its only argument. :func:`measure` does all of that.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time

from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.network import UNSHAPED, parse_rate

_CHUNK_BYTES = 1 << 18
_UNSHAPED_BITS_PER_S = 20e9  # about what a bare veth pair carries
_SKIP_S = 0.15  # slow start and the first full bucket are not the link's rate


def measure(bed: Testbed, seconds: float = 0.8) -> float:
    """Payload throughput between the first two hosts of ``bed``, in MB/s (10^6 bytes).

    Raises:
        RuntimeError: the hosts do not reach each other.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "rate")
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        bits_per_s = _UNSHAPED_BITS_PER_S if bed.rate == UNSHAPED else parse_rate(bed.rate)
        total_bytes = max(_CHUNK_BYTES, int(bits_per_s / 8 * (seconds + _SKIP_S)))
        command = [sys.executable, "-m", "benchmarks.testbed.throughput", out, str(total_bytes)]
        code = bed.run(command, cwd=root, timeout_s=30 + 4 * seconds)
        if code != 0:
            raise RuntimeError(f"throughput probe ended with exit code {code}")
        with open(out) as text:
            return float(text.read())


def _receive(address: tuple[str, int], total_bytes: int) -> float:
    with socket.create_server(address) as server:
        server.settimeout(20)
        peer, _ = server.accept()
    with peer:
        peer.settimeout(20)
        view = memoryview(bytearray(_CHUNK_BYTES))
        begin_ns = mark_ns = time.monotonic_ns()
        seen = mark_bytes = 0
        while seen < total_bytes and (got := peer.recv_into(view)):
            seen += got
            if mark_bytes == 0 and time.monotonic_ns() - begin_ns > _SKIP_S * 1e9:
                mark_ns, mark_bytes = time.monotonic_ns(), seen
        return (seen - mark_bytes) / (time.monotonic_ns() - mark_ns) * 1e3


def _send(address: tuple[str, int], total_bytes: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            link = socket.create_connection(address, timeout=20)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    with link:
        chunk, sent = bytes(_CHUNK_BYTES), 0
        while sent < total_bytes:
            link.sendall(chunk)
            sent += _CHUNK_BYTES


def main() -> None:
    """One rank's part of the measurement."""
    out, total_bytes = sys.argv[1], int(sys.argv[2])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        rate = _receive(address, total_bytes)
        with open(out, "w") as text:
            text.write(repr(rate))
    elif os.environ["RANK"] == "1":
        _send(address, total_bytes)


if __name__ == "__main__":
    main()
