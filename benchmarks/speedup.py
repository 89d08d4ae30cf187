"""What tuning is worth: dpro's plan against the library's default, the best of a sweep, and Horovod's autotune.

A cell is one job. dpro's real tuner runs in it to its verdict; then the default settings, dpro's plan and a sweep of
uniform buckets take turns (Horovod: uniform groups, in the order gradients become ready; BytePS: one partition size as
its own setting has it, and one with four partitions on their way at once).
``tuned`` is what dpro left in force: the default settings, timed once more, where its verdict was that nothing is
better.

The best of the sweep is found in one half of the time and compared with what is in force in another:
``sweep_best_ms`` is the tuned time times that ratio, ``sweep_ms`` what was seen while it was looked for.

``HOROVOD_AUTOTUNE=1`` is read when Horovod starts, so it gets a job of its own and five times the steps that dpro took;
then windows of that job and of the default one take turns, the other one stopped. ``autotune_ms`` is the default's
time over the speed-up seen there. DDP and BytePS have no autotune: null.

Where dpro has a plan for a job that is started anew with what can't be set in a running one (Horovod's cycle time),
that job is compared with the default one in the same way, and ``tuned_ms`` is what follows the plan: the default's time
over that speed-up; ``in_job_ms`` is what was in force in the job that was tuned. ``start_predicted_ms``: what dpro
said.

``possible_speedup`` is about the most that other buckets or groups could reach: the default's time over that with
nothing to hold the link back, or over what the gradients take at the link's rate, whichever is more; its windows take
turns as well.

Where layers can be compiled (Keras under Horovod, DDP), ``clusters_ms`` has three arms that take turns: ``nothing``
compiled, ``everything`` that can be (by XLA: what follows each other is one cluster, as its auto-clustering would have
it, and gradients are there at its end; by torch.compile: every block of the model, each by itself), and dpro's plan;
``clusters_unshaped_ms`` the same with nothing to hold the link back. What lies between is what a step waits for its
gradients.

``fusions_ms`` there has, in turns, the default, every layer compiled, and what the search makes of the tuner's own
capture when it may turn buckets or groups alone, layers alone, and both (the plan that it likes best each time, whether
or not the tuner's trial kept one; what is the same plan is one arm).

With ``--fusions`` nothing else is measured, and these arms have all of a cell's time; ``tuned_ms`` is that of both.
``--hetero`` is about hosts that are not alike (:mod:`benchmarks.hetero`), and nothing else either.

``python -m benchmarks.speedup --json`` prints ``{place, cuts, cells, summary}``; a cell has the keys ``model, comm,
link, hosts, default_ms, tuned_ms, autotune_ms, sweep_best_ms, predicted_ms, verdict``, spreads and what was set.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import comms, predict
from benchmarks.cells import COMMS, LINKS, MODELS, Jobs, JobSet, say, slowest_ms
from benchmarks.matrix import run_matrix
from benchmarks.tables import fusions_table, speedup_table
from benchmarks.testbed import TestbedError
from benchmarks.testbed.network import UNSHAPED, parse_rate
from dpro.adapter import Knob
from dpro.errors import DproError
from dpro.graph.assemble import assemble
from dpro.plan import Plan
from dpro.planning import inform
from dpro.search.critical_path import optimize
from dpro.trace.store import load

SWEEP_MIB = (0.5, 1, 2, 4, 8, 16)
#: Of partitions, all of which may be on their way at once, as BytePS has it (its own bound is 3.90625).
SWEEP_PARTITIONS_MIB = (0.25, 1)
#: Of partitions of which :data:`AT_ONCE` are.
SWEEP_FLOWS_MIB = (0.0625, 0.25, 0.5, 1, 2, 3.90625)
AT_ONCE = 4
DEFAULT, TUNED = "default", "tuned"
_MIB = 2**20
_PAGE = 4096
#: The tuner's settings here: shorter than its defaults, since a cell has little more than a minute.
SETTINGS = {
    "warmup_steps": 4, "baseline_steps": 8, "capture_steps": 5, "verify_steps": 6, "trials": 2, "regions_s": 10.0,
}  # fmt: skip
_MOST_STEPS = 400
_WINDOWS, _WINDOW_STEPS = 4, 6
#: Steps of a job that was just started before it is compared.
_FIRST_STEPS = 5
#: Name to plan (JSON); None: the job's own settings.
Arms = Mapping[str, str | None]


def uniform_plan(comm: str, ready: list[tuple[str, int]], cap_mib: float) -> Plan:
    """Buckets or groups that are closed as soon as they reach the cap, or partitions of that size.

    ``ready``: (name, bytes) in ready order.
    """
    sets = comms.COMMS[comm].sets
    if sets == "buckets":
        return Plan(bucket_caps=[cap_mib])
    if sets == "partitions":
        return Plan(partitions={name: _pages(cap_mib * _MIB) for name, _ in ready})
    groups: list[list[str]] = [[]]
    held = 0
    for name, nbytes in ready:
        groups[-1].append(name)
        held += nbytes
        if held >= cap_mib * _MIB:
            groups.append([])
            held = 0
    return Plan(tensor_groups=[group for group in groups if group])


def flow_plan(ready: list[tuple[str, int]], part_mib: float) -> Plan:
    """Partitions of that size, :data:`AT_ONCE` of them on their way at once; ``ready`` as for :func:`uniform_plan`."""
    nbytes = _pages(part_mib * _MIB)
    names = [name for name, _ in ready]
    return Plan(partitions=dict.fromkeys(names, nbytes), in_flight_bytes=AT_ONCE * nbytes, push_order=names)


def _pages(nbytes: float) -> int:
    """BytePS cuts at whole pages."""
    return math.ceil(nbytes / _PAGE) * _PAGE


def measure_cell(job: JobSet, link: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tune, then time all arms."""
    begin_s = time.monotonic()
    jobs = job.jobs
    job.bed.set_rate(LINKS[link])
    ready = [(name, nbytes) for name, nbytes in job.ask("ready")[0]["ready"]]
    with tempfile.TemporaryDirectory() as runs:
        settings = {**SETTINGS, "runs_dir": runs}
        tuned = job.ask("tune", settings=settings, most_steps=_MOST_STEPS)[0]
        alone = _alone(Path(runs), jobs.comm) if comms.COMMS[jobs.comm].compiles else {}
    say(f"  {link}: {tuned['verdict'].lower()} after {tuned['steps']} steps: {tuned['reason']}")
    if args.fusions:
        return _fusions_alone(job, link, alone, args)
    kept = tuned["plan"] if tuned["verdict"] == "KEPT" else None
    total_mib = sum(nbytes for _, nbytes in ready) / _MIB
    usual = SWEEP_PARTITIONS_MIB if comms.COMMS[jobs.comm].sets == "partitions" else SWEEP_MIB
    caps = [cap for cap in args.sweep_mib or usual if cap < total_mib]
    sweep = {f"{cap:g} MiB": uniform_plan(jobs.comm, ready, cap).dumps() for cap in caps}
    sweep["all in one"] = uniform_plan(jobs.comm, ready, total_mib + 1).dumps()
    if comms.COMMS[jobs.comm].sets == "partitions" and not args.sweep_mib:
        sweep |= {f"{cap:g} MiB, {AT_ONCE} at once": flow_plan(ready, cap).dumps() for cap in SWEEP_FLOWS_MIB}
    times_ms = _arms(job, {DEFAULT: None, TUNED: kept}, sweep, args.rounds, args)
    medians = {arm: statistics.median(times) for arm, times in times_ms.items()}
    best = min(sweep, key=medians.__getitem__)
    # the times that made it the best of several were lucky ones: it is compared in others
    again = _arms(job, {}, {TUNED: kept, best: sweep[best]}, 2 * args.rounds, args)
    against = statistics.median(again[best]) / statistics.median(again[TUNED])
    found: dict[str, Any] = {
        "model": jobs.model, "comm": jobs.comm, "link": link, "hosts": jobs.hosts, "emulated": jobs.emulated,
        "mode": job.mode,
        "default_ms": round(medians[DEFAULT], 2), "tuned_ms": round(medians[TUNED], 2),
        "in_job_ms": round(medians[TUNED], 2), "start_plan": None, "start_predicted_ms": None,
        "autotune_ms": None, "autotune_speedup": None,
        "sweep_best_ms": round(against * medians[TUNED], 2), "sweep_best": best,
        "sweep_ms": {arm: round(medians[arm], 2) for arm in sweep},
        "predicted_ms": tuned["predicted_ms"], "verdict": tuned["verdict"], "reason": tuned["reason"],
        "tuner_baseline_ms": tuned["baseline_ms"], "tuner_steps": tuned["steps"],
        "plan": json.loads(kept) if kept else None,
        "noise_pct": round(100 * max(_noise(times_ms[arm]) for arm in (DEFAULT, TUNED)), 2),
        "steps": {arm: len(times) for arm, times in times_ms.items()},
    }  # fmt: skip
    found["possible_speedup"] = _possible(job, link, sum(nbytes for _, nbytes in ready))
    if comms.COMMS[jobs.comm].compiles:
        found |= _clusters(job, link, kept, args)
        found |= _fusions(job, alone, args)
    if tuned["at_start"] and Plan.loads(tuned["at_start"]).cycle_time:
        found |= _started_anew(job, link, Plan.loads(tuned["at_start"]), found["default_ms"], args)
    if comms.COMMS[jobs.comm].launcher == "horovod" and args.autotune_factor:
        found |= _autotune(job, link, round(args.autotune_factor * tuned["steps"]), found["default_ms"], args)
    say(
        f"  {link}: default {found['default_ms']:.1f}, tuned {found['tuned_ms']:.1f} (in the job "
        f"{found['in_job_ms']:.1f}), best of the sweep {found['sweep_best_ms']:.1f} ({best}), autotune "
        f"{found['autotune_ms']}; {time.monotonic() - begin_s:.0f} s"
    )
    return found


