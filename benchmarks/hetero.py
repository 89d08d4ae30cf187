"""Two hosts, one at half speed: unequal shares of each batch, as dpro finds them, against equal ones.

The slow host's core is shared with a process that only counts, so that its rank has half of it. The tuner captures,
plans and judges as ever; then equal shares and the plan it likes best take turns, and the ranks' gradient under these
shares is held against one device's on the same batch.

``python -m benchmarks.speedup --hetero --json`` prints ``{place, cuts, cells}``; a cell has the keys ``model, comm,
link, equal_ms, shared_ms, speedup, shares, predicted_ms, verdict, gradient_off, noise_pct``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.cells import LINKS, Jobs, JobSet, place, say, slowest_ms
from benchmarks.matrix import cuts
from benchmarks.testbed import Interrupted, TestbedError, interruptible
from dpro.plan import Plan

#: Without batch norm: a part of a batch gives the gradient of these samples.
MODELS = ("vgg16", "bert-base")
COMMS = ("ddp-shared", "horovod-shared")
_SLOW_HOST = 1
_MOST_STEPS = 400
_SETTINGS = {
    "warmup_steps": 4, "baseline_steps": 8, "capture_steps": 5, "verify_steps": 6, "trials": 2, "regions_s": 0.0,
    "timeout_s": 60.0,
}  # fmt: skip
_COUNTS = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextmanager
def half_speed(host: int) -> Iterator[None]:
    """Somebody else has half of the core that ``host``'s rank is pinned to."""
    cores = sorted(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", _COUNTS, str(cores[host % len(cores)])])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(model: str, comm: str, link: str, args: argparse.Namespace) -> dict[str, Any]:
    """One cell."""
    with JobSet(Jobs(model, comm, 2)) as job, half_speed(_SLOW_HOST), tempfile.TemporaryDirectory() as runs:
        job.bed.set_rate(LINKS[link])
        tuned = job.ask("tune", settings={**_SETTINGS, "runs_dir": runs}, most_steps=_MOST_STEPS)[0]
        plan = Plan.loads(tuned["plan"]) if tuned["plan"] else None
        shares = plan.batch_shares if plan else None
        say(f"  {model}, {comm}, {link}: {tuned['verdict']}: {tuned['reason']}; shares {shares}")
        if plan is None or shares is None:
            raise ValueError(f"dpro found no shares: {tuned['verdict']}, {tuned['reason']}")
        arms = {"equal": None, "shares": Plan(batch_shares=shares).dumps(), "plan": plan.dumps()}
        answers = job.ask(
            "arms", plans=list(arms.values()), rounds=args.rounds, steps=args.steps, settle=args.settle,
            budget_s=args.budget_s,
        )  # fmt: skip
        per_arm = zip(*(answer["times_ns"] for answer in answers), strict=True)
        times = dict(zip(arms, (slowest_ms(ranks) for ranks in per_arm), strict=True))
        medians = {arm: statistics.median(found) for arm, found in times.items()}
        off = max(answer["off"] for answer in job.ask("gradients", shares=shares))
    equal_ms, shared_ms = medians["equal"], medians["plan"]
    say(f"    equal {equal_ms:.1f}, shares {medians['shares']:.1f}, plan {shared_ms:.1f} ms; gradient off {off:.1e}")
    return {
        "model": model, "comm": comm, "link": link, "equal_ms": round(equal_ms, 2), "shared_ms": round(shared_ms, 2),
        "shares_alone_ms": round(medians["shares"], 2), "speedup": round(equal_ms / shared_ms, 4),
        "shares": shares, "predicted_ms": tuned["predicted_ms"], "tuner_baseline_ms": tuned["baseline_ms"],
        "verdict": tuned["verdict"], "gradient_off": off, "noise_pct": round(100 * max(map(_noise, times.values())), 2),
        "settings": sorted(plan.settings()),
    }  # fmt: skip


def _noise(times: Any) -> float:
    quarters = statistics.quantiles(times, n=4)
    return float((quarters[2] - quarters[0]) / statistics.median(times))


def run(args: argparse.Namespace) -> int:
    """All cells of ``args.models`` without batch norm, DDP and Horovod; the exit code."""
    began = time.monotonic()
    cells: list[dict[str, Any]] = []
    models = [model for model in args.models if model in MODELS]
    try:
        with interruptible():
            for comm in COMMS:
                for model in models:
                    for link in args.links:
                        try:
                            cells.append(measure(model, comm, link, args))
                        except (RuntimeError, ValueError) as error:
                            say(f"  {model}, {comm}, {link}: {error}")
                            cells.append({"model": model, "comm": comm, "link": link, "error": str(error)})
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except TestbedError as error:
        print(f"hetero: {error}", file=sys.stderr)
        return 2
    result = {
        "place": place() | {"seconds": round(time.monotonic() - began)}, "cuts": cuts(models, COMMS), "cells": cells,
    }  # fmt: skip
    print(json.dumps(result) if args.json else json.dumps(cells, indent=1))
    return 0 if all("error" not in cell for cell in cells) else 1
