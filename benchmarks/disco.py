"""DisCo (TPDS 2022) on this machine: what says how long a fused op takes, and what searching fusions is worth.

``estimators``: kernels timed by :mod:`benchmarks.fused_kernels`, in four folds of models; each kernel is judged by
estimators fitted to the models of the other folds. ``limits``: the default one where a kernel's own model is known, and
where fewer are. ``search``: a worker's step of public graphs, the file's batch shared out among :data:`WORKERS` (strong
scaling), AllReduces over a ring of :data:`GB_PER_S`. What a fused op takes there is
:class:`~dpro.cost.fused.SavedTraffic`: it needs only op times and bytes, which the graphs have; its shares are fitted
to the kernels timed here, the launch is the one timed here but never more than what cutting the batch is charged with.
``sweep``: alpha and beta, means over seeds. ``scale``: 1,000 evaluations of a step of 2,000 ops.

``python -m benchmarks.disco --json [--only search sweep] [--seconds 600]`` prints ``{place, constants, estimators,
limits, search, sweep, scale}``. Kernels are timed when none are kept (``--seconds``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fused_kernels
from benchmarks.cells import place, say
from dpro.cost.fused import (
    Estimator,
    Floats,
    Roofline,
    Sample,
    SavedTraffic,
    SumOfOps,
    errors,
    trust_of,
)
from dpro.cost.fused_gnn import Gnn
from dpro.cost.fused_trees import Trees
from dpro.errors import DproError
from dpro.graph.cluster import Cluster
from dpro.passes.joint_fusion import JointFusion
from dpro.passes.replicate import LAUNCH_NS
from dpro.passes.worker_step import Step
from dpro.search.backtracking import Settings, all_reduce_line, full_overlap_ns, search
from dpro.trace.model_graph import ModelGraph, read
from dpro.trace.pipedream import parse

GRAPHS = Path(__file__).resolve().parents[2] / "shared" / "graphs"
SEARCHED = {
    "vgg16": "pipedream/vgg16.graph.txt",
    "resnet50": "pipedream/resnet50.graph.txt",
    "inception_v3": "pipedream/inception_v3.graph.txt",
    "alexnet": "pipedream/alexnet.graph.txt",
    "bert-3 operators": "dnn_partitioning/operator_bert_l-3_training.json",
    "resnet50 operators": "dnn_partitioning/operator_resnet50_training.json",
}
SWEPT = ("vgg16", "resnet50", "bert-3 operators")
WORKERS, GB_PER_S = 8, 10.0
ALPHAS, BETAS = (1.0, 1.01, 1.05, 1.1), (1, 5, 10, 30)
PARTS = ("estimators", "limits", "search", "sweep", "scale")


def kernels(seconds: float) -> tuple[list[Sample], dict[str, Any]]:
    """Those kept in the cache folder; timed first where there are none."""
    try:
        return fused_kernels.load()
    except (OSError, ValueError, KeyError):
        say(f"  timing kernels for {seconds:.0f} s")
        command = [sys.executable, "-m", "benchmarks.fused_kernels", "--seconds", str(seconds)]
        subprocess.run(command, env=os.environ | fused_kernels.ENV, check=True, stdout=subprocess.DEVNULL)
        return fused_kernels.load()


def estimators(samples: Sequence[Sample], kept: dict[str, Any], gnn_s: float) -> Iterator[dict[str, Any]]:
    """A row for each estimator, on kernels of models that it was not fitted to; last what no estimator could better."""
    from benchmarks.fused_models import FOLDS

    launch_ns = kept["launch_ns"]
    made: dict[str, Callable[[Sequence[Sample]], Estimator]] = {
        SumOfOps.name: lambda _: SumOfOps(launch_ns),
        Roofline.name: lambda known: Roofline.fit(known, launch_ns),
        SavedTraffic.name: lambda known: SavedTraffic.fit(known, launch_ns),
        Trees.name: lambda known: Trees.fit(known, launch_ns),
        Gnn.name: lambda known: Gnn.fit(known, launch_ns, epochs=200, time_budget_s=gnn_s),
    }
    for name, make in made.items():
        began = time.monotonic()
        off: list[Floats] = []
        models: dict[str, Floats] = {}
        said = []
        try:
            for fold in FOLDS:
                known = [s for s in samples if s.model not in fold]
                estimator = make(known)
                for model in fold:
                    if held_out := [s for s in samples if s.model == model]:
                        models[model] = errors(estimator, held_out)
                        off.append(models[model])
                said.append(_constants(estimator))
        except DproError as error:
            say(f"  {name}: {error}")
            continue
        yield _error_row(name, np.concatenate(off)) | {
            "trained_on": f"{len(samples)} kernels but those of its fold's models", "held_out": sorted(models),
            "within_by_model": {m: round(float(trust_of(e).within), 3) for m, e in models.items()},
            "constants": said, "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
    yield _error_row("the same kernel, timed again", fused_kernels.timed_again(kept)) | {"trained_on": "itself"}


def limits(samples: Sequence[Sample], launch_ns: float) -> Iterator[dict[str, Any]]:
    """Rows of the trees: other kernels of the same models known; a third of the models or of the kernels known."""
    from benchmarks.fused_models import FOLDS

    rng = np.random.default_rng(0)
    of_model = np.array([s.model for s in samples])
    models = rng.permutation(sorted(set(of_model)))
    every = np.ones(len(samples), dtype=bool)
    by_model = [np.isin(of_model, list(fold)) for fold in FOLDS]
    fold_of = rng.permutation(len(samples)) % len(FOLDS)
    by_kernel = [fold_of == k for k in range(len(FOLDS))]
    for name, apart, usable in (
        ("kernels held out, not models", by_kernel, every),
        ("a third of the other models", by_model, np.isin(of_model, models[::3])),
        ("a third of their kernels", by_model, rng.random(len(samples)) < 1 / 3),
    ):
        off = []
        for held_out in apart:
            known = usable & ~held_out
            trees = Trees.fit([s for s, is_known in zip(samples, known, strict=True) if is_known], launch_ns)
            off.append(errors(trees, [s for s, is_held in zip(samples, held_out, strict=True) if is_held]))
        yield _error_row(f"{Trees.name}: {name}", np.concatenate(off))


def _constants(estimator: Estimator) -> dict[str, float]:
    keys = ("saved", "heavy_saved", "ns_per_byte", "ns_per_flop", "epochs")
    return {key: round(float(getattr(estimator, key)), 4) for key in keys if hasattr(estimator, key)}


def _error_row(name: str, off: Floats) -> dict[str, Any]:
    trust = trust_of(off)
    row = {
        "name": name, "within_14pct": round(trust.within, 4), "median_error_pct": round(100 * trust.median_error, 2),
        "p90_error_pct": round(100 * trust.p90_error, 1), "kernels": trust.count,
    }  # fmt: skip
    say(f"  {row}")
    return row


def searched(name: str, fused: Estimator) -> JointFusion:
    """What is searched of one of :data:`SEARCHED`."""
    return joint(read(GRAPHS / SEARCHED[name]), fused)


def joint(model: ModelGraph, fused: Estimator) -> JointFusion:
    """A worker's step of a model whose batch :data:`WORKERS` share."""
    return JointFusion(Step.of(model, 1 / WORKERS), fused, all_reduce_line(Cluster.uniform(WORKERS, GB_PER_S)))


