"""One rank of a small gloo job that captures its own wire and collectives: what :mod:`benchmarks.clocks` aligns.

``python -m benchmarks.clocks_job FOLDER`` on a testbed's host; writes ``FOLDER/rank<r>.npz``.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dpro.clock.identity import CLOCK_ID, clock_id
from dpro.trace import wire
from dpro.trace.model import Collective, EventKind, Meta, TraceBuilder

STEPS = 10
#: bytes of a step's all-reduces, as buckets come: small ones first
BUCKETS = (4 << 10, 256 << 10, 1 << 20, 2 << 20)


def run(rank: int, world_size: int) -> TraceBuilder:
    """Compute (a sleep, longer on one rank in turn), then reduce the buckets, ``STEPS`` times; under the tracer."""
    tensors = [torch.ones(size // 4) for size in BUCKETS]
    for tensor in tensors:
        dist.all_reduce(tensor)  # connections, buffers
    meta = Meta(rank=rank, world_size=world_size, host=socket.gethostname(), extra={CLOCK_ID: clock_id()})
    builder, steps = TraceBuilder(meta), []
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
    folder = Path(sys.argv[1])
    wire.append(builder.freeze(steps), seen.events).save(folder / f"rank{rank}.npz")
    return builder


def main() -> None:
    """The environment is as torchrun sets it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="env://")
    run(rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
