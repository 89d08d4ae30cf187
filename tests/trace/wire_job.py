"""One rank of a gloo job that traces its own wire, one capture per collective: ``wire_job.py RANK PORT``.

Prints JSON: per capture the operation, its bytes, and per directed stream and direction what was seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import termios
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dpro.trace import gloo, wire
from dpro.trace.model import EventKind

OPERATIONS = ("all_reduce", "broadcast", "all_gather")
SIZES = (4, 1000, 65536, 1 << 20, 64 << 20)


def run(operation: str, nbytes: int) -> None:
    tensor = torch.ones(nbytes // 4)
    if operation == "all_reduce":
        dist.all_reduce(tensor)
    elif operation == "broadcast":
        dist.broadcast(tensor, 0)
    else:
        dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor)


def settle(store: dist.Store, key: str, world: int) -> None:
    """Until every rank is through and nothing waits in a socket: then every byte was sent and read."""
    store.add(key, 1)
    while int(store.add(key, 0)) < world:
        time.sleep(0.001)
    while any(queued(int(number)) for number in os.listdir("/proc/self/fd")):
        time.sleep(0.001)
    time.sleep(0.05)  # a call that has returned is about to be noted


def queued(number: int) -> int:
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            with socket.socket(fileno=os.dup(number)) as end:
                if end.family == socket.AF_INET and end.type == socket.SOCK_STREAM:
                    return int(struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, bytes(4)))[0])
    return 0


def summary(seen: wire.Seen) -> list[dict[str, Any]]:
    events, found = seen.events, []
    for stream in range(len(events.resources)):
        for kind in (EventKind.SEND, EventKind.RECV):
            mine = np.flatnonzero((events.resource == stream) & (events.kind == kind))
            if not len(mine):
                continue
            offset, nbytes = events.offset[mine], events.nbytes[mine]
            frames = gloo.parse(offset, nbytes, events.head[mine], events.head_bytes[mine])
            found.append(
                {
                    "stream": events.resources[stream],
                    "kind": kind.name,
                    "first": int(offset[0]),
                    "bytes": int(nbytes.sum()),
                    "contiguous": bool((offset[1:] == offset[:-1] + nbytes[:-1]).all()),
                    "framed": int(frames.length.sum()) + gloo.HEADER_BYTES * len(frames),
                    "payload": int(frames.length.sum()),
                    "slots": sorted(set(frames.slot[frames.length > 0].tolist())),
                }
            )
    return found


def main(rank: int, port: int, world: int = 2) -> None:
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    run("all_reduce", 4)  # connects
    captures = []
    for operation in OPERATIONS:
        for nbytes in SIZES:
            settle(store, f"before {operation} {nbytes}", world)
            with wire.capture() as seen:
                settle(store, f"on {operation} {nbytes}", world)
                run(operation, nbytes)
                settle(store, f"after {operation} {nbytes}", world)
            captures.append(
                {"operation": operation, "nbytes": nbytes, "dropped": seen.dropped} | {"seen": summary(seen)}
            )
    print(json.dumps(captures))
    settle(store, "end", world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
