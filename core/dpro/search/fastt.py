"""FastT (Yi et al., Middleware 2020): where each op of a model runs, in which order, and which are cut into parts.

Knows the algorithms and what the replayer says of their plans; estimates choose nothing. Every plan is replayed
(:func:`dpro.replay.placed.judge`) and the shortest step that fits the memory is returned, data parallelism, one device
and data parallelism by rank among what is tried: FastT's rule to roll back. Beside the published algorithms there are
contention-aware ones (:mod:`dpro.search.list_schedule`), and a descent from the best of them
(:mod:`dpro.search.descent`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints, Tasks
from dpro.passes.replicate import REPLICA, replicate
from dpro.passes.split import Split
from dpro.replay.placed import Judged, judge
from dpro.search.list_schedule import Problem, Schedule, cpop, dpos, heft
from dpro.search.os_dpos import os_dpos
from dpro.search.ranks import positions, rank_order
from dpro.trace.model_graph import ModelGraph

DATA_PARALLEL = "data parallel"
RANK_ORDER = "data parallel, rank order"
SINGLE = "single device"
BASELINES = (DATA_PARALLEL, RANK_ORDER, SINGLE)
AWARE = "contention-aware "
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

    def worth(self, cluster: Cluster) -> tuple[float, int]:
        """Smaller is better: first what is missing of memory, as a share, then time."""
        limit = cluster.memory_bytes()
        over = (self.judged.peak_bytes / np.where(limit == 0, np.inf, limit)).max()
        return max(0.0, float(over) - 1.0), self.makespan_ns


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


def fastt(model: ModelGraph, cluster: Cluster, *, batch: float = 1.0, replicas: int | None = None) -> Result:
    """The best plan found for a step of ``model`` with ``batch`` times its batch.

    Args:
        replicas: copies of the model that share the batch; None: one for each device.
    """
    begin = time.perf_counter()
    count = replicas or len(cluster)
    tasks, whole = replicate(model, count, batch), replicate(model, 1, batch)
    plans = [*start_plans(tasks, whole, cluster)]
    plans += _list_schedules(tasks, cluster)
    if count > 1 and not any(plan.judged.fits for plan in plans):
        plans += _list_schedules(whole, cluster)  # the model alone, spread over devices
    return _best(plans, cluster, begin)


def place(tasks: Tasks, cluster: Cluster) -> Result:
    """:func:`fastt` for tasks as they are. Without replicas, the baseline is one device."""
    begin = time.perf_counter()
    return _best([*start_plans(tasks, tasks, cluster), *_list_schedules(tasks, cluster)], cluster, begin)


def start_plans(tasks: Tasks, whole: Tasks, cluster: Cluster) -> Iterator[Plan]:
    """The baselines: ``tasks``' replicas on a device each, parameters on the first; ``whole`` on the fastest one."""
    if REPLICA in tasks.info:
        device = np.maximum(np.asarray(tasks.info[REPLICA], dtype=np.int64), 0) % len(cluster)
        yield _plan(DATA_PARALLEL, tasks, device, cluster, None)
        yield _plan(RANK_ORDER, tasks, device, cluster, rank_order(tasks, cluster, device))
    times_ns = cluster.times_ns(whole.types, whole.time_ns).sum(axis=0)
    alone = [
        _plan(SINGLE, whole, np.full(len(whole), d, np.int64), cluster, None) for d in np.argsort(times_ns, kind="stable")
    ]
    yield min(alone, key=lambda plan: plan.worth(cluster))


def published(name: str, problem: Problem, room: float = 1.0) -> tuple[Problem, Schedule, tuple[Split, ...]]:
    """What an algorithm makes of a problem, by its name: one of :data:`ALGORITHMS`, or so with :data:`AWARE` before."""
    contention = name.startswith(AWARE)
    algorithm = name.removeprefix(AWARE)
    if algorithm == "OS-DPOS":
        cut = os_dpos(problem, lambda one: dpos(one, contention=contention, room=room))
        return cut.problem, cut.schedule, cut.splits
    simple: dict[str, Callable[..., Schedule]] = {"HEFT": heft, "CPOP": cpop, "DPOS": dpos}
    return problem, simple[algorithm](problem, contention=contention, room=room), ()


ALGORITHMS = ("HEFT", "CPOP", "DPOS", "OS-DPOS")


def schedule_plan(name: str, problem: Problem) -> Plan:
    """An algorithm's placement in the order in which it would start tasks; with less memory where it does not fit."""
    limited = bool(problem.cluster.memory_bytes().any())
    best: Plan | None = None
    for room in _ROOMS if limited else _ROOMS[:1]:
        made, schedule, splits = published(name, problem, room)
        plan = _plan(name, made.tasks, schedule.device, problem.cluster, schedule.priority(), splits)
        if best is None or plan.worth(problem.cluster) < best.worth(problem.cluster):
            best = plan
        if plan.judged.fits:
            break
    assert best is not None
    return best


def _list_schedules(tasks: Tasks, cluster: Cluster) -> Iterator[Plan]:
    """Every algorithm's plan, and the same placement in the order of the rank that tasks have on it."""
    problem = Problem(tasks, cluster)
    for name in (*ALGORITHMS, *(AWARE + name for name in ALGORITHMS)):
        plan = schedule_plan(name, problem)
        yield plan
        by_rank = rank_order(plan.tasks, cluster, plan.device)
        yield _plan(name, plan.tasks, plan.device, cluster, by_rank, plan.splits)


def _plan(
    strategy: str, tasks: Tasks, device: Ints, cluster: Cluster, priority: Ints | None, splits: tuple[Split, ...] = ()
) -> Plan:
    return Plan(strategy, tasks, device, priority, judge(tasks, device, cluster, priority), splits)


def _best(plans: list[Plan], cluster: Cluster, begin: float) -> Result:
    best = min(plans, key=lambda plan: plan.worth(cluster))  # of equals the first: a baseline before what is more work
    tried: dict[str, float | None] = {}
    for plan in plans:
        now = plan.makespan_ns / 1e6 if plan.judged.fits else None
        before = tried.get(plan.strategy)
        tried[plan.strategy] = min((t for t in (before, now) if t is not None), default=None)
    devices = [device.name for device in cluster.devices]
    played = best.judged.played.start[: len(best.tasks)]
    urgent = positions(np.argsort(played, kind="stable")) if best.priority is None else best.priority
    names = best.tasks.names
    return Result(
        best.strategy, best.makespan_ns, {name: tried[name] for name in BASELINES if name in tried},
        {name: devices[d] for name, d in zip(names, best.device.tolist(), strict=True)},
        [names[task] for task in np.argsort(urgent, kind="stable").tolist()],
        best.splits, best.judged.fits, time.perf_counter() - begin, best, tried,
    )  # fmt: skip
