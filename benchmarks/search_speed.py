"""How long the search takes for a job of 16 workers, what each of its accelerations is worth, delta replay and ranks.

A model is captured on two hosts (DDP, 1 Gbit/s) and its two workers' steps are taken eight times each: so the graph of
16 workers has a real step's ops and times. The same hosts' ops under BytePS (four servers on hosts of their own, which
all workers share) are searched as well. Every row is one search; ``switches`` says what was on. ``predicted_ms`` is the
whole graph's replay of the best plan, whatever was looked at, so rows of a job can be compared.

``delta``: replays of a graph of 100,000 ops (:mod:`benchmarks.replay_speed`, one step of as many ranks as that takes)
after one bucket was changed, against whole ones, which are told both with and without the new arrays that an edit costs
them. ``ranks``: the same search with the help of other ranks, processes that talk through torch's store, as in a DDP
job.

``python -m benchmarks.search_speed --json`` prints ``{place, searches, delta, ranks}``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed import TCPStore

from benchmarks.cells import LINKS, MODELS, Jobs, JobSet, place, say
from benchmarks.predict import load
from benchmarks.replay_speed import ddp_graph
from benchmarks.speedup import SETTINGS
from dpro.adapter import Knob
from dpro.cost.ps import MODEL, PsModel
from dpro.cost.sync import SyncModel
from dpro.graph.assemble import assemble
from dpro.graph.graph import Bucket, Graph, OpKind
from dpro.graph.packed import pack, unpack
from dpro.graph.ps_layout import Layout
from dpro.graph.ps_ops import INFO, Ps
from dpro.passes.contention import relieve
from dpro.passes.push_pull import add_parts
from dpro.passes.tensor_fusion import TensorFusion
from dpro.planning import inform
from dpro.replay.delta import DeltaReplay
from dpro.replay.engine import replay, replay_arrays
from dpro.search.critical_path import PARTITION, TURNED, optimize
from dpro.search.team import Team, assist
from dpro.search.view import ALL, Speedups
from dpro.trace.byteps import DEFAULT_PARTITION_BYTES, cut
from dpro_integrations.exchange import StoreExchange

WORKERS, SERVERS = 16, 4
STEPS = (
    ("none", Speedups(False, False, False, False)),
    ("+ coarsened view", Speedups(True, False, False, False)),
    ("+ partial replay", Speedups(True, False, True, False)),
    ("+ symmetry", Speedups(True, True, True, False)),
    ("+ delta replay", ALL),
)
DDP_KNOBS = (TURNED - {Knob.GROUPS, Knob.CYCLE_TIME}) | {Knob.BUCKET_LIST}
#: Of a search without accelerations, s.
_LONGEST_S = 120.0
_MOST_STEPS = 400
#: Less than 32 MiB, up to which glibc goes.
_OF_TRAINING_BYTES = 31 << 20
_DELTA_OPS, _DELTA_RANKS = 100_000, 64


def captured(model: str, folder: Path) -> list[Path]:
    """Trace files of the two ranks of a job tuned just now, with the times of blocks that could be compiled."""
    with JobSet(Jobs(model, "ddp", 2)) as job, tempfile.TemporaryDirectory() as runs:
        job.bed.set_rate(LINKS["1gbit"])
        job.ask("tune", settings={**SETTINGS, "trials": 1, "runs_dir": runs}, most_steps=_MOST_STEPS)
        files = [folder / f"{model}-{rank}.npz" for rank in range(2)]
        for rank, file in enumerate(files):
            shutil.copy(next(Path(runs).glob(f"*/rank{rank}/trace.npz")), file)
    return files


def of_many(files: list[Path], workers: int) -> Graph:
    """The step of ``workers`` ranks that do in turn what the captured ones did."""
    traces = load(files[rank % len(files)] for rank in range(workers))
    for rank, trace in enumerate(traces):
        trace.meta.rank, trace.meta.world_size = rank, workers
    graph = assemble(traces)
    inform(graph, traces)
    return graph


def under_byteps(graph: Graph, workers: int, servers: int) -> Graph:
    """The same hosts' ops with parameter servers, each link as fast as the captured ring's, partitions BytePS's own."""
    line: SyncModel = graph.info["sync"]
    relieve(graph, line)
    TensorFusion().apply(graph, ())
    out, _ = graph.subgraph(graph.column("alive").copy())
    links = {(w, s): (f"link/*>server{s}", f"link/server{s}>*") for w in range(workers) for s in range(servers)}
    layout = Layout(tuple(range(workers)), servers, "djb2", {}, links)
    one_way = SyncModel(line.latency_ns / 2, line.ns_per_byte / 2)
    bounds = {t: min(info.nbytes, DEFAULT_PARTITION_BYTES) for t, info in enumerate(out.tensors) if info.nbytes > 0}
    costs = PsModel({name: one_way for pair in links.values() for name in pair})
    out.info |= {INFO: Ps(layout, bounds), MODEL: costs}
    del out.info["sync"]
    parts = {
        t: add_parts(out, (t,), cut(out.tensors[t].nbytes, bound), out.info[INFO], costs) for t, bound in bounds.items()
    }
    out.set_buckets([Bucket((t,), out.tensors[t].nbytes, ops) for t, ops in parts.items()])
    return out