def searches(fused: Estimator, budget_s: float) -> Iterator[dict[str, Any]]:
    """Rows of the four defaults, DisCo and the bound of full overlap, by graph."""
    for graph in SEARCHED:
        fusion = searched(graph, fused)
        found = search(fusion, Settings(time_budget_s=budget_s))
        rows: list[dict[str, Any]] = [
            {"strategy": name, "makespan_ms": ns / 1e6, "seconds": 0.0} for name, ns in found.defaults_ns.items()
        ]
        rows.append({
            "strategy": "disco", "makespan_ms": found.makespan_ns / 1e6, "seconds": round(found.seconds, 2),
            "evaluations": found.evaluations, "stopped": found.stopped,
            "gain_over_best_default": round(min(found.defaults_ns.values()) / found.makespan_ns - 1, 4),
            "kernels": sum(0 <= g < fusion.step.n for g in found.state.order), "ops": fusion.step.n,
            "all_reduces": len(fusion.reduces(found.state)), "gradients": len(fusion.step.names) - fusion.step.n,
        })  # fmt: skip
        bound_ns = full_overlap_ns(fusion, found.state)
        rows.append({"strategy": "disco, full overlap (bound)", "makespan_ms": bound_ns / 1e6, "seconds": 0.0})
        for row in rows:
            say(f"  {graph}, {row['strategy']}: {row['makespan_ms']:.3f} ms")
            yield {"graph": graph, **row}


