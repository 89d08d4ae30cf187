"""FastT (Yi et al., Middleware 2020): where each op of a model runs, in which order, and which are cut into parts.

Knows the algorithms and what the replayer says of their plans; estimates choose nothing. Every plan is replayed
(:func:`dpro.replay.placed.judge`) and the shortest step that fits the memory is returned, data parallelism, one device
and data parallelism by rank among what is tried: FastT's rule to roll back. Beside the published algorithms there are
contention-aware ones (:mod:`dpro.search.list_schedule`), and a descent from the best of them
(:mod:`dpro.search.descent`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints, Tasks
from dpro.passes.replicate import REPLICA, replicate
from dpro.passes.split import Split
from dpro.replay.placed import Judged, judge
from dpro.search.descent import Descent, worth
from dpro.search.list_schedule import Problem, Schedule, cpop, dpos, heft
from dpro.search.os_dpos import os_dpos
from dpro.search.ranks import positions, rank_order
from dpro.trace.model_graph import ModelGraph

DATA_PARALLEL = "data parallel"
RANK_ORDER = "data parallel, rank order"
SINGLE = "single device"
BASELINES = (DATA_PARALLEL, RANK_ORDER, SINGLE)
#: As published, and each scheduled once with slots on links.
PUBLISHED = ("HEFT", "CPOP", "DPOS", "OS-DPOS")
ONE_PASS = tuple(f"{name}, links reserved" for name in ("HEFT", "DPOS", "OS-DPOS"))
AWARE = "contention-aware DPOS"
DESCENT = "descent"
#: Shares of the memory that list scheduling may fill: what it counts is an estimate, the replay has the peak.
_ROOMS = (1.0, 0.85, 0.7, 0.5)


@dataclass(frozen=True)
class Plan:
    """Tasks, where they run, and in which order (``priority`` None: first come, first served), replayed."""

    strategy: str
    tasks: Tasks
    device: Ints
    priority: Ints | None
    judged: Judged
    splits: tuple[Split, ...] = ()

    @property
    def makespan_ns(self) -> int:
        return self.judged.makespan_ns


@dataclass(frozen=True)
class Result:
    """What FastT found. Times are replayed.

    ``baselines``: ms of each of :data:`BASELINES`, None where it does not fit; ``tried``: of every strategy.
    ``placement``: device by task; ``order``: tasks, the first to run first. ``fits`` False: nothing that was tried did,
    and this lacks least.
    """

    strategy: str
    makespan_ns: int
    baselines: dict[str, float | None]
    placement: dict[str, str]
    order: list[str]
    splits: tuple[Split, ...]
    fits: bool
    seconds: float
    plan: Plan
    tried: dict[str, float | None] = field(default_factory=dict)


def fastt(model: ModelGraph, cluster: Cluster, *, batch: float = 1.0, by_layer: bool = False) -> Result:
    """The best plan found for a step of ``model`` with ``batch`` times its batch.

    Args:
        by_layer: only what a framework can be told that places layers, of one copy; else a copy for each device shares
            the batch.
    """
    begin = time.perf_counter()
    count = 1 if by_layer else len(cluster)
    whole = replicate(model, 1, batch, by_layer=by_layer)
    tasks = whole if by_layer else replicate(model, count, batch)
    starts = start_plans(tasks, whole, cluster)
    plans = starts + search_plans(tasks, cluster, starts)
    if count > 1 and not any(plan.judged.fits for plan in plans):
        plans += search_plans(whole, cluster)  # the model alone, spread over devices
    return _best(plans, cluster, begin)


def place(tasks: Tasks, cluster: Cluster, *, splits: bool = True) -> Result:
    """:func:`fastt` for tasks as they are. Without replicas, the baseline is one device.

    Args:
        splits: tasks may be cut into parts.
    """
    begin = time.perf_counter()
    starts = start_plans(tasks, tasks, cluster)
    return _best(starts + search_plans(tasks, cluster, starts, splits=splits), cluster, begin)


def start_plans(tasks: Tasks, whole: Tasks, cluster: Cluster) -> list[Plan]:
    """The baselines: ``tasks``' replicas on a device each, parameters on the first; ``whole`` on the fastest one."""
    plans = []
    if REPLICA in tasks.info:
        replica: Ints = np.asarray(tasks.info[REPLICA], dtype=np.int64)
        device = np.maximum(replica, 0) % len(cluster)
        plans.append(_plan(DATA_PARALLEL, tasks, device, cluster, None))
        plans.append(_plan(RANK_ORDER, tasks, device, cluster, rank_order(tasks, cluster, device)))
    everywhere = (np.full(len(whole), d, np.int64) for d in range(len(cluster)))
    alone = [_plan(SINGLE, whole, device, cluster, None) for device in everywhere]
    return [*plans, min(alone, key=lambda plan: worth(plan.judged, cluster))]