def searches(model: str, comm: str, graph: Graph, knobs: set[Knob], budget_s: float) -> Iterator[dict[str, Any]]:
    """One row for each of :data:`STEPS`."""
    for name, speedups in STEPS:
        limit_s = budget_s if speedups == ALL else _LONGEST_S
        found = optimize(graph, knobs=knobs, time_budget_s=limit_s, speedups=speedups)
        best = found.candidates[0].predicted_ms if found.candidates else found.baseline_ms
        row = {
            "model": model, "comm": comm, "workers": WORKERS, "ops": len(graph), "seconds": round(found.seconds, 3),
            "evaluations": found.evaluations, "baseline_ms": round(found.baseline_ms, 3),
            "predicted_ms": round(best, 3),
            "stopped": found.stopped, "step": name, "switches": asdict(speedups),
        }  # fmt: skip
        say(f"  {model}, {comm}, {name}: {row['seconds']} s, {found.evaluations} replays, {row['predicted_ms']} ms")
        yield row


def delta() -> dict[str, Any]:
    """Each bucket of a graph of 100,000 ops takes a third less, then is two of half its time; answers are compared."""
    graph = ddp_graph(_DELTA_OPS, _DELTA_RANKS)
    base = DeltaReplay(graph)
    kinds = graph.column("kind")
    buckets = np.flatnonzero(graph.column("alive") & (kinds == OpKind.COLLECTIVE)).tolist()
    rows = []
    for op in buckets:
        for halves in (False, True):
            mark = graph.mark()
            time_ns = int(graph.column("duration")[op])
            if halves:
                _halve(graph, op, time_ns)
            else:
                graph.set(op, "duration", 2 * time_ns // 3)
            told = [_seconds(base.makespan_ns) for _ in range(5)]
            began = time.perf_counter()
            arrays = graph.arrays()
            frozen_s = time.perf_counter() - began
            whole = [_seconds(lambda arrays=arrays: replay_arrays(arrays).makespan_ns) for _ in range(5)]
            here, there = base.replay(), replay(graph)
            same = all(np.array_equal(getattr(here, key), getattr(there, key)) for key in ("start", "end", "cause"))
            delta_s, whole_s = (statistics.median(s for _, s in some) for some in (told, whole))
            rows.append(
                {
                    "delta_ms": round(1e3 * delta_s, 4), "whole_ms": round(1e3 * whole_s, 3),
                    "arrays_ms": round(1e3 * frozen_s, 3), "looked_at": base.looked_at,
                    "equal": same and told[0][0] == whole[0][0],
                }
            )  # fmt: skip
            graph.undo(mark)
    ratios = [row["whole_ms"] / row["delta_ms"] for row in rows]
    with_arrays = [(row["whole_ms"] + row["arrays_ms"]) / row["delta_ms"] for row in rows]
    return {
        "ops": len(graph), "edits": len(rows), "equal": all(row["equal"] for row in rows), "whole_instead": base.whole,
        "median_ratio": round(statistics.median(ratios), 1), "least_ratio": round(min(ratios), 1),
        "median_ratio_with_arrays": round(statistics.median(with_arrays), 1),
        "least_ratio_with_arrays": round(min(with_arrays), 1),
        "rows": rows,
    }  # fmt: skip


def _halve(graph: Graph, op: int, time_ns: int) -> None:
    """Two collectives, one after the other, in place of one."""
    pairs = graph.edges()
    before, after = pairs[pairs[:, 1] == op, 0].tolist(), pairs[pairs[:, 0] == op, 1].tolist()
    place = {"resource": int(graph.column("resource")[op]), "duration": time_ns // 2}
    graph.remove_ops([op])
    first = graph.add_op("half", OpKind.COLLECTIVE, after=before, **place)
    second = graph.add_op("half", OpKind.COLLECTIVE, after=[first], **place)
    for user in after:
        graph.add_edge(second, user)


def _seconds(call: Any) -> tuple[int, float]:
    began = time.perf_counter()
    answer = call()
    return answer, time.perf_counter() - began


def with_ranks(graph: Graph, counts: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """The search without accelerations, in turns with 1, 2 and 4 ranks; the plan is compared with that of one rank.

    ``speedup``: the median, over the rounds, of what one rank took and what so many took right after.
    """
    blob, sync = pack(graph), graph.info["sync"]
    server = TCPStore("127.0.0.1", 0, is_master=True)
    context = multiprocessing.get_context("spawn")
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    plans: dict[int, set[str]] = {count: set() for count in counts}
    shared: dict[int, int] = {}
    for turn in range(rounds):
        for count in counts:
            key = f"{turn}/{count}"
            others = [
                context.Process(target=_help, args=(server.port, rank, count, key), daemon=True)
                for rank in range(1, count)
            ]
            for process in others:
                process.start()
            exchange = StoreExchange(server, 0, count)
            exchange.post(f"{key}/here", b"")
            exchange.collect(f"{key}/here", 60.0)
            mine = unpack(blob)
            mine.info["sync"] = sync
            team = Team(exchange, key)
            began = time.monotonic()
            found = optimize(mine, knobs=set(DDP_KNOBS), time_budget_s=600.0, speedups=STEPS[0][1], team=team)
            seconds[count].append(time.monotonic() - began)
            team.end()
            plans[count].add(found.candidates[0].plan.sha256)
            shared[count] = team.evaluations
            for process in others:
                process.join(30)
            say(f"  {count} ranks: {seconds[count][-1]:.2f} s, {team.evaluations} replays by others")
    alone = seconds[counts[0]]
    return [
        {
            "ranks": count, "seconds": round(statistics.median(times), 3), "replayed_by_others": shared[count],
            "speedup": round(statistics.median(one / many for one, many in zip(alone, times, strict=True)), 3),
            "same_plan": plans[count] == plans[counts[0]] and len(plans[count]) == 1,
        }
        for count, times in seconds.items()
    ]  # fmt: skip


def _help(port: int, rank: int, world_size: int, key: str) -> None:
    from dpro.search import judge  # noqa: F401  (in a job, while rank 0 still assembles the graph)

    # a rank that trains has had larger arrays, and given them back: since then glibc keeps what smaller ones leave
    # (mallopt(3), M_MMAP_THRESHOLD), where a fresh process would fetch it page by page for each replay
    np.ones(_OF_TRAINING_BYTES, np.uint8)
    exchange = StoreExchange(TCPStore("127.0.0.1", port), rank, world_size)
    exchange.post(f"{key}/here", b"")
    assist(exchange, key, 600.0)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_speed", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--budget-s", type=float, default=10.0, help="of a search with all accelerations")
    parser.add_argument("--rounds", type=int, default=3, help="searches for each number of ranks")
    parser.add_argument("--traces", type=Path, help="folder with MODEL-0.npz and MODEL-1.npz; else they are captured")
    args = parser.parse_args()
    began = time.monotonic()
    result: dict[str, Any] = {"place": place(), "searches": [], "ranks": [], "delta": delta()}
    say(f"delta replay: {result['delta']['median_ratio']}x, least {result['delta']['least_ratio']}x")
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models:
            files = (
                [args.traces / f"{model}-{rank}.npz" for rank in range(2)]
                if args.traces
                else captured(model, Path(scratch))
            )
            graph = of_many(files, WORKERS)
            result["searches"] += searches(model, "ddp", graph, set(DDP_KNOBS), args.budget_s)
            result["ranks"] += [{"model": model, **row} for row in with_ranks(graph, (1, 2, 4), args.rounds)]
            served = under_byteps(graph, WORKERS, SERVERS)
            result["searches"] += searches(model, "byteps", served, set(PARTITION), args.budget_s)
    result["place"]["seconds"] = round(time.monotonic() - began)
    if args.json:
        print(json.dumps(result))
    else:
        for row in result["searches"]:
            what = f"{row['model']:12} {row['comm']:7} {row['step']:18}"
            print(f"{what} {row['seconds']:8.2f} s {row['predicted_ms']:9.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
