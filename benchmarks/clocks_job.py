"""One rank of a small gloo job that captures its own wire and collectives: what :mod:`benchmarks.clocks` aligns.

``python -m benchmarks.clocks_job FOLDER`` on a testbed's host; writes ``FOLDER/rank<r>.npz``.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from pathlib import Path

from dpro.clock.identity import CLOCK_ID, clock_id
from dpro.trace import wire
from dpro.trace.model import Collective, EventKind, Meta, TraceBuilder

STEPS = 10
#: key of ``meta.extra``: [what this process reads, what the kernel says] before and after; they differ under faketime
READINGS = "readings_ns"
_SYS_CLOCK_GETTIME = {"x86_64": 228, "aarch64": 113}
#: bytes of a step's all-reduces, as buckets come: small ones first
BUCKETS = (4 << 10, 256 << 10, 1 << 20, 2 << 20)


def readings() -> list[int]:
    """This process's monotonic clock, and the kernel's, which no preloaded library is asked about; in one moment."""
    libc, number = ctypes.CDLL(None), _SYS_CLOCK_GETTIME[os.uname().machine]
    spec = (ctypes.c_long * 2)()

    def kernel() -> int:
        libc.syscall(number, time.CLOCK_MONOTONIC, spec)
        return int(spec[0] * 10**9 + spec[1])

    tries = [(kernel(), time.monotonic_ns(), kernel()) for _ in range(100)]
    before, read, after = min(tries, key=lambda t: t[2] - t[0])
    return [read, (before + after) // 2]


def run(rank: int, world_size: int) -> None:
    """Compute (a sleep, longer on one rank in turn), then reduce the buckets, ``STEPS`` times; under the tracer."""
    import torch
    import torch.distributed as dist

    tensors = [torch.ones(size // 4) for size in BUCKETS]
    for tensor in tensors:
        dist.all_reduce(tensor)  # connections, buffers
    meta = Meta(rank=rank, world_size=world_size, host=socket.gethostname(), extra={CLOCK_ID: clock_id()})
    builder, steps = TraceBuilder(meta), []
    meta.extra[READINGS] = [readings()]
    with wire.capture() as seen:
        for step in range(STEPS):
            began = time.monotonic_ns()
            time.sleep(0.03 if step % world_size == rank else 0.02)
            for tensor in tensors:
                start = time.monotonic_ns()
                dist.all_reduce(tensor)
                builder.add(
                    "all_reduce", EventKind.COLLECTIVE, "gloo", start, time.monotonic_ns(), Collective("all_reduce")
                )
            steps.append((began, time.monotonic_ns()))
    if seen.why or seen.dropped:
        raise RuntimeError(seen.why or f"{seen.dropped} socket calls lost")
    meta.extra[READINGS].append(readings())
    folder = Path(sys.argv[1])
    wire.append(builder.freeze(steps), seen.events).save(folder / f"rank{rank}.npz")


def main() -> None:
    """The environment is as torchrun sets it."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="env://")
    run(rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
