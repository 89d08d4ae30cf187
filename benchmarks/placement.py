"""Where the ops of a model run: FastT and what it is made of against data parallelism, one device and the optimum.

Knows public profiles (PipeDream, ``../shared/graphs``), made-up graphs and the replay; no job is run. All times but
``seconds`` follow from the graphs alone. ``--json`` prints one document last:

* ``placements``: ``graph, devices, batch, link, strategy, makespan_ms, seconds`` (link in GB/s, batch a share of the
  profile's; ``seconds`` is what the search took);
* ``optimum``: FastT beside CP-SAT's optimum on small graphs, one row each;
* ``scale``: a model of 2,000 ops on 8 devices, FastT in all;
* ``checks``: what is to hold, with the figures;
* what ``benchmarks.placement_hetero`` adds, where it is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import product
from typing import Any

from benchmarks.cells import say
from benchmarks.optimum_placement import optimum
from benchmarks.placement_models import PIPEDREAM, branching, public, small_tasks
from dpro.graph.cluster import Cluster
from dpro.passes.replicate import replicate
from dpro.search.fastt import AWARE, BASELINES, ONE_PASS, PUBLISHED, Result, aware_plan, fastt, place, published_plan
from dpro.search.list_schedule import Problem
from dpro.trace.model_graph import ModelGraph

FASTT = "FastT"
DEVICES = (2, 4, 8)
BATCHES = (0.125, 1.0)
LINKS = (10.0, 20.0)
INSTANCES = 100
#: The dense layer of VGG16 with 411 MB of parameters.
_LARGE_BYTES = 400_000_000
#: Adds rows of its own where it is there.
_OTHERS = "benchmarks.placement_hetero"

Row = dict[str, Any]


def cell(model: ModelGraph, devices: int, batch: float, link: float) -> tuple[list[Row], Result]:
    """All strategies on one model, number of devices, batch and link."""
    cluster = Cluster.uniform(devices, link)
    common = {"graph": model.name, "devices": devices, "batch": batch, "link": link}
    result = fastt(model, cluster, batch=batch)
    rows = [{**common, "strategy": name, "makespan_ms": ms, "seconds": 0.0} for name, ms in result.baselines.items()]
    problem = Problem(replicate(model, devices, batch), cluster)
    for name in (*PUBLISHED, *ONE_PASS, AWARE):
        begin = time.perf_counter()
        plan = aware_plan(problem) if name == AWARE else published_plan(name, problem)
        seconds = time.perf_counter() - begin
        rows.append({**common, "strategy": name, "makespan_ms": plan.makespan_ns / 1e6, "seconds": seconds})
    rows.append(
        {**common, "strategy": FASTT, "makespan_ms": result.makespan_ns / 1e6, "seconds": result.seconds,
         "chosen": result.strategy, "splits": len(result.splits)}
    )  # fmt: skip
    return rows, result


def gathered(model: ModelGraph, result: Result) -> Row:
    """On which devices the replicas of the layers with more than 400 MB of parameters run."""
    large = {op.name.removesuffix("/variable") for op in model.ops if op.kept_bytes > _LARGE_BYTES}
    homes = {
        name: sorted({
            device for task, device in result.placement.items()
            if task.split("@")[0] in (name, f"{name}/backward", f"{name}/variable", f"{name}/update")
        }) for name in sorted(large)
    }  # fmt: skip
    return {"layers": homes, "gathered": bool(homes) and all(len(devices) == 1 for devices in homes.values())}


def placements(args: argparse.Namespace) -> Iterator[tuple[list[Row], Row | None]]:
    """Rows of every cell, and for VGG16 on 4 devices with an eighth of the batch where its large layer went."""
    for name in args.graphs:
        model = public(name)
        for devices, batch, link in product(DEVICES, BATCHES, LINKS):
            rows, result = cell(model, devices, batch, link)
            is_claim = (name, devices, batch, link) == ("vgg16", 4, 0.125, 10.0)
            yield rows, gathered(model, result) if is_claim else None


def against_optimum(count: int, effort: float) -> list[Row]:
    """FastT beside the optimum; ``beyond_pct`` is counted from the bound where nothing is proved."""
    rows = []
    for number in range(count):
        tasks, devices, link = small_tasks(number)
        cluster = Cluster.uniform(devices, link)
        result = place(tasks, cluster, splits=False)  # the optimum cuts nothing
        best = optimum(tasks, cluster, result.plan.device, effort)
        rows.append(
            {"instance": number, "kind": "replicated" if number % 2 else "random", "ops": len(tasks),
             "devices": devices, "strategy": FASTT, "makespan_ms": result.makespan_ns / 1e6, "seconds": result.seconds,
             "optimum_ms": best.makespan_ns / 1e6, "bound_ms": best.bound_ns / 1e6, "proved": best.proved,
             "optimum_seconds": best.seconds,
             "beyond_pct": 100.0 * (result.makespan_ns - best.bound_ns) / best.bound_ns}
        )  # fmt: skip
        say(f"small graph {number}: {rows[-1]['beyond_pct']:.2f} % beyond {'optimum' if best.proved else 'bound'}")
    return rows


def scale(ops: int = 2000, devices: int = 8) -> Row:
    """FastT in all on a model of that many ops, each replicated on every device."""
    model = branching(ops)
    begin = time.process_time()
    result = fastt(model, Cluster.uniform(devices, 10.0))
    cpu_seconds = time.process_time() - begin
    return {
        "strategy": FASTT, "chosen": result.strategy, "ops": len(model.ops), "tasks": len(result.plan.tasks),
        "devices": devices, "makespan_ms": result.makespan_ns / 1e6, "baselines": result.baselines,
        "seconds": result.seconds, "cpu_seconds": cpu_seconds,
    }  # fmt: skip


def cells(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, float]]:
    """(graph, devices, batch, link) -> strategy -> ms."""
    out: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["makespan_ms"] is not None:
            at = row["graph"], row["devices"], row["batch"], row["link"]
            out.setdefault(at, {})[row["strategy"]] = row["makespan_ms"]
    return out


def checks(found: dict[str, Any]) -> list[Row]:
    """What is to hold, whether it does, and the figures."""
    out: list[Row] = []

    def check(what: str, holds: bool, **figures: Any) -> None:
        out.append({"what": what, "holds": holds, **figures})

    table = cells(found["placements"])
    if table:
        over = [at for at, ms in table.items() if ms[FASTT] > min(ms[name] for name in BASELINES)]
        check("FastT is never slower than the best baseline", not over, cells=len(table), slower=over)
        gain = [min(ms[name] for name in BASELINES) / ms[FASTT] for ms in table.values()]
        ratio = [ms["DPOS"] / ms[AWARE] for ms in table.values()]
        once = [ms["DPOS"] / ms[ONE_PASS[1]] for ms in table.values()]
        check(
            "contention-aware at most 1 % slower than DPOS, faster in the median",
            min(ratio) >= 1 / 1.01 and statistics.median(ratio) > 1, slowest=min(ratio),
            median=statistics.median(ratio), best=max(ratio), faster=sum(r > 1.0001 for r in ratio),
            one_pass_slowest=min(once), one_pass_median=statistics.median(once),
            fastt_over_best_baseline_median=statistics.median(gain), fastt_over_best_baseline_best=max(gain),
        )  # fmt: skip
    if (claim := table.get(("vgg16", 4, 0.125, 10.0))) and found.get("vgg16"):
        times = claim[BASELINES[0]] / claim[FASTT]
        check(
            "VGG16, 4 devices, 1/8 batch: 1.5 times as fast as data parallel, the large layer on one device",
            times >= 1.5 and found["vgg16"]["gathered"], times=times, **found["vgg16"],
        )  # fmt: skip
    if found["optimum"]:
        beyond = [row["beyond_pct"] for row in found["optimum"]]
        check(
            "FastT within 5 % of the optimum in the median", statistics.median(beyond) <= 5.0,
            median_pct=statistics.median(beyond), worst_pct=max(beyond), instances=len(beyond),
            proved=sum(row["proved"] for row in found["optimum"]), at_optimum=sum(b < 0.01 for b in beyond),
        )  # fmt: skip
    for row in found["scale"]:
        figures = {key: row[key] for key in ("seconds", "cpu_seconds", "ops", "tasks")}
        check("2,000 ops, 8 devices: FastT in 10 s of one core", row["cpu_seconds"] <= 10.0, **figures)
    return out


def tables(found: dict[str, Any]) -> str:
    """The placements as a table in ms, and the checks."""
    names = [*BASELINES, *PUBLISHED, AWARE, FASTT]
    short = {BASELINES[0]: "DP", BASELINES[1]: "DP+rank", BASELINES[2]: "single", AWARE: "aware"}
    lines = [f"{'graph':13}{'dev':>4}{'batch':>7}{'GB/s':>5}" + "".join(f"{short.get(n, n):>9}" for n in names)]
    for (graph, devices, batch, link), ms in cells(found["placements"]).items():
        cut = "".join(f"{ms[n]:9.2f}" if n in ms else f"{'-':>9}" for n in names)
        lines.append(f"{graph:13}{devices:4}{batch:7.3g}{link:5.3g}{cut}")
    for one in found["checks"]:
        figures = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in one.items() if key not in ("what", "holds")
        )  # fmt: skip
        lines.append(f"{'holds' if one['holds'] else 'DOES NOT HOLD'}: {one['what']} ({figures})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=list(PIPEDREAM), choices=PIPEDREAM)
    parser.add_argument("--instances", type=int, default=INSTANCES, help="small graphs against the optimum")
    parser.add_argument("--effort", type=float, default=0.3, help="of CP-SAT for one optimum, in its own time")
    parser.add_argument("--no-scale", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON document last")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"placements": [], "vgg16": None}
    for rows, where in placements(args):
        found["placements"] += rows
        found["vgg16"] = where or found["vgg16"]
        say(f"{rows[-1]['graph']} on {rows[-1]['devices']}: FastT {rows[-1]['makespan_ms']:.2f} ms")
    found["optimum"] = against_optimum(args.instances, args.effort)
    found["scale"] = [] if args.no_scale else [scale()]
    found["checks"] = checks(found)
    try:
        others = import_module(_OTHERS)
    except ModuleNotFoundError as error:
        if error.name != _OTHERS:
            raise
    else:
        for key, value in others.rows(args).items():
            found[key] = found[key] + value if isinstance(found.get(key), list) else value
    if args.json:
        print(json.dumps(found))
    else:
        print(tables(found))


if __name__ == "__main__":
    main()
