"""What dpro costs: step time of a job after dpro is done, against the same job that never had it; and while it records.

Two jobs of two processes take turns, A B A B: one never imports dpro, the other has been through the whole life cycle
(profiled, plans applied, undone by a gain that no plan can reach, so that both run the same settings). Only one of
them runs at a time; the other sleeps. Medians are compared window by window, so a drifting machine fools nobody.

``python -m benchmarks.overhead --json``: keys ``without_ms, after_ms, ratio, ratio_low, ratio_high,
capture_overhead_pct``, spreads, verdict, mode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.testbed import Interrupted, Testbed, TestbedError, interruptible

ROOT = Path(__file__).resolve().parent.parent
WITHOUT, AFTER = "without", "after"
UNREACHABLE_GAIN = 0.99
_POLL_S = 0.005
_LOST_S = 300.0  # a job that waits longer for its turn has lost the other one


class Turns:
    """Whose turn it is, in a file that both jobs see.

    Turn -1 lets ``after`` begin its life with dpro; 2k is ``without``'s k-th window, 2k + 1 is ``after``'s.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "turn"

    def give(self, turn: int) -> None:
        """Let the job of ``turn`` run."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(str(turn))
        fresh.replace(self._file)

    def wait(self, turn: int) -> None:
        """Sleep until ``turn``.

        Raises:
            TimeoutError: it did not come; the other job is dead.
        """
        deadline = time.monotonic() + _LOST_S
        while not (self._file.exists() and int(self._file.read_text()) >= turn):
            if time.monotonic() > deadline:
                raise TimeoutError(f"turn {turn} did not come within {_LOST_S:g} s")
            time.sleep(_POLL_S)


def job(role: str, folder: Path, windows: int, steps: int, width: int) -> None:
    """One rank of one of the two jobs. Rank 0 writes ``<role>.json``: step times per window, ms; dpro's figures."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.model import CLASSES, Net

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(width, (2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(CLASSES, (4,))

    def step() -> float:
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        return (time.perf_counter() - begin_s) * 1e3

    figures: dict[str, Any] = {}
    turns, rank = Turns(folder), dist.get_rank()
    if role == AFTER:
        turns.wait(-1)
        from dpro_integrations.torch_ddp import autotune

        settings: dict[str, Any] = {"baseline_steps": 20, "capture_steps": 10, "min_gain": UNREACHABLE_GAIN}
        model, tuner = autotune(model, optimizer=optimizer, runs_dir=str(folder / "runs"), **settings)
        if tuner is None:
            raise RuntimeError("dpro has nothing to tune here")
        while tuner.outcome is None:
            step()
        figures = {
            "capture_overhead_pct": tuner.outcome.capture_overhead_pct,
            "verdict": tuner.outcome.verdict.name,
            "reason": tuner.outcome.reason,
        }
    for _ in range(10):  # buckets are rebuilt, caches warm
        step()
    dist.barrier()
    if rank == 0:
        turns.give(-1 if role == WITHOUT else 0)
    times_ms: list[list[float]] = []
    for window in range(windows):
        turn = 2 * window + (role == AFTER)
        turns.wait(turn)
        step()  # the caches were the other job's
        times_ms.append([step() for _ in range(steps)])
        dist.barrier()
        if rank == 0:
            turns.give(turn + 1)
    if rank == 0:
        (folder / f"{role}.json").write_text(json.dumps(figures | {"windows_ms": times_ms}))
    dist.barrier()
    dist.destroy_process_group()


def measure(bed: Testbed, windows: int, steps: int, width: int, timeout_s: float) -> dict[str, Any]:
    """Run the two jobs on ``bed`` and compare them.

    Raises:
        RuntimeError: one of the jobs failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.overhead", "--folder", scratch]
        command += ["--windows", str(windows), "--steps", str(steps), "--width", str(width)]
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
        jobs = [bed.start([*command, "--job", role], quiet, str(ROOT)) for role in (WITHOUT, AFTER)]
        deadline = time.monotonic() + timeout_s
        while None in (codes := [started.poll() for started in jobs]) and not any(codes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {timeout_s:g} s")
            time.sleep(0.05)
        if any(codes):
            raise RuntimeError(f"the jobs ended with exit codes {codes}")
        without, after = (json.loads((Path(scratch) / f"{role}.json").read_text()) for role in (WITHOUT, AFTER))
    found = compare(without.pop("windows_ms"), after.pop("windows_ms"))
    found.update(after)
    return found


def compare(without_ms: list[list[float]], after_ms: list[list[float]]) -> dict[str, Any]:
    """Medians, and the ratio after / without of adjacent windows: its median and the middle half of it."""
    ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(without_ms, after_ms, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    found: dict[str, Any] = {"ratio": middle, "ratio_low": low, "ratio_high": high, "windows": len(ratios)}
    for key, windows in ((WITHOUT, without_ms), (AFTER, after_ms)):
        sample = [ms for window in windows for ms in window]
        quarter, median, three_quarters = statistics.quantiles(sample, n=4)
        found |= {f"{key}_ms": median, f"{key}_spread_ms": [quarter, three_quarters], "steps": len(sample)}
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--windows", type=int, default=40, help="turns of each job")
    parser.add_argument("--steps", type=int, default=25, help="timed steps per turn")
    parser.add_argument("--width", type=int, default=96, help="of the net; a multiple of 24")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=900)
    parser.add_argument("--job", choices=[WITHOUT, AFTER], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job, args.folder, args.windows, args.steps, args.width)
        return 0
    os.environ.pop("DPRO", None)  # one job is tuned by a call, the other must not be
    try:
        with interruptible(), Testbed(2, args.rate, pin=True, loopback=args.loopback) as bed:
            found = measure(bed, args.windows, args.steps, args.width, args.timeout_s)
            found |= {"mode": bed.mode, "cores": len(os.sched_getaffinity(0))}
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except (TestbedError, RuntimeError, ValueError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found))
    else:
        overhead_pct = found["capture_overhead_pct"]
        print(f"never had dpro   {found['without_ms']:8.2f} ms/step, middle half {found['without_spread_ms']}")
        print(f"after dpro       {found['after_ms']:8.2f} ms/step, middle half {found['after_spread_ms']}")
        print(
            f"ratio            {found['ratio']:8.4f}, middle half {found['ratio_low']:.4f} to {found['ratio_high']:.4f}"
        )
        print(
            f"while recording  {overhead_pct:+8.1f} %" if overhead_pct is not None else "while recording: not reached"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
