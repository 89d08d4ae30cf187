"""How right the peak of a rank's memory is that dpro tells of a Keras job with Horovod, also of a plan that never ran.

As :mod:`benchmarks.memory`, for re-computation in Keras. Two processes train a model; dpro captures a few steps of the
plain job and tells from the graph's replay the peak of each rank, and what to recompute under a budget half way to the
least that it can reach. Then other processes run that job, and their peak is measured: TensorFlow's own record of its
allocations in a step (``dpro_integrations.keras_memory``). ``bytes`` are of the rank that has most. Weights of rank 0
after :data:`STEPS` steps are compared with the plain job's.

``python -m benchmarks.memory_keras --json`` (anywhere beside a ``.venv-backends``) prints last a list of ``model,
passes, estimated_bytes, measured_bytes, error_pct`` and, where a plan is in force, ``budget_bytes, plan,
weights_apart``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import KEEP_MEMORY, QUIET, ROOT
from benchmarks.models_keras import NAMES
from benchmarks.testbed import horovod
from dpro.plan import Plan

#: Before the capture, and captured.
STEPS, CAPTURED = 4, 3


def run(model: str, folder: Path, plan: Plan | None) -> None:
    """Be a rank: train under ``plan``, leave the trace and the weights in ``folder``."""
    from benchmarks.loops_keras import HorovodLoop

    loop = HorovodLoop(model, int(os.environ["HOROVOD_RANK"]), emulated=False)
    adapter: Any = loop.adapter
    loop.step()
    adapter.obstacle()
    if plan is not None:
        adapter.apply(plan)
    for _ in range(STEPS - 1):
        loop.step()
        adapter.obstacle()
    weights = np.concatenate([np.ravel(weight) for weight in loop._model.get_weights()])
    adapter.start_rehearsal()
    for _ in range(CAPTURED):
        loop.step()
        adapter.mark_step()
    adapter.abort_capture()
    adapter.meter_memory()
    adapter.start_capture()
    for _ in range(CAPTURED):
        loop.step()
        adapter.mark_step()
    adapter.stop_capture().save(folder / f"trace{loop.rank}.npz")
    np.save(folder / f"weights{loop.rank}.npy", weights)
    loop.close()


def measured(folder: Path) -> tuple[int, Any]:
    """The largest rank's peak, and rank 0's weights."""
    from dpro.trace.memory import MEMORY, load
    from dpro.trace.model import RankTrace

    found = [load(RankTrace.load(folder / f"trace{rank}.npz").meta.extra.get(MEMORY)) for rank in range(2)]
    peaks = [one.peak for one in found if one is not None]
    if len(peaks) < 2:
        raise RuntimeError("memory was not measured")
    return max(peaks), np.load(folder / "weights0.npy")


def _job(model: str, folder: Path, plan: Plan | None) -> tuple[int, Any]:
    python = horovod.find_python()
    command = [str(Path(python).parent / "horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2", python]
    command += ["-m", "benchmarks.memory_keras", "--rank-of", model, "--folder", str(folder)]
    command += ["--plan", plan.dumps()] if plan is not None else []
    path = os.pathsep.join([str(ROOT / "core"), str(ROOT)])
    env = {**os.environ, **QUIET, **KEEP_MEMORY, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, stdout=sys.stderr, check=True)
    return measured(folder)


def cells(models: list[str]) -> list[dict[str, Any]]:
    """Every model, plain and with blocks recomputed."""
    from dpro.adapter import Knob
    from dpro.graph.assemble import assemble
    from dpro.planning import inform
    from dpro.search.memory import MemorySearch
    from dpro.trace.model import RankTrace

    out = []
    for model in models:
        with tempfile.TemporaryDirectory() as there:
            folder = Path(there)
            peak, weights = _job(model, folder, None)
            traces = [RankTrace.load(folder / f"trace{rank}.npz") for rank in range(2)]
            graph = assemble(traces)
            inform(graph, traces)
            search = MemorySearch(graph, {Knob.RECOMPUTE}, time_budget_s=30)
            out.append(_row(model, "none", search.plain.peak, peak))
            search.fitting(0)
            if search.smallest().peak >= search.plain.peak:
                continue
            budget = (search.smallest().peak + search.plain.peak) // 2
            fit = search.fitting(budget)[0]
            plan = fit.plan({}, 1e-6, search.plain.step_ns / 1e6)
            peak, other = _job(model, folder, plan)
            apart = float(np.abs(weights - other).max())
            more = {"budget_bytes": budget, "plan": plan.settings(), "weights_apart": apart}
            out.append(_row(model, "recompute", fit.peak, peak) | more)
            print(f"  {out[-1]}", file=sys.stderr)
    return out


def _row(model: str, passes: str, estimated: int, found: int) -> dict[str, Any]:
    error_pct = round(100 * (estimated / found - 1), 2)
    print(f"{model}, {passes}: {estimated / 1e6:.2f} MB, measured {found / 1e6:.2f}, {error_pct:+} %", file=sys.stderr)
    return {
        "model": model, "passes": passes, "estimated_bytes": estimated, "measured_bytes": found, "error_pct": error_pct,
    }  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_keras", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--rank-of", choices=NAMES, help="be a rank of a job of this program's")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--plan", type=Plan.loads)
    args = parser.parse_args()
    if args.rank_of:
        run(args.rank_of, args.folder, args.plan)
        return 0
    found = cells(args.models)
    print(json.dumps(found) if args.json else "\n".join(map(str, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
