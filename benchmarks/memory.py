"""How right the peak of a rank's memory is that dpro tells from a captured step, and what it takes to make a job fit.

A cell is a model with one way to run it. Two DDP processes train it; dpro captures a few steps of the plain job and
tells from the graph's replay the peak of each rank, of the plain job, and what to do under a budget half way to the
least it can reach: by re-computation, and by micro-batches where the model allows for them. Then other processes run
that job. Their peak in a step is what torch's allocator tells: the tensors that there are as it begins, and from there
every allocation and release (``profile_memory`` of ``torch.profiler``); ``bytes`` are of rank 0. (Added up from the
job's start it is the same, but for what gloo's threads release, which the profiler does not see.) Their step time is
measured in turns with the plain job's, in the same processes that keep freed memory: the median over the turns of the
plan of its ratio to the plain turns around it, times the plain job's median. The prediction is that median times the
ratio of two replays. Weights after :data:`STEPS` steps are compared with the plain job's.

``python -m benchmarks.memory --json`` prints last a list of ``model, passes, estimated_bytes, measured_bytes,
error_pct`` and, where a plan is in force, ``budget_bytes, predicted_ms, measured_ms, time_error_pct, plan,
weights_apart``, the largest difference of a weight.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cells import KEEP_MEMORY, QUIET
from benchmarks.models import NAMES
from dpro.adapter import Knob, MemoryMeter
from dpro.plan import Plan

if TYPE_CHECKING:
    from benchmarks.loops_torch import DDPLoop
    from dpro.search.memory import Fit

STEPS = 4
#: Turns of the plain job and the plan, steps of each turn that are timed, and that are not.
TURNS, TIMED, SETTLE = 12, 4, 1
PASSES = {"recompute": Knob.RECOMPUTE, "accumulate": Knob.ACCUMULATE}


def loop_of(model: str, rank: int) -> DDPLoop:
    """The job, whose batches can be cut."""
    from torch import Tensor, nn

    from benchmarks.loops_torch import DDPLoop
    from dpro_integrations import torch_micro

    def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    class Loop(DDPLoop):
        def step(self) -> None:
            self._optimizer.zero_grad()
            torch_micro.step(self._ddp, loss_of, (self._task.inputs, self._task.labels))
            self._optimizer.step()

    return Loop(model, rank, emulated=False)


def capture(model: str, rank: int, folder: Path) -> None:
    """The plain job; leaves this rank's trace in ``folder``."""
    loop = loop_of(model, rank)
    for _ in range(STEPS):
        loop.step()
        loop.adapter.obstacle()
    assert isinstance(loop.adapter, MemoryMeter)
    loop.adapter.meter_memory()
    loop.adapter.start_capture()
    for _ in range(STEPS):
        loop.step()
        loop.adapter.mark_step()
    loop.adapter.stop_capture().save(folder / f"trace{rank}.npz")
    loop.close()