def sweep(fused: Estimator, seeds: int, budget_s: float) -> Iterator[dict[str, Any]]:
    """Means over ``seeds`` searches."""
    points = [(alpha, 10) for alpha in ALPHAS] + [(1.05, beta) for beta in BETAS if beta != 10]
    for graph in SWEPT:
        for alpha, beta in points:
            runs = [
                search(searched(graph, fused), Settings(alpha, beta, seed=seed, time_budget_s=budget_s))
                for seed in range(seeds)
            ]
            row = {
                "graph": graph, "alpha": alpha, "beta": beta,
                "makespan_ms": round(float(np.mean([run.makespan_ns for run in runs])) / 1e6, 4),
                "seconds": round(float(np.mean([run.seconds for run in runs])), 2),
                "evaluations": round(float(np.mean([run.evaluations for run in runs]))), "seeds": seeds,
            }  # fmt: skip
            say(f"  {row}")
            yield row


def scale(fused: Estimator, blocks: int = 250, evaluations: int = 1000) -> dict[str, Any]:
    """Seconds of so many evaluations of a step of 8 ops a block, 2,000 in all."""
    fusion = joint(deep(blocks), fused)
    found = search(fusion, Settings(evaluations=evaluations, patience=evaluations))
    row = {
        "ops": fusion.step.n, "all_reduces": len(fusion.step.names) - fusion.step.n, "evaluations": found.evaluations,
        "seconds": round(found.seconds, 2), "makespan_ms": found.makespan_ns / 1e6,
        "best_default_ms": min(found.defaults_ns.values()) / 1e6,
    }  # fmt: skip
    say(f"  {row}")
    return row


def deep(blocks: int) -> ModelGraph:
    """Convolution, norm and activation, again and again, at times past a shortcut; written as PipeDream does."""
    rng = np.random.default_rng(0)
    lines = []
    for k in range(blocks):
        size, weights = rng.integers(1 << 20, 16 << 20), rng.integers(1 << 10, 4 << 20)
        layers = [("Conv2d", 2.0, weights), ("BatchNorm2d", 0.5, 2048), ("ReLU", 0.3, 0)]
        for i, (kind, ms, nbytes) in enumerate(layers):
            node = 3 * k + i
            times = rng.uniform(0.5, 1.5, 2) * ms
            lines.append(
                f"node{node} -- {kind}() -- forward_compute_time={times[0]:.4f}, backward_compute_time={times[1]:.4f}, "
                f"activation_size={size}, parameter_size={nbytes}"
            )
            if node:
                lines.append(f"\tnode{node - 1} -- node{node}")
        if k % 2 and k > 2:
            lines.append(f"\tnode{3 * (k - 2) + 2} -- node{3 * k + 2}")
    return parse("\n".join(lines), Path("deep"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document last")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--seconds", type=float, default=600.0, help="to time kernels, where none are kept")
    parser.add_argument("--gnn-seconds", type=float, default=60.0, help="to train the network, each fold")
    parser.add_argument("--search-seconds", type=float, default=120.0, help="of a search, at most")
    parser.add_argument("--seeds", type=int, default=3, help="of the sweep")
    arguments = parser.parse_args()
    samples, kept = kernels(arguments.seconds)
    fitted = SavedTraffic.fit(samples, kept["launch_ns"])
    fused = SavedTraffic(min(kept["launch_ns"], LAUNCH_NS), fitted.saved, fitted.heavy_saved)
    out: dict[str, Any] = {"place": place(), "timed": fused_kernels.said(samples, kept)}
    out["constants"] = {
        "launch_ns": fused.launch_ns, "saved": fused.saved, "heavy_saved": fused.heavy_saved,
        "workers": WORKERS, "gb_per_s": GB_PER_S,
    }  # fmt: skip
    say(f"  {out['timed']}\n  {out['constants']}")
    if "estimators" in arguments.only:
        out["estimators"] = list(estimators(samples, kept, arguments.gnn_seconds))
    if "limits" in arguments.only:
        out["limits"] = list(limits(samples, kept["launch_ns"]))
    if "search" in arguments.only:
        out["search"] = list(searches(fused, arguments.search_seconds))
    if "sweep" in arguments.only:
        out["sweep"] = list(sweep(fused, arguments.seeds, arguments.search_seconds))
    if "scale" in arguments.only:
        out["scale"] = scale(fused)
    if arguments.json:
        print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
