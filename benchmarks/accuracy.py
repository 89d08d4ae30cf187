"""How right the replay is: the accuracy matrix, and with ``--plans`` predictions of plans that were never run.

A cell is one job on hosts with clocks of their own. In it un-profiled windows and captures take turns; each capture
is replayed alone and held against the mean of the un-profiled steps right before and after it (10 of them, the slowest
rank's): machines drift, and a replay can't know the time of another minute. The cell's error is the mean over captures.
The noise floor is how far the medians of two interleaved halves of the un-profiled windows lie apart: nothing finer
can be told. A cell whose floor is above 2 % is run again, twice at most, and all its runs are taken together.

``python -m benchmarks.accuracy --json`` prints ``{place, cuts, cells, summary}``; a cell has the keys ``model, comm,
link, hosts, emulated, measured_ms, replayed_ms, error_pct, daydream_error_pct, unaligned_error_pct, noise_floor_pct,
capture_overhead_pct, after_overhead_pct``, spreads, and how often it was run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import comms
from benchmarks.cells import COMMS, LINKS, MODELS, Jobs, JobSet, say, slowest_ms
from benchmarks.matrix import run_matrix
from benchmarks.plans import measure_plans, summarise_plans
from benchmarks.predict import KNOBS, load, replayed
from benchmarks.tables import accuracy_table, plans_table
from benchmarks.testbed import TestbedError
from dpro.errors import DproError

FLOOR_PCT = 2.0
MOST_RUNS = 3
#: TensorFlow's first ten steps take and touch fresh memory (1,700 page faults each here, 30 from then on).
WARMUP = 12
#: Links of the matrix by number of hosts, for torch: with more than two the compute is emulated.
LINKS_OF = {2: tuple(LINKS), 4: ("200mbit",), 8: ("200mbit",)}
#: And for the other frameworks, which compute for real only.
SHAPED = ("1gbit", "200mbit")


def links_of(comm: str, hosts: int, plans: bool = False) -> tuple[str, ...]:
    """Links of the matrix for ``comm``; none where it is not in it. ``plans``: of the matrix of plans."""
    known = comms.COMMS[comm]
    if hosts > 2 and not known.emulates:
        return ()
    if plans:
        return ("1gbit",) if known.sets in KNOBS else ()
    return LINKS_OF.get(hosts, ("200mbit",)) if known.emulates else SHAPED


def share_pct(value: float, reference: float) -> float:
    """How much more ``value`` is than ``reference``, %."""
    return round(100 * (value / reference - 1), 2)


def figures(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of one or more orders ``measure``, each answered by all ranks: what was timed, and what the replays say."""
    plain, captured, played, beside = [], [], [], []
    before, after = [], []
    for answers in runs:
        windows = [slowest_ms(window) for window in zip(*(a["plain_ns"] for a in answers), strict=True)]
        captured += [slowest_ms(window) for window in zip(*(a["captured_ns"] for a in answers), strict=True)]
        own = [replayed(load(files)) for files in zip(*(a["traces"] for a in answers), strict=True)]
        beside += [statistics.fmean([*windows[k + 1], *windows[k + 2]]) for k in range(len(own))]
        played += own
        plain += windows
        before += [float(ms) for window in windows[:2] for ms in window]
        after += [float(ms) for window in windows[2:] for ms in window]
    steps = [float(ms) for window in plain for ms in window]
    measured_ms, median_ms = statistics.fmean(steps), statistics.median(steps)
    halves = [statistics.median(float(ms) for window in plain[half::2] for ms in window) for half in (0, 1)]

    def error_pct(replays_ms: Iterable[float]) -> float:
        return share_pct(statistics.fmean(ms / near for ms, near in zip(replays_ms, beside, strict=True)), 1.0)

    low_ms, _, high_ms = statistics.quantiles(steps, n=4)
    return {
        "measured_ms": round(measured_ms, 2),
        "measured_median_ms": round(median_ms, 2),
        "measured_middle_half_ms": [round(low_ms, 2), round(high_ms, 2)],
        "measured_steps": len(steps),
        "replayed_ms": round(statistics.fmean(r.replayed_ms for r in played), 2),
        "each_error_pct": [share_pct(r.replayed_ms, near) for r, near in zip(played, beside, strict=True)],
        "error_pct": error_pct(r.replayed_ms for r in played),
        "daydream_error_pct": error_pct(r.daydream_ms for r in played),
        "unaligned_error_pct": error_pct(r.unaligned_ms for r in played),
        "noise_floor_pct": abs(share_pct(halves[0], halves[1])),
        "capture_overhead_pct": error_pct(statistics.fmean(window) for window in captured),
        "after_overhead_pct": share_pct(statistics.median(after), statistics.median(before)),
        "warnings": list(dict.fromkeys(line for r in played for line in r.warnings)),
    }


