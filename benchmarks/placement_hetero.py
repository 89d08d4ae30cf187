"""HeteroG on a heterogeneous cluster, in replay: what its strategies are worth, and how near the optimum they are.

The cluster is the paper's (CoNEXT 2020, section 6): 2 V100 in one machine (100 GbE, 16 GB), 4 1080Ti in two machines
(50 GbE, 11 GB), 2 P100 in one (50 GbE, 12 GB). A V100 is 1.1 to 1.9 times faster, type of op by type of op, drawn by a
seed; times in the public graphs count as a V100's, for the batch in the file and for a quarter of it. Between machines
there is a link for each pair, or (``shared``) one for all, as in the paper's simulator. ``hetero``: the four kinds of
data parallelism, served in turn and by rank, the best single device, and what is found, by rank and the same strategy
served in turn (``HeteroG``: M + 4 actions; ``HeteroG+machines``: data parallelism on one machine's devices is one,
too, as TAG has it); ``speedups`` compares with the best of the four. ``too_big``: VGG16, parameters eight times as big
and two optimizer slots, for which data parallelism has too little memory. ``enumerated``: two devices, all choices
tried. ``hetero_scale``: 2,000 ops.

``python -m benchmarks.placement_hetero --json`` prints ``{hetero, speedups, too_big, enumerated, hetero_scale}``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpro.graph.cluster import Cluster, Device, Line
from dpro.search.hetero import FIFO, RANK, Budget, Found, Space
from dpro.search.mcts import explore, search
from dpro.trace.model_graph import ModelGraph, read
from tests.search.step_models import layers, pair

GRAPHS = Path(__file__).resolve().parents[2] / "shared" / "graphs"
MODELS = (
    "pipedream/vgg16.graph.txt", "pipedream/resnet50.graph.txt", "pipedream/inception_v3.graph.txt",
    "pipedream/alexnet.graph.txt", "dnn_partitioning/operator_bert_l-3_training.json",
    "dnn_partitioning/operator_resnet50_training.json",
)  # fmt: skip
DATA_PARALLEL = ("EV-PS", "EV-AR", "CP-PS", "CP-AR")
GIB = 1 << 30
#: What is big in ``too_big``: parameters, and what is kept for each of them.
SCALED, SLOTS = 8, 3
SMALL_GROUPS, SMALL_EVALUATIONS = 4, 250
SCALE_LAYERS = 500


def heterogeneous(types: Iterable[str], *, shared: bool = False, seed: int = 0) -> Cluster:
    """The paper's eight GPUs; see the module text."""
    rng = random.Random(seed)
    kinds = ["default", *sorted(set(types))]
    speeds = {gpu: {kind: 1 / rng.uniform(1.1, 1.9) for kind in kinds} for gpu in ("1080Ti", "P100")}
    devices = [Device(f"v100-{i}", "V100", "v100", 16 * GIB) for i in range(2)]
    devices += [Device(f"1080ti-{i}", "1080Ti", f"1080ti-{'ab'[i // 2]}", 11 * GIB) for i in range(4)]
    devices += [Device(f"p100-{i}", "P100", "p100", 12 * GIB) for i in range(2)]
    inside, fast, slow = Line.of(12.0, 10), Line.of(12.5, 20), Line.of(6.25, 20)
    machines = {"1080ti-a": slow, "1080ti-b": slow, "p100": slow}
    return Cluster(devices, inside, fast, speeds=speeds, machines=machines, shared=shared)


def oversized(model: ModelGraph) -> ModelGraph:
    """With larger parameters, and optimizer slots for them."""
    ops = [replace(op, kept_bytes=op.kept_bytes * SCALED * SLOTS) for op in model.ops]
    tensors = [t if t.batched else replace(t, nbytes=t.nbytes * SCALED) for t in model.tensors]
    return ModelGraph(f"{model.name} x{SCALED}, {SLOTS - 1} slots", ops, tensors, model.said)


def of_model(
    model: ModelGraph, *, shared: bool, batch: float, seconds: float, machines: bool = False
) -> tuple[list[dict[str, Any]], Found]:
    """Rows of one model on the paper's cluster, and what was found."""
    cluster = heterogeneous((op.type for op in model.ops), shared=shared)
    what = {
        "graph": model.name, "cluster": "2 V100, 4 1080Ti, 2 P100", "link": "shared" if shared else "per pair",
        "batch": batch,
    }  # fmt: skip
    space = Space(model, cluster, batch=batch)
    rows: list[dict[str, Any]] = []

    def add(strategy: str, order: str, makespan_ns: int, took: float, fits: bool) -> None:
        ms = round(makespan_ns / 1e6, 3)
        rows.append(
            {**what, "strategy": strategy, "order": order, "makespan_ms": ms, "seconds": round(took, 2), "fits": fits}
        )

    alone = []
    for name, choice in space.uniform().items():
        for order in (FIFO, RANK):
            begun = time.perf_counter()
            outcome = space.outcome(choice, order)
            took = time.perf_counter() - begun
            if name in DATA_PARALLEL:
                add(name, order, outcome.makespan_ns, took, not outcome.over_bytes)
            elif order == RANK:
                alone.append((outcome.key, outcome, took))
    _, outcome, took = min(alone, key=lambda one: one[0])
    add("single device", RANK, outcome.makespan_ns, took, not outcome.over_bytes)
    found = search(model, cluster, batch=batch, budget=Budget(seconds), machines=machines)
    name = "HeteroG+machines" if machines else "HeteroG"
    add(name, found.order, found.makespan_ns, found.seconds, found.judged.fits)
    fits = not space.worth(found.strategy, FIFO).over_bytes
    add(name, FIFO, found.fifo_ns, 0.0, fits)
    return rows, found