def search_plans(tasks: Tasks, cluster: Cluster, starts: Sequence[Plan] = (), *, splits: bool = True) -> list[Plan]:
    """Every algorithm's plan for ``tasks``, and what a descent from them and ``starts`` finds, the best first."""
    problem = Problem(tasks, cluster)
    plans = [published_plan(name, problem) for name in (*PUBLISHED, *ONE_PASS) if splits or "OS-DPOS" not in name]
    descent = Descent(problem)
    plans.append(aware_plan(problem, descent))
    for plan in sorted([*plans, *starts], key=lambda plan: worth(plan.judged, cluster)):
        if plan.tasks is tasks and descent.left > 0:
            descent.start(plan.device, plan.priority)
    best = min(plans, key=lambda plan: worth(plan.judged, cluster))
    descents: list[tuple[Descent, Tasks, tuple[Split, ...]]] = [(descent, tasks, ())]
    if best.splits:  # what was cut has tasks that the others lack
        descents.append((Descent(Problem(best.tasks, cluster), descent.left), best.tasks, best.splits))
        descents[-1][0].start(best.device, best.priority)
    for one, whose, cuts in descents:
        one.moves()
        if one.best is not None:
            plans.append(Plan(DESCENT, whose, one.best.device, one.best.priority, one.best.judged, cuts))
    return plans


def published_plan(name: str, problem: Problem) -> Plan:
    """The placement of one of :data:`PUBLISHED` or :data:`ONE_PASS` in the order in which it would start tasks.

    Where it does not fit the memory, it is made again with less.
    """
    limited = bool(problem.cluster.memory_bytes().any())
    best: Plan | None = None
    for room in _ROOMS if limited else _ROOMS[:1]:
        made, schedule, splits = _run(name, problem, room)
        plan = _plan(name, made.tasks, schedule.device, problem.cluster, schedule.priority(), splits)
        if best is None or worth(plan.judged, problem.cluster) < worth(best.judged, problem.cluster):
            best = plan
        if plan.judged.fits:
            break
    assert best is not None
    return best


def aware_plan(problem: Problem, descent: Descent | None = None) -> Plan:
    """Contention-aware DPOS: with and without the critical path on one device, from its own placements and from the
    published one, ranks and schedules in turn (:meth:`~dpro.search.descent.Descent.start`).
    """
    descent = descent or Descent(problem)
    for schedule in (
        dpos(problem, contention=True), dpos(problem, contention=True, pin_path=False),
        dpos(problem, contention=True, literal_ties=True), dpos(problem),
    ):  # fmt: skip
        descent.start(schedule.device, schedule.priority())
    assert descent.best is not None
    found = descent.best
    return Plan(AWARE, problem.tasks, found.device, found.priority, found.judged)


def _run(name: str, problem: Problem, room: float) -> tuple[Problem, Schedule, tuple[Split, ...]]:
    contention = name in ONE_PASS
    if "OS-DPOS" in name:
        cut = os_dpos(problem, lambda one: dpos(one, contention=contention, room=room))
        return cut.problem, cut.schedule, cut.splits
    algorithms: dict[str, Callable[..., Schedule]] = {"HEFT": heft, "CPOP": cpop, "DPOS": dpos}
    return problem, algorithms[name.split(",")[0]](problem, contention=contention, room=room), ()


def _plan(
    strategy: str, tasks: Tasks, device: Ints, cluster: Cluster, priority: Ints | None, splits: tuple[Split, ...] = ()
) -> Plan:
    return Plan(strategy, tasks, device, priority, judge(tasks, device, cluster, priority), splits)


def _best(plans: list[Plan], cluster: Cluster, begin: float) -> Result:
    # of equals the first: a baseline before what is more work
    best = min(plans, key=lambda plan: worth(plan.judged, cluster))
    tried: dict[str, float | None] = {}
    for plan in plans:
        now = plan.makespan_ns / 1e6 if plan.judged.fits else None
        before = tried.get(plan.strategy)
        tried[plan.strategy] = min((t for t in (before, now) if t is not None), default=None)
    devices = [device.name for device in cluster.devices]
    played = best.judged.played.start[: len(best.tasks)]
    urgent = positions(np.argsort(played, kind="stable")) if best.priority is None else best.priority
    names = apart(best.tasks.names)
    return Result(
        best.strategy, best.makespan_ns, {name: tried[name] for name in BASELINES if name in tried},
        {name: devices[d] for name, d in zip(names, best.device.tolist(), strict=True)},
        [names[task] for task in np.argsort(urgent, kind="stable").tolist()],
        best.splits, best.judged.fits, time.perf_counter() - begin, best, tried,
    )  # fmt: skip


def apart(names: list[str]) -> list[str]:
    """Names, with the task's number where several have the same."""
    count = Counter(names)
    return [name if count[name] == 1 else f"{name}#{task}" for task, name in enumerate(names)]
