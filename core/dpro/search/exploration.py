"""FastT's outer loop: run a plan, learn from it what tasks and transfers take, plan again, keep what is faster.

Knows a job only as something that runs a plan and says what it measured (:class:`Job`). What was never measured counts
as 0, so that planning is drawn to where it may be better and the next profile says whether it is. A plan is put in
force only if its estimate is shorter than the best step measured, and taken back if its step is not. Source: FastT
(Middleware 2020, section 4); averages of old and new by half, and three quiet rounds to the end, as its code has them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dpro.cost.transfer import fit_line
from dpro.graph.cluster import Cluster, Line
from dpro.graph.tasks import Ints, Tasks
from dpro.search.list_schedule import Problem, dpos
from dpro.search.ranks import rank_order

UNKNOWN = -1
_QUIET_ROUNDS = 3


@dataclass(frozen=True)
class Profile:
    """One step as it was measured: ``step_ns``, ``task_ns`` [n], ``sent``: (source, destination, bytes, ns) each."""

    step_ns: int
    task_ns: Ints
    sent: Sequence[tuple[int, int, int, int]] = ()


class Job(Protocol):
    def run(self, device: Ints, priority: Ints) -> Profile:
        """A step with each task on its device, the smaller priority first."""


class Costs:
    """What is known: ``times_ns`` [n, devices], :data:`UNKNOWN` where never measured, and a line for each pair."""

    def __init__(self, tasks: Tasks, cluster: Cluster) -> None:
        self.tasks, self.cluster = tasks, cluster
        self.times_ns = np.full((len(tasks), len(cluster)), UNKNOWN, np.int64)
        self.lines: dict[tuple[int, int], Line] = {}

    def learn(self, device: Ints, profile: Profile) -> float:
        """Takes a profile in; by how much what was known of its tasks was wrong, as a share (1: nothing was known)."""
        at = np.arange(len(self.tasks)), device
        old, new = self.times_ns[at], profile.task_ns
        known = old != UNKNOWN
        self.times_ns[at] = np.where(known, (old + new) // 2, new)
        samples: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for source, destination, nbytes, ns in profile.sent:
            samples.setdefault((source, destination), []).append((nbytes, ns))
        for pair, some in samples.items():
            line, before = fit_line(some), self.lines.get(pair)
            if before is not None:
                line = Line((line.latency_ns + before.latency_ns) / 2, (line.ns_per_byte + before.ns_per_byte) / 2)
            self.lines[pair] = line
        off = np.abs(new - old)[known].sum() + new[~known].sum()
        return float(off / max(1, new.sum()))

    def problem(self) -> Problem:
        """To place the tasks by what is known, the rest at 0."""
        cluster = copy.copy(self.cluster)
        cluster.latency_ns, cluster.ns_per_byte = (np.zeros((len(cluster), len(cluster))) for _ in range(2))
        for (source, destination), line in self.lines.items():
            cluster.latency_ns[source, destination] = line.latency_ns
            cluster.ns_per_byte[source, destination] = line.ns_per_byte
        return Problem(self.tasks, cluster, np.maximum(self.times_ns, 0))


@dataclass(frozen=True)
class Round:
    """One step that was run. ``kept``: it was the fastest so far; else the plan was taken back."""

    step_ns: int
    kept: bool


@dataclass
class Explorer:
    """See the module text.

    Args:
        device: [n] where tasks run at first.
        tolerance: share by which times may differ from what is known without a new plan.
    """

    tasks: Tasks
    cluster: Cluster
    device: Ints
    tolerance: float = 0.05
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.costs = Costs(self.tasks, self.cluster)
        self.priority = rank_order(self.tasks, self.cluster, self.device)
        self.best: tuple[int, Ints, Ints] | None = None
        self.quiet = 0
        self._tried: set[bytes] = set()

    def explore(self, job: Job, most_rounds: int = 50) -> int:
        """Steps until plans and times stay as they are; the best step, ns."""
        for _ in range(most_rounds):
            if self.quiet >= _QUIET_ROUNDS:
                break
            self.step(job)
        assert self.best is not None
        return self.best[0]

    def step(self, job: Job) -> None:
        """Runs what is in force, keeps it or takes it back, and plans again if times were not as known."""
        profile = job.run(self.device, self.priority)
        wrong = self.costs.learn(self.device, profile)
        self._tried.add(self.device.tobytes())
        running = self.best is not None and np.array_equal(self.device, self.best[1])
        kept = self.best is None or profile.step_ns < self.best[0]
        self.rounds.append(Round(profile.step_ns, kept))
        if kept or running:  # what runs has the time that it has now, be that longer
            self.best = profile.step_ns, self.device, self.priority
        assert self.best is not None
        _, self.device, self.priority = self.best
        if running and wrong > self.tolerance:  # the machine has changed: what was slower need not be any more
            self._tried = {self.device.tobytes()}
        planned = self._planned() if not running or wrong > self.tolerance else False
        self.quiet = 0 if planned else self.quiet + 1

    def _planned(self) -> bool:
        """Whether a new plan is in force."""
        assert self.best is not None
        schedule = dpos(self.costs.problem(), contention=True)
        if schedule.makespan_ns >= self.best[0] or schedule.device.tobytes() in self._tried:
            return False
        self.device, self.priority = schedule.device, schedule.priority()
        return True
