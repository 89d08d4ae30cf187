"""How right the peak of a rank's memory is that dpro tells from a captured step, and what it says of re-computation.

A cell is a model with one way to run it. Two DDP processes train it; dpro captures a few steps of the plain job and
tells from the graph's replay the peak of each rank, of the plain job and of one with re-computation that was never run.
Then other processes run that job, and their own peak in a step is what torch's allocator tells: every allocation and
release from before the model was made on (``profile_memory`` of ``torch.profiler``), added up. ``bytes`` are of rank 0.

``python -m benchmarks.memory --json`` prints last a list of ``model, passes, estimated_bytes, measured_bytes,
error_pct``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.models import NAMES

STEPS = 4


def capture(model: str, rank: int, folder: Path) -> None:
    """The plain job; leaves this rank's trace in ``folder``."""
    import torch.distributed as dist

    from benchmarks.loops_torch import DDPLoop
    from dpro.adapter import MemoryMeter

    loop = DDPLoop(model, rank, emulated=False)
    for _ in range(4):
        loop.step()
        loop.adapter.obstacle()
    assert isinstance(loop.adapter, MemoryMeter)
    loop.adapter.meter_memory()
    loop.adapter.start_capture()
    for _ in range(STEPS):
        loop.step()
        loop.adapter.mark_step()
    loop.adapter.stop_capture().save(folder / f"trace{rank}.npz")
    dist.barrier()
    loop.close()


def measure(model: str, rank: int, folder: Path, blocks: list[str]) -> None:
    """The job as it is, or with ``blocks`` recomputed, and the most that it had allocated in its last step."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from benchmarks.loops_torch import DDPLoop
    from dpro.trace import kineto
    from dpro_integrations.torch_recompute import recompute

    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    loop = DDPLoop(model, rank, emulated=False)
    recompute(loop._task.model, blocks)
    for step in range(STEPS):
        with record_function(f"ProfilerStep#{step}"):
            loop.step()
    profiler.stop()
    events: list[kineto.Allocation] = []
    with tempfile.TemporaryDirectory() as there:
        path = Path(there) / "trace.json"
        profiler.export_chrome_trace(str(path))
        begin, end = kineto.read(path, events).step_bounds[-1].tolist()
    level = peak = 0
    for at, _, _, nbytes in sorted(events, key=lambda event: event[0]):
        level += nbytes
        if begin <= at < end:  # not in the first ones, in which DDP has old buckets and new ones
            peak = max(peak, level)
    (folder / f"peak{rank}.json").write_text(json.dumps({"peak": peak}))
    loop.close()


def estimate(folder: Path, ranks: int) -> tuple[dict[str, int], list[str]]:
    """Peak bytes of rank 0 by passes, from the traces alone, and the blocks whose
    re-computation leaves the least peak."""
    from dpro.adapter import Knob
    from dpro.graph.assemble import assemble
    from dpro.replay.engine import replay
    from dpro.replay.memory import peak_bytes
    from dpro.search.memory import MemorySearch
    from dpro.trace.model import RankTrace

    graph = assemble([RankTrace.load(folder / f"trace{rank}.npz") for rank in range(ranks)])
    peaks = {"none": peak_bytes(graph, replay(graph))[0]}
    search = MemorySearch(graph, {Knob.RECOMPUTE}, time_budget_s=30)
    search.fitting(0)
    least = search.smallest()
    peaks["recompute"] = least.peak
    return peaks, list(least.blocks)


def _run(order: str, model: str, folder: Path, ranks: int, blocks: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.memory", "--order", order, "--models", model, "--folder", str(folder)]
    processes = [
        subprocess.Popen(
            [*command, "--blocks", *blocks], env={**os.environ, **place, **quiet, "RANK": str(rank)}, stdout=sys.stderr
        )
        for rank in range(ranks)
    ]
    exits = [process.wait() for process in processes]
    if any(exits):
        raise RuntimeError(f"the job of {model} failed")


def cells(models: list[str], ranks: int) -> list[dict[str, Any]]:
    """Every model, plain and recomputed."""
    out = []
    for model in models:
        with tempfile.TemporaryDirectory() as there:
            folder = Path(there)
            _run("capture", model, folder, ranks, [])
            peaks, blocks = estimate(folder, ranks)
            for passes, estimated in peaks.items():
                _run("measure", model, folder, ranks, blocks if passes == "recompute" else [])
                measured = json.loads((folder / "peak0.json").read_text())["peak"]
                error_pct = round(100 * (estimated / measured - 1), 2)
                out.append(
                    {"model": model, "passes": passes, "estimated_bytes": estimated, "measured_bytes": measured,
                     "error_pct": error_pct, "blocks": blocks if passes == "recompute" else []}
                )  # fmt: skip
                print(f"{model}, {passes}: {estimated / 1e6:.1f} MB, measured {measured / 1e6:.1f} ({error_pct:+} %)",
                      file=sys.stderr)  # fmt: skip
    return out


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--order", choices=("capture", "measure"), help="a rank of a job, started by this program")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--blocks", nargs="*", default=[])
    args = parser.parse_args()
    if args.order:
        rank = int(os.environ["RANK"])
        if args.order == "capture":
            capture(args.models[0], rank, args.folder)
        else:
            measure(args.models[0], rank, args.folder, args.blocks)
        return 0
    found = cells(args.models, args.ranks)
    print(json.dumps(found) if args.json else "\n".join(map(str, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
