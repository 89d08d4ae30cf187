"""The shortest step that any placement and order can have, proved by CP-SAT: what FastT is held against.

The model of the replay, without its rule that what is free does not idle: a task runs on one device, a device runs one
task at a time, a tensor goes once to each other device that reads it, and a link carries one transfer at a time.
Memory has no limit. Made for small graphs: what is not proved in time has a bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro.errors import DproError
from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints, Tasks
from dpro.search.ranks import transfers_ns


@dataclass(frozen=True)
class Optimum:
    """``makespan_ns``: the shortest found; none is shorter than ``bound_ns``, which equals it where it is proved."""

    makespan_ns: int
    bound_ns: int
    proved: bool
    seconds: float


def optimum(tasks: Tasks, cluster: Cluster, hint: Ints | None = None, effort: float = 0.3) -> Optimum:
    """Devices and starts of ``tasks`` so that the last ends first.

    Args:
        hint: [n] devices to look at first.
        effort: CP-SAT's own time, which a busy machine does not make less of: 0.1 is a second or two.

    Raises:
        DproError: OR-tools is not installed, or found nothing with that effort.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise DproError("the optimum needs OR-tools: pip install ortools") from error
    times_ns = cluster.times_ns(tasks.types, tasks.time_ns)
    taken, line = transfers_ns(tasks, cluster)
    unit = max(1, math.gcd(*times_ns.reshape(-1).tolist(), *taken.reshape(-1).tolist()))
    model = cp_model.CpModel()
    step = _Step(model, tasks, cluster, times_ns // unit, taken // unit, line)
    if hint is not None:
        number: dict[int, int] = {}  # devices that are alike are told apart by the first task on each
        for task, device in enumerate(hint.tolist()):
            known = number.setdefault(device, len(number)) if step.alike else device
            for d, here in enumerate(step.on[task]):
                model.add_hint(here, d == known)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = effort
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise DproError(f"CP-SAT found no placement of {len(tasks)} tasks with effort {effort:g}")
    return Optimum(
        round(solver.objective_value) * unit, math.ceil(solver.best_objective_bound) * unit,
        status == cp_model.OPTIMAL, solver.wall_time,
    )  # fmt: skip


class _Step:
    """Variables and constraints of one step. ``on`` [n][devices]: the task runs there."""

    def __init__(self, model: Any, tasks: Tasks, cluster: Cluster, times: Ints, taken: Ints, line: Ints) -> None:
        self.model, self.tasks, self.cluster = model, tasks, cluster
        devices = range(len(cluster))
        self.horizon = int(times.max(axis=1).sum() + taken.max(axis=0).sum() * len(cluster))
        n = len(tasks)
        self.on = [[model.new_bool_var(f"on{i}.{d}") for d in devices] for i in range(n)]
        self.start = [model.new_int_var(0, self.horizon, f"start{i}") for i in range(n)]
        self.end = [model.new_int_var(0, self.horizon, f"end{i}") for i in range(n)]
        lanes: list[list[Any]] = [[] for _ in devices]
        for i in range(n):
            model.add_exactly_one(self.on[i])
            for d in devices:
                length = int(times[i, d])
                interval = model.new_optional_interval_var(
                    self.start[i], length, self.end[i], self.on[i][d], f"{i}.{d}"
                )
                if length:
                    lanes[d].append(interval)
        for lane in lanes:
            model.add_no_overlap(lane)
        for group in np.unique(tasks.together[tasks.together >= 0]):
            first, *rest = np.flatnonzero(tasks.together == group).tolist()
            for other in rest:
                for d in devices:
                    model.add(self.on[other][d] == self.on[first][d])
        self.alike = len({(device.type, device.machine) for device in cluster.devices}) == 1 and len(taken) == 1
        if self.alike:
            for i in range(min(n, len(cluster) - 1)):  # devices are alike: of placements that differ in names, one
                for d in range(i + 1, len(cluster)):
                    model.add(self.on[i][d] == 0)
        self._transfers(taken, line)
        self.makespan = model.new_int_var(0, self.horizon, "makespan")
        for end in self.end:
            model.add(self.makespan >= end)
        # a device is busy for all that it runs: says nothing new, but the solver would have to find out
        for d in devices:
            model.add(sum(int(times[i, d]) * self.on[i][d] for i in range(n)) <= self.makespan)
        model.minimize(self.makespan)

    def _transfers(self, taken: Ints, line: Ints) -> None:
        tasks, devices = self.tasks, range(len(self.cluster))
        links: dict[int, list[Any]] = {}
        for tensor, producer in enumerate(tasks.tensor_of.tolist()):
            readers = np.unique(tasks.use_task[tasks.use_tensor == tensor]).tolist()
            for reader in readers:
                self.model.add(self.start[reader] >= self.end[producer])
            for a in devices:
                for b in devices:
                    if a == b or not readers:
                        continue
                    length = int(taken[line[a, b], tensor])
                    sent = self.model.new_bool_var(f"sent{tensor}.{a}.{b}")
                    begin = self.model.new_int_var(0, self.horizon, f"send{tensor}.{a}.{b}")
                    interval = self.model.new_optional_fixed_size_interval_var(
                        begin, length, sent, f"s{tensor}.{a}.{b}"
                    )
                    links.setdefault(int(self.cluster.link[a, b]), []).append(interval)
                    self.model.add(begin >= self.end[producer]).only_enforce_if(sent)
                    for reader in readers:
                        goes = [self.on[producer][a], self.on[reader][b]]
                        self.model.add_bool_or([goes[0].negated(), goes[1].negated(), sent])
                        self.model.add(self.start[reader] >= begin + length).only_enforce_if(goes)
        for intervals in links.values():
            self.model.add_no_overlap(intervals)