def measure(model: str, rank: int, folder: Path, plan: Plan | None) -> None:
    """The job under ``plan``: the most that it had allocated in its last step, and its weights then."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from dpro.trace import kineto
    from dpro_integrations.torch_memory import allocated_bytes
    from dpro_integrations.torch_rewrap import bucket_bytes

    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    loop = loop_of(model, rank)
    for step in range(STEPS):
        base = allocated_bytes(on_gpu=False) + bucket_bytes(loop._ddp)
        with record_function(f"ProfilerStep#{step}"):
            loop.step()
        if step == 0 and plan is not None:
            loop.adapter.apply(plan)
    profiler.stop()
    events: list[kineto.Allocation] = []
    with tempfile.TemporaryDirectory() as there:
        path = Path(there) / "trace.json"
        profiler.export_chrome_trace(str(path))
        begin, end = kineto.read(path, events).step_bounds[-1].tolist()
    level = peak = base
    for _, _, _, nbytes in sorted((event for event in events if begin <= event[0] < end), key=lambda event: event[0]):
        level += nbytes
        peak = max(peak, level)
    (folder / f"peak{rank}.json").write_text(json.dumps({"peak": peak}))
    weights = np.concatenate([p.detach().numpy().ravel() for p in loop._task.model.state_dict().values()])
    np.save(folder / f"weights{rank}.npy", weights)
    loop.close()


def take_turns(model: str, rank: int, folder: Path, plan: Plan) -> None:
    """The job without ``plan`` and with it in turns; leaves the ms of the timed steps in ``folder``."""
    loop = loop_of(model, rank)
    taken: list[list[float]] = []
    for turn in range(2 * TURNS + 1):
        loop.adapter.apply(plan) if turn % 2 else loop.adapter.revert()
        taken.append([])
        for step in range(SETTLE + TIMED):
            begin = time.perf_counter()
            loop.step()
            if step >= SETTLE:
                taken[-1].append(1e3 * (time.perf_counter() - begin))
    (folder / f"ms{rank}.json").write_text(json.dumps(taken))
    loop.close()


def choose(folder: Path, ranks: int) -> tuple[Fit, dict[str, tuple[int, Fit]]]:
    """From the traces alone: the plain job, and the budget and choice for each pass that it can be done with."""
    from dpro.graph.assemble import assemble
    from dpro.planning import inform
    from dpro.search.memory import MemorySearch
    from dpro.trace.model import RankTrace

    traces = [RankTrace.load(folder / f"trace{rank}.npz") for rank in range(ranks)]
    graph = assemble(traces)
    inform(graph, traces)
    found = {}
    for passes, knob in PASSES.items():
        search = MemorySearch(graph, {knob}, time_budget_s=30)
        search.fitting(0)
        least = search.smallest()
        if least.peak < search.plain.peak:
            budget = (least.peak + search.plain.peak) // 2
            found[passes] = budget, search.fitting(budget)[0]
    return search.plain, found


def _run(order: str, model: str, folder: Path, ranks: int, plan: Plan | None = None) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **KEEP_MEMORY, **QUIET}
    command = [sys.executable, "-m", "benchmarks.memory", "--order", order, "--models", model, "--folder", str(folder)]
    command += ["--plan", plan.dumps()] if plan is not None else []
    processes = [
        subprocess.Popen(command, env={**os.environ, **place, **quiet, "RANK": str(rank)}, stdout=sys.stderr)
        for rank in range(ranks)
    ]
    exits = [process.wait() for process in processes]
    if any(exits):
        raise RuntimeError(f"the job of {model} failed")


def _measured(model: str, folder: Path, ranks: int, plan: Plan | None) -> tuple[int, Any]:
    _run("measure", model, folder, ranks, plan)
    return json.loads((folder / "peak0.json").read_text())["peak"], np.load(folder / "weights0.npy")


def _step_ms(folder: Path, ranks: int) -> tuple[float, float]:
    """Of the slowest rank: the plain job's ms per step, and the plan's as a share of it, each turn of the plan held
    against the plain turns right before and after it. Medians: other work on the machine comes and goes."""
    taken = [json.loads((folder / f"ms{rank}.json").read_text()) for rank in range(ranks)]
    turns = [statistics.median(map(max, zip(*turn, strict=True))) for turn in zip(*taken, strict=True)]
    shares = [2 * turns[k] / (turns[k - 1] + turns[k + 1]) for k in range(1, len(turns), 2)]
    return statistics.median(turns[::2]), statistics.median(shares)


def _percent(value: float, reference: float) -> float:
    return round(100 * (value / reference - 1), 2)


def cells(models: list[str], ranks: int) -> list[dict[str, Any]]:
    """Every model, plain and with each pass that it can be made to fit with."""
    out: list[dict[str, Any]] = []
    for model in models:
        with tempfile.TemporaryDirectory() as there:
            folder = Path(there)
            _run("capture", model, folder, ranks)
            plain, chosen = choose(folder, ranks)
            measured, weights = _measured(model, folder, ranks, None)
            out.append(_row(model, "none", plain.peak, measured))
            for passes, (budget, fit) in chosen.items():
                plan = fit.plan({}, 1e-6, plain.step_ns / 1e6)
                measured, other = _measured(model, folder, ranks, plan)
                _run("turns", model, folder, ranks, plan)
                plain_ms, share = _step_ms(folder, ranks)
                predicted_share = fit.step_ns / plain.step_ns
                out.append(
                    _row(model, passes, fit.peak, measured) | {
                        "budget_bytes": budget,
                        "plain_ms": round(plain_ms, 2),
                        "predicted_ms": round(plain_ms * predicted_share, 2),
                        "measured_ms": round(plain_ms * share, 2),
                        "time_error_pct": _percent(predicted_share, share),
                        "weights_apart": float(np.abs(weights - other).max()),
                        "plan": plan.settings(),
                    }
                )  # fmt: skip
                print(f"  {out[-1]}", file=sys.stderr)
    return out


def _row(model: str, passes: str, estimated: int, measured: int) -> dict[str, Any]:
    error_pct = _percent(estimated, measured)
    print(
        f"{model}, {passes}: {estimated / 1e6:.1f} MB, measured {measured / 1e6:.1f}, {error_pct:+} %", file=sys.stderr
    )
    return {
        "model": model, "passes": passes, "estimated_bytes": estimated, "measured_bytes": measured,
        "error_pct": error_pct,
    }  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--order", choices=("capture", "measure", "turns"), help="be a rank of a job of this program's")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--plan", type=Plan.loads)
    args = parser.parse_args()
    if args.order:
        rank = int(os.environ["RANK"])
        if args.order == "capture":
            capture(args.models[0], rank, args.folder)
        elif args.order == "turns":
            take_turns(args.models[0], rank, args.folder, args.plan)
        else:
            measure(args.models[0], rank, args.folder, args.plan)
        return 0
    found = cells(args.models, args.ranks)
    print(json.dumps(found) if args.json else "\n".join(map(str, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
