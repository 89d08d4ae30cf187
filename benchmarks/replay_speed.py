"""How fast the replay engine runs and how much memory it needs, on a graph like a DDP job's.

Knows nothing of real traces: the graph is made up, but has their shape (host threads that launch
kernels with a latency, two streams per rank, buckets joined across ranks) and their numbers
(microsecond kernels, jitter, stragglers), since both decide the engine's speed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timezone

import numpy as np

from dpro.graph.graph import Arrays, Graph, OpKind
from dpro.replay.engine import Replay, replay_arrays

LAYERS = 60  # with parameters; a bucket is closed every LAYERS_PER_BUCKET of them
LAYERS_PER_BUCKET = 5
KERNELS_PER_LAYER = 4
US = 1_000


def ddp_graph(ops: int | None, ranks: int = 8, seed: int = 0) -> Graph:
    """``ops`` ops: as many training steps of ``ranks`` workers as that takes, one after another; None: one step.

    Per kernel there is a launch on the host thread and the kernel on the compute stream; the
    communication stream waits for the gradients of a bucket, all ranks join in one COLLECTIVE, and
    the host waits for the last one before the optimizer's kernels. Each rank has its own speed.
    """
    rng = random.Random(seed)
    graph = Graph()
    graph.ranks = ranks
    cpu = [graph.resource(f"rank{r}/cpu/main") for r in range(ranks)]
    compute = [graph.resource(f"rank{r}/stream/7") for r in range(ranks)]
    comm = [graph.resource(f"rank{r}/stream/20") for r in range(ranks)]
    ring = graph.resource("group/default")
    speed = [rng.uniform(0.95, 1.1) for _ in range(ranks)]
    host: list[list[int]] = [[] for _ in range(ranks)]  # last op of the thread, if any
    done = [0] * ranks

    def on_host(rank: int, name: str, us: float, *after: int) -> int:
        op = graph.add_op(
            name,
            OpKind.LOCAL,
            resource=cpu[rank],
            duration=int(us * US * rng.uniform(0.8, 1.2)),
            gap=int(2 * US * rng.random()),
            rank=rank,
            after=[*host[rank], *after],
        )
        host[rank] = [op]
        return op

    def kernel(rank: int, name: str, kind: OpKind, us: float, needs: Sequence[int] = ()) -> int:
        launch = on_host(rank, "cudaLaunchKernel", 5)
        return graph.add_op(
            name,
            kind,
            resource=compute[rank],
            duration=int(us * US * speed[rank] * rng.uniform(0.9, 1.1)),
            gap=4 * US,
            rank=rank,
            after=[launch, *needs],
        )

    def step() -> None:
        forward: list[list[int]] = [[] for _ in range(ranks)]  # kernels, by rank
        for rank in range(ranks):
            for layer in range(LAYERS):
                for k in range(KERNELS_PER_LAYER):
                    forward[rank].append(kernel(rank, f"forward{layer}.{k}", OpKind.FORWARD, rng.uniform(4, 60)))
        for bucket in range(LAYERS // LAYERS_PER_BUCKET):
            arrivals = []
            for rank in range(ranks):
                last = -1
                for layer in range(LAYERS_PER_BUCKET):
                    for k in range(KERNELS_PER_LAYER):
                        name, activation = f"backward{bucket}.{layer}.{k}", forward[rank].pop()
                        kernel(rank, name + ".input", OpKind.BACKWARD, rng.uniform(4, 60), needs=[activation])
                        last = kernel(rank, name + ".weight", OpKind.BACKWARD, rng.uniform(4, 60), needs=[activation])
                launch = on_host(rank, "c10d::allreduce_", 15)
                ready = [launch, last]
                arrivals.append(
                    graph.add_op("arrive", OpKind.OUT, resource=comm[rank], gap=4 * US, rank=rank, after=ready)
                )
            transfer_ns = int(1200 * US * rng.random())
            joined = graph.add_op("all_reduce", OpKind.COLLECTIVE, resource=ring, duration=transfer_ns, after=arrivals)
            for rank in range(ranks):
                done[rank] = graph.add_op("done", OpKind.IN, resource=comm[rank], rank=rank, after=[joined])
        for rank in range(ranks):
            on_host(rank, "cudaStreamSynchronize", 1, done[rank])
            for k in range(20):
                kernel(rank, f"adam{k}", OpKind.UPDATE, 30)

    step()
    while ops is not None and len(graph.column("kind")) < ops:
        step()
    if ops is not None:
        graph.remove_ops(list(range(ops, len(graph.column("kind")))))
    return graph


def graph_bytes(arrays: Arrays) -> int:
    return sum(getattr(arrays, f.name).nbytes for f in fields(arrays) if f.name != "resources")


def replay_bytes(result: Replay) -> int:
    return result.start.nbytes + result.end.nbytes + result.cause.nbytes + result.working_bytes


def give_back_freed_memory() -> None:
    """So that what the replay allocates shows as growth (glibc only; elsewhere it may show less)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_peak_bytes() -> int:
    """Peak resident memory of this process since :func:`reset_peak`, bytes (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def measure(ops: int, ranks: int, repeats: int) -> dict[str, object]:
    arrays = ddp_graph(ops, ranks).arrays()
    rows = len(arrays.ids)
    give_back_freed_memory()
    reset_peak()
    before = resident_peak_bytes()
    result = replay_arrays(arrays)
    grown = resident_peak_bytes() - before
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = replay_arrays(arrays)
        seconds.append(time.perf_counter() - begin)
    return {
        "ops": rows,
        "edges": len(arrays.indices),
        "resources": arrays.resources,
        "ops_per_s": round(rows / statistics.median(seconds)),
        "ops_per_s_best": round(rows / min(seconds)),
        "bytes_per_op": round((graph_bytes(arrays) + replay_bytes(result)) / rows, 1),
        "resident_growth_bytes_per_op": round(grown / rows, 1),  # of the replay alone, a cross-check
        "replay_bytes_per_op": round(replay_bytes(result) / rows, 1),
        "makespan_ns": result.makespan_ns,
        "seconds_median": statistics.median(seconds),
        "repeats": repeats,
        "machine": f"{platform.machine()} {cpu_model()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "")
    except OSError:
        return ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    found = measure(args.ops, args.ranks, args.repeats)
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{key:30} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