def _arms(job: JobSet, judged: Arms, others: Arms, rounds: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Times of all arms, ms. The judged ones come twice a round: before the others and in their middle."""
    items = list(others.items())
    half = len(items) // 2
    arms: list[tuple[str, str | None]] = [*judged.items(), *items[:half], *judged.items(), *items[half:]]
    answers = job.ask(
        "arms", plans=[plan for _, plan in arms], rounds=rounds, steps=args.steps, settle=args.settle,
        budget_s=args.budget_s,
    )  # fmt: skip
    times: dict[str, list[float]] = {}
    for (label, _), *per_rank in zip(arms, *(a["times_ns"] for a in answers), strict=True):
        times.setdefault(label, []).extend(slowest_ms(per_rank).tolist())
    return times


def _autotune(job: JobSet, link: str, steps: int, default_ms: float, args: argparse.Namespace) -> dict[str, Any]:
    """A job under HOROVOD_AUTOTUNE that has trained for ``steps`` steps, against ``job``."""

    def train(other: JobSet) -> None:
        other.ask("train", steps=steps, window=1)

    ratios = _beside(job, link, {"HOROVOD_AUTOTUNE": "1"}, train, args.timeout_s + steps)
    speedup = statistics.median(ratios)
    return {
        "autotune_ms": round(default_ms / speedup, 2),
        "autotune_speedup": round(speedup, 4),
        "autotune_speedup_each": [round(ratio, 3) for ratio in ratios],
        "autotune_steps": steps,
    }


def _started_anew(job: JobSet, link: str, plan: Plan, default_ms: float, args: argparse.Namespace) -> dict[str, Any]:
    """A job that is started as ``plan`` says, its groups in force, against ``job``."""
    groups = replace(plan, cycle_time=None)

    def hold(other: JobSet) -> None:
        other.ask("train", steps=_FIRST_STEPS, window=1)
        if groups.settings():
            other.ask("hold", plan=groups.dumps())

    ratios = _beside(job, link, {"HOROVOD_CYCLE_TIME": str(plan.cycle_time)}, hold, args.timeout_s)
    speedup = statistics.median(ratios)
    return {
        "tuned_ms": round(default_ms / speedup, 2),
        "start_speedup_each": [round(ratio, 3) for ratio in ratios],
        "start_plan": json.loads(plan.dumps()),
        "start_predicted_ms": plan.predicted_ms,
    }


def _beside(
    job: JobSet, link: str, env: dict[str, str], prepare: Callable[[JobSet], None], timeout_s: float
) -> list[float]:
    """Speed-ups over ``job`` of another job with ``env``, window by window; one is stopped while the other runs."""
    ratios = []
    job.pause()
    try:
        with JobSet(job.jobs, env, timeout_s=timeout_s) as other:
            other.bed.set_rate(LINKS[link])
            prepare(other)
            for _ in range(_WINDOWS):
                there = _window(other)
                other.pause()
                job.resume()
                ratios.append(_window(job) / there)
                job.pause()
                other.resume()
    finally:
        job.resume()
    return ratios


def _clusters(job: JobSet, link: str, kept: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """See the module's ``clusters_ms``."""
    layers = job.ask("layers")[0]["layers"]
    if not layers:  # emulated: nothing is computed
        return {}
    arms = {"nothing": None, "everything": Plan(compile_regions=layers).dumps(), "dpro": kept}

    def medians() -> dict[str, float]:
        times = _arms(job, arms, {}, args.rounds, args)
        return {arm: round(statistics.median(found), 2) for arm, found in times.items()}

    found: dict[str, Any] = {"clusters_ms": medians()}
    job.bed.set_rate(UNSHAPED)
    found["clusters_unshaped_ms"] = medians()
    job.bed.set_rate(LINKS[link])
    compiled = Plan.loads(kept).compile_regions if kept else None
    return {**found, "compiled_layers": len(compiled or [])}


def _alone(runs: Path, comm: str) -> dict[str, str | None]:
    """The best plans of the capture in ``runs`` that fuse tensors, ops, and both; None where nothing is better."""
    folder = next((path.parent.parent for path in sorted(runs.glob("*/rank*/trace.npz"))), None)
    if folder is None:
        return {}
    traces = load(folder)
    graph = assemble(traces)
    inform(graph, traces)
    tensors = predict.KNOBS[comms.COMMS[comm].sets]
    found = {}
    for name, knobs in (("tensor fusion", tensors), ("op fusion", {Knob.COMPILE_REGIONS})):
        found[name] = optimize(graph, knobs=knobs, top=1).candidates
    found["both"] = optimize(graph, knobs={*tensors, Knob.COMPILE_REGIONS}, top=1).candidates
    return {name: some[0].plan.dumps() if some else None for name, some in found.items()}


def _fusions(job: JobSet, plans: dict[str, str | None], args: argparse.Namespace) -> dict[str, Any]:
    """See the module's ``fusions_ms``."""
    if not plans:
        return {}
    layers = job.ask("layers")[0]["layers"]
    arms = {"default": None, "everything": Plan(compile_regions=layers).dumps() if layers else None, **plans}
    first = {arm: next(other for other in arms if arms[other] == plan) for arm, plan in arms.items()}
    times = _arms(job, {arm: arms[arm] for arm in dict.fromkeys(first.values())}, {}, args.rounds, args)
    return {
        "fusions_ms": {arm: round(statistics.median(times[first[arm]]), 2) for arm in arms},
        "fusions_noise_pct": round(100 * max(_noise(found) for found in times.values()), 2),
        "fusions_set": {name: sorted(Plan.loads(plan).settings()) if plan else [] for name, plan in plans.items()},
    }


def _fusions_alone(job: JobSet, link: str, plans: dict[str, str | None], args: argparse.Namespace) -> dict[str, Any]:
    """A cell of nothing else."""
    found = _fusions(job, plans, args)
    if not found:
        raise ValueError("the tuner captured nothing, or the job is not one in which layers can be compiled")
    times = found["fusions_ms"]
    say(f"  {link}: {', '.join(f'{arm} {ms:.1f}' for arm, ms in times.items())}; noise {found['fusions_noise_pct']} %")
    return {
        "model": job.jobs.model, "comm": job.jobs.comm, "link": link, "hosts": job.jobs.hosts,
        "emulated": job.jobs.emulated, "mode": job.mode,
        "default_ms": times["default"], "tuned_ms": times["both"], "autotune_ms": None, "sweep_best_ms": None,
        "possible_speedup": 1.0, **found,
    }  # fmt: skip


def _possible(job: JobSet, link: str, nbytes: int) -> float:
    """See the module's ``possible_speedup``. ``nbytes``: of all gradients; a ring sends 2 (n-1)/n of them.

    (Of two hosts with a parameter server on one of them, the other sends as much.)
    """
    if LINKS[link] == UNSHAPED:
        return 1.0
    hosts = job.jobs.hosts
    wire_ms = nbytes * 2 * (hosts - 1) / hosts * 8 / parse_rate(LINKS[link]) * 1e3
    ratios = []
    for _ in range(_WINDOWS):
        here = _window(job)
        job.bed.set_rate(UNSHAPED)
        ratios.append(here / max(wire_ms, _window(job)))
        job.bed.set_rate(LINKS[link])
    return round(statistics.median(ratios), 4)


def _window(job: JobSet) -> float:
    answers = job.ask("train", steps=1, window=_WINDOW_STEPS)
    return float(statistics.median(slowest_ms([a["times_ns"] for a in answers]).tolist()))


def _noise(times_ms: list[float]) -> float:
    """Two standard errors of the median, as a share of it, from the middle half of the sample."""
    low, middle, high = statistics.quantiles(times_ms, n=4)
    return float(2 * 1.2533 * (high - low) / 1.349 / math.sqrt(len(times_ms)) / middle)


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the matrix, cell by cell; a process set that fails becomes a cell with an ``error``."""
    for comm in args.comms:
        for model in args.models:
            jobs = Jobs(model, comm, args.hosts)
            say(jobs.describe())
            try:
                with JobSet(jobs, timeout_s=args.timeout_s) as job:
                    for link in args.links:
                        yield measure_cell(job, link, args)
            except (RuntimeError, ValueError, TestbedError, DproError) as error:
                say(f"  {error}")
                yield {"model": model, "comm": comm, "hosts": args.hosts, "links": args.links, "error": str(error)}


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups over the default and over the best of the sweep."""
    good = [cell for cell in found if "error" not in cell]
    total: dict[str, Any] = {"cells": len(good), "failed": len(found) - len(good)}
    for name, key in (("speedup", "default_ms"), ("vs_sweep", "sweep_best_ms"), ("vs_autotune", "autotune_ms")):
        ratios = [cell[key] / cell["tuned_ms"] for cell in good if cell[key] is not None]
        if ratios:
            total |= {f"median_{name}": round(statistics.median(ratios), 4), f"lowest_{name}": round(min(ratios), 4)}
    if good:
        total["median_possible_speedup"] = round(statistics.median(cell["possible_speedup"] for cell in good), 4)
    return total


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speedup", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--comms", nargs="+", default=COMMS, choices=COMMS)
    parser.add_argument("--links", nargs="+", default=("1gbit", "200mbit"), choices=tuple(LINKS))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--sweep-mib", nargs="+", type=float, help="uniform caps of the sweep")
    parser.add_argument("--rounds", type=int, default=3, help="visits to each arm of the sweep at most")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per visit")
    parser.add_argument("--settle", type=int, default=2, help="steps after a change of settings that are not timed")
    parser.add_argument("--budget-s", type=float, default=45, help="time for the arms of a cell")
    parser.add_argument(
        "--autotune-factor",
        type=float,
        default=5,
        help="Horovod's autotune gets so many times dpro's steps; 0: leave it out",
    )
    parser.add_argument("--hetero", action="store_true", help="two hosts, one at half speed: unequal shares of a batch")
    parser.add_argument("--fusions", action="store_true", help="compare fusing tensors, ops and both, and nothing else")
    parser.add_argument("--timeout-s", type=float, default=300, help="the longest that one order may take")
    parser.add_argument("--table", type=Path, help="write the result into this Markdown file, between its markers")
    args = parser.parse_args()
    if args.hetero:
        from benchmarks import hetero

        return hetero.run(args)
    return run_matrix("speedup", args, cells, summarise, fusions_table if args.fusions else speedup_table)


if __name__ == "__main__":
    sys.exit(main())