def measure_cell(job: JobSet, link: str, args: argparse.Namespace) -> dict[str, Any]:
    """One cell on a running job, again where the machine was too noisy; all runs count."""
    runs: list[list[dict[str, Any]]] = []
    found: dict[str, Any] = {}
    job.bed.set_rate(LINKS[link])
    while len(runs) < args.most_runs and found.get("noise_floor_pct", FLOOR_PCT + 1) > FLOOR_PCT:
        begin_s = time.monotonic()
        prefix = f"{link}-{len(runs)}"
        runs.append(job.ask("measure", warmup=args.warmup, steps=args.steps, rounds=args.captures, prefix=prefix))
        found = figures(runs)
        say(
            f"  {link}: measured {found['measured_ms']:.1f} ms, replayed {found['replayed_ms']:.1f} "
            f"({found['error_pct']:+.1f} %), floor {found['noise_floor_pct']:.1f} %, {time.monotonic() - begin_s:.0f} s"
        )
        if args.keep:
            _keep(runs[-1], args.keep / f"{job.jobs.model}-{job.jobs.comm}-{link}-{job.jobs.hosts}-{len(runs)}")
    return {**_identity(job, link), **found, "runs": len(runs)}


def _identity(job: JobSet, link: str) -> dict[str, Any]:
    jobs = job.jobs
    return {
        "model": jobs.model, "comm": jobs.comm, "link": link, "hosts": jobs.hosts, "emulated": jobs.emulated,
        "mode": job.mode,
    }  # fmt: skip


def _keep(answers: list[dict[str, Any]], folder: Path) -> None:
    """Copies of the traces, for finding out what is wrong: one folder per capture, as ``dpro replay`` takes it."""
    for answer in answers:
        for number, file in enumerate(answer["traces"]):
            rank = Path(file).stem.rpartition("-")[2]
            target = folder.with_name(f"{folder.name}-{number}") / f"rank{rank}"
            target.mkdir(parents=True, exist_ok=True)
            (target / "trace.npz").write_bytes(Path(file).read_bytes())


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the matrix, cell by cell; one whose job fails has an ``error``."""
    for hosts in args.hosts:
        for comm in args.comms:
            links = [link for link in links_of(comm, hosts, args.plans) if link in args.links]
            for model in args.models if links else ():
                jobs = Jobs(model, comm, hosts)
                say(jobs.describe())
                for link in links:
                    # a job for each: one that was captured a dozen times on other links is not what a user tunes
                    try:
                        with JobSet(jobs, timeout_s=args.timeout_s) as job:
                            if args.plans:
                                yield {**_identity(job, link), **measure_plans(job, link, args)}
                            else:
                                yield measure_cell(job, link, args)
                    except (RuntimeError, ValueError, TestbedError, DproError) as error:
                        say(f"  {error}")
                        yield {"model": model, "comm": comm, "hosts": hosts, "link": link, "error": str(error)}


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and worst absolute error of the cells."""
    good = [cell for cell in found if "error_pct" in cell]
    if not good:
        return {"cells": 0, "failed": len(found)}
    keys = ("error_pct", "daydream_error_pct", "unaligned_error_pct", "capture_overhead_pct", "noise_floor_pct")
    sizes = {key: [abs(cell[key]) for cell in good] for key in keys}
    return {
        "cells": len(good),
        "failed": len(found) - len(good),
        **{f"mean_{key}": round(statistics.fmean(values), 2) for key, values in sizes.items()},
        **{f"worst_{key}": max(values) for key, values in sizes.items()},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plans", action="store_true", help="predict plans, then run them (1gbit, 2 hosts)")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--comms", nargs="+", default=COMMS, choices=COMMS)
    parser.add_argument("--links", nargs="+", default=tuple(LINKS), choices=tuple(LINKS))
    parser.add_argument("--hosts", nargs="+", type=int, default=None, help="default 2 4 8; 2 with --plans")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before a cell's first window")
    parser.add_argument("--steps", type=int, default=5, help="steps per window and per capture")
    parser.add_argument("--captures", type=int, default=10, help="captures per cell; un-profiled windows are two more")
    parser.add_argument("--most-runs", type=int, default=MOST_RUNS, help="runs of a cell that is too noisy")
    parser.add_argument("--rounds", type=int, default=6, help="with --plans: visits to each plan")
    parser.add_argument("--budget-s", type=float, default=60, help="with --plans: time for the plans of a model")
    parser.add_argument("--timeout-s", type=float, default=300, help="the longest that one order may take")
    parser.add_argument("--keep", type=Path, help="folder for the traces")
    parser.add_argument("--table", type=Path, help="write the result into this Markdown file, between its markers")
    return parser


def main() -> int:
    """Measure and print."""
    args = _parser().parse_args()
    args.hosts = args.hosts or ([2] if args.plans else [2, 4, 8])
    if args.plans:
        return run_matrix("accuracy", args, cells, summarise_plans, plans_table)
    return run_matrix("accuracy", args, cells, summarise, accuracy_table)


if __name__ == "__main__":
    sys.exit(main())
