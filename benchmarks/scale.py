"""What a step takes among 8 to 1,024 workers, through one of them, and how long it takes to say so.

Knows nothing of real traces: the step is made up (see ``replay_speed``), eight ranks that do the same. Up to 32
workers the job is also built with every worker and every message, which is what ``error_pct`` holds the answer against.
``seconds`` is everything from the graph of the eight ranks to the answer: collapsing, the collectives, the replay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.replay_speed import ddp_graph
from dpro.graph.graph import Graph, OpKind
from dpro.graph.topology import Link, Network
from dpro.replay.engine import replay
from dpro.replay.scale import at_size, compute_only_ns, whole_job

CAPTURED_RANKS = 8
WORKERS = (8, 16, 32, 128, 1024)
WHOLE_UP_TO = 32
BUCKET_BYTES = 25 << 20  # what DDP closes a bucket at
#: 100 Gbit/s between hosts, 2.4 Tbit/s inside one.
BETWEEN, INSIDE = Link(latency_ns=10_000, ns_per_byte=0.08), Link(latency_ns=3_000, ns_per_byte=1 / 300)
GPUS_PER_HOST = 8


def symmetric_step() -> Graph:
    """One step of :func:`~benchmarks.replay_speed.ddp_graph` in which every rank takes the times of rank 0."""
    graph = ddp_graph(None, CAPTURED_RANKS)
    rank = graph.column("rank")
    first = np.flatnonzero(rank == 0)
    for key in ("duration", "gap"):
        for r in range(1, CAPTURED_RANKS):
            graph.set_many(np.flatnonzero(rank == r), key, graph.column(key)[first])
    collectives = np.flatnonzero(graph.column("kind") == OpKind.COLLECTIVE)
    graph.set_many(collectives, "nbytes", np.full(len(collectives), BUCKET_BYTES))
    return graph


def networks(workers: int) -> list[tuple[str, Network]]:
    return [
        ("ring", Network("ring", workers, BETWEEN)),
        ("two-level", Network("two-level", workers, BETWEEN, INSIDE, GPUS_PER_HOST)),
        ("tree", Network("tree", workers, BETWEEN)),
        (f"ps, {workers // 2} servers", Network("ps", workers, BETWEEN, servers=workers // 2)),
        ("ps, on the workers' hosts", Network("ps", workers, BETWEEN)),
    ]


def measure(workers: Sequence[int]) -> list[dict[str, object]]:
    graph = symmetric_step()
    alone_ns = compute_only_ns(graph)
    out: list[dict[str, object]] = []
    for count in workers:
        for name, network in networks(count):
            begin = time.perf_counter()
            small = at_size(graph, network)
            step_ns = replay(small).makespan_ns
            seconds = time.perf_counter() - begin
            whole_ns = whole_seconds = None
            if count <= WHOLE_UP_TO:
                begin = time.perf_counter()
                whole_ns = replay(whole_job(graph, network)).makespan_ns
                whole_seconds = round(time.perf_counter() - begin, 4)
            out.append(
                {
                    "workers": count,
                    "topology": name,
                    "seconds": round(seconds, 4),
                    "ops": len(small),
                    "makespan_ms": step_ns / 1e6,
                    "full_makespan_ms": None if whole_ns is None else whole_ns / 1e6,
                    "full_seconds": whole_seconds,
                    "error_pct": None if whole_ns is None else 100 * abs(step_ns / whole_ns - 1),
                    "efficiency_pct": round(100 * alone_ns / step_ns, 2),
                }
            )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help=f"multiples of {GPUS_PER_HOST}")
    parser.add_argument("--json", action="store_true", help="print one JSON document, a list")
    args = parser.parse_args(argv)
    found = measure(args.workers)
    if args.json:
        print(json.dumps(found))
        return
    for row in found:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
