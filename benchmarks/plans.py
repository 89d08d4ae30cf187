"""Plans that were never run: predicted from the captured default, then measured in the same job, interleaved.

A prediction is the un-profiled time of the default settings times the ratio of two replays. ``error_pct`` holds it
against the measurement with the default's time taken from the same interleaved rounds; ``raw_error_pct`` with the time
from before, the machine's drift in between included. Medians of steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

from benchmarks.cells import LINKS, JobSet, say, slowest_ms
from benchmarks.predict import Predictor, load, spearman

#: Steps before the capture. A job's first ones are another job's: ResNet50's under Horovod were 26 % longer than the
#: same settings' a minute later, and a prediction made of them is held against plans that run in that later minute.
_SETTLED = 30


def measure_plans(job: JobSet, link: str, args: argparse.Namespace) -> dict[str, Any]:
    """Capture the default, predict five plans, run them. Keys ``default_ms, plans, spearman, noise_pct``."""
    job.bed.set_rate(LINKS[link])
    answers = job.ask("measure", warmup=max(args.warmup, _SETTLED), steps=2 * args.steps, rounds=1, prefix="plans")
    plain = [slowest_ms(window) for window in zip(*(a["plain_ns"] for a in answers), strict=True)]
    before_ms = statistics.median(float(ms) for window in plain for ms in window)
    predictor = Predictor(load(a["traces"][0] for a in answers), job.jobs.comm, before_ms)
    named = predictor.spread()
    best = predictor.best()
    if best is None:
        halves = predictor.uniform(predictor.total_bytes / 2)
        best = predictor.predict([("halves", halves)])[0]
    else:
        best = f"search's best: {best[0]}", best[1]
    named.append(best)
    orders: list[str | None] = [None, *(plan.dumps() for _, plan in named)]
    timed = job.ask(
        "arms", plans=orders, rounds=args.rounds, steps=args.steps, settle=3, budget_s=args.budget_s
    )  # fmt: skip
    times_ms = [slowest_ms(arm).tolist() for arm in zip(*(a["times_ns"] for a in timed), strict=True)]
    default_ms, *measured_ms = [statistics.median(arm) for arm in times_ms]
    noise = max(_noise(arm) for arm in times_ms)
    predicted_ms = [plan.predicted_ms or math.nan for _, plan in named]
    rows = [
        {
            "plan": name,
            "groups": len(predictor.grouping(plan)),
            "predicted_ms": round(told / before_ms * default_ms, 2),
            "measured_ms": round(seen, 2),
            "error_pct": round(100 * (told / before_ms * default_ms / seen - 1), 2),
            "raw_error_pct": round(100 * (told / seen - 1), 2),
        }
        for (name, plan), told, seen in zip(named, predicted_ms, measured_ms, strict=True)
    ]
    for row in rows:
        say(f"  {row['plan']}: predicted {row['predicted_ms']}, measured {row['measured_ms']} ms")
    order = spearman([before_ms, *predicted_ms], [default_ms, *measured_ms], noise)
    return {
        "captured_ms": round(before_ms, 2),
        "default_ms": round(default_ms, 2),
        "steps": len(times_ms[0]),
        "noise_pct": round(100 * noise, 2),
        "plans": rows,
        "spearman": None if order is None else round(order, 3),
    }


def _noise(times_ms: list[float]) -> float:
    """Two standard errors of the median, as a share of it, by the median deviation of (nearly) normal noise."""
    middle = statistics.median(times_ms)
    spread = 1.4826 * statistics.median(abs(ms - middle) for ms in times_ms)
    return 2 * math.sqrt(math.pi / 2) * spread / math.sqrt(len(times_ms)) / middle


def summarise_plans(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst errors and lowest order of all models."""
    rows = [row for cell in found for row in cell.get("plans", [])]
    orders = [cell["spearman"] for cell in found if cell.get("spearman") is not None]
    return {
        "plans": len(rows),
        "failed": sum("error" in cell for cell in found),
        "worst_error_pct": max((abs(row["error_pct"]) for row in rows), default=None),
        "worst_raw_error_pct": max((abs(row["raw_error_pct"]) for row in rows), default=None),
        "lowest_spearman": min(orders, default=None),
    }