def speedup(rows: list[dict[str, Any]], found: Found) -> dict[str, Any]:
    """Of what was found, against the best of the four that fits: served in turn, and by rank."""
    row = {key: rows[0][key] for key in ("graph", "link", "batch")}
    for order in (FIFO, RANK):
        times = [r["makespan_ms"] for r in rows if r["strategy"] in DATA_PARALLEL and r["order"] == order and r["fits"]]
        best = min(times, default=None)
        row[f"best_of_four_{order}_ms"] = best
        row[f"speedup_{order}"] = best and round(best * 1e6 / found.makespan_ns, 3)
    mix = {name: found.actions.count(name) for name in sorted(set(found.actions))}
    alone = next(r["makespan_ms"] for r in rows if r["strategy"] == "single device")
    return {
        **row, "single_device_ms": alone, "makespan_ms": round(found.makespan_ns / 1e6, 3),
        "fifo_ms": round(found.fifo_ns / 1e6, 3),
        "groups": mix, "evaluations": found.evaluations,
    }  # fmt: skip


def enumerated(instances: int, groups: int = SMALL_GROUPS, budget: int = SMALL_EVALUATIONS) -> list[dict[str, Any]]:
    """Tree search against the optimum of all choices of ``groups`` groups on two devices."""
    rows = []
    for seed in range(instances):
        model, cluster = layers(seed, groups), pair(seed)
        everything = Space(model, cluster, budget=Budget(None))
        for choice in itertools.product(*everything.options):
            everything.evaluate(choice)
        space = Space(model, cluster, budget=Budget(None, budget))
        explore(space, seed)
        assert everything.best is not None
        assert space.best is not None
        best, found = everything.known[everything.best].makespan_ns, space.known[space.best].makespan_ns
        rows.append({
            "graph": model.name, "groups": groups, "choices": everything.evaluations, "evaluations": space.evaluations,
            "optimum_ms": round(best / 1e6, 3), "makespan_ms": round(found / 1e6, 3), "ratio": round(found / best, 4),
        })  # fmt: skip
    return rows


def scale(seconds: float) -> dict[str, Any]:
    """2,000 ops on eight devices."""
    model = layers(0, SCALE_LAYERS)
    rows, found = of_model(model, shared=False, batch=1.0, seconds=seconds)
    return {**speedup(rows, found), "ops": len(model.ops), "devices": 8, "seconds": round(found.seconds, 1)}


def rows(args: argparse.Namespace) -> dict[str, Any]:
    """All of it; of ``args`` what :func:`main` names, where there."""
    seconds, batches = float(getattr(args, "seconds", 20.0)), getattr(args, "batches", (1.0, 0.25))
    links = getattr(args, "links", ("per pair", "shared"))
    out: dict[str, Any] = {"hetero": [], "speedups": [], "too_big": None}
    for name in getattr(args, "models", None) or MODELS:
        if not (GRAPHS / name).exists():
            say(f"{name}: not here (../shared/graphs)")
            continue
        model = read(GRAPHS / name)
        for batch, link, machines in itertools.product(batches, links, (False, True)):
            made, found = of_model(model, shared=link == "shared", batch=batch, seconds=seconds, machines=machines)
            out["hetero"] += made[-2:] if machines else made
            out["speedups"].append({**speedup(made, found), "strategy": made[-1]["strategy"]})
            say(json.dumps(out["speedups"][-1]))
    if (GRAPHS / MODELS[0]).exists():
        made, found = of_model(oversized(read(GRAPHS / MODELS[0])), shared=False, batch=1.0, seconds=seconds)
        out["hetero"] += made
        out["too_big"] = speedup(made, found) | {
            "fits": found.judged.fits, "data_parallel_fits": any(r["fits"] for r in made[:8]),
            "peak_gb": [round(int(peak) / 1e9, 2) for peak in found.judged.peak_bytes],
        }  # fmt: skip
        say(json.dumps(out["too_big"]))
    out["enumerated"] = enumerated(int(getattr(args, "instances", 30)))
    if out["enumerated"]:
        say(f"ratio to the optimum: {statistics.median(row['ratio'] for row in out['enumerated'])} in the median")
    out["hetero_scale"] = scale(float(getattr(args, "scale_seconds", 55.0)))
    say(json.dumps(out["hetero_scale"]))
    return out


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the one form there is")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a search")
    parser.add_argument("--scale-seconds", type=float, default=55.0, help="of the search of 2,000 ops")
    parser.add_argument("--instances", type=int, default=30, help="small ones, all of whose choices are tried")
    parser.add_argument("--batches", type=float, nargs="*", default=[1.0, 0.25], help="of the batch in the graphs")
    parser.add_argument("--models", nargs="*", help="files below ../shared/graphs")
    parser.add_argument("--links", nargs="*", default=["per pair", "shared"])
    print(json.dumps(rows(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
