"""Contention-aware placement made better step by step: rank what is placed, schedule again, move what helps.

Not in FastT. Ranks before a placement count every transfer as if it took place (the most that it may take); a placement
says which do, so its ranks are better, and so is what follows from them. A pass ends where that no longer helps; then
single tasks, and variables with all that is free to follow them, are tried on other devices. Every step is
accepted by replay only, so nothing that is returned is slower than what it began with. No chance is involved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints
from dpro.replay.placed import Judged, judge
from dpro.search.list_schedule import FREE, Problem, Schedule
from dpro.search.ranks import by_rank

#: Tasks scheduled in all, and schedules at most: fewer in larger graphs, so that a search ends in seconds.
_WORK = 300_000
_MOST = 1_000
_ROUNDS = 6
#: A schedule is replayed if its own estimate is not longer than the best replay by more than this.
_PROMISING = 1.02


@dataclass(frozen=True)
class Found:
    """A placement, its order and its replay."""

    device: Ints
    priority: Ints
    judged: Judged


class Descent:
    """One search over ``problem``.

    Args:
        evaluations: schedules that may be made; None: by the size of the graph.
    """

    def __init__(self, problem: Problem, evaluations: int | None = None) -> None:
        self.problem = problem
        self.left = evaluations_for(problem) if evaluations is None else evaluations
        self.best: Found | None = None

    def start(self, device: Ints, priority: Ints | None = None) -> None:
        """Begins from a placement [n]: in its order, if it has one, then by its ranks, then free to be placed again."""
        if priority is not None:
            self._judge(device, priority)
        self._try(device, device)
        for _ in range(_ROUNDS):
            again = self._try(device, np.full(len(device), FREE))
            if again is None or np.array_equal(again.device, device):
                break
            device = again.device

    def moves(self) -> None:
        """Tries every move until none helps, or no schedule is left."""
        helped = True
        while helped and self.left > 0 and self.best is not None:
            helped = False
            for unit in self._units(self.best):
                if self.left <= 0:
                    break
                helped |= self._move(unit)

    def _units(self, found: Found) -> Iterator[Ints]:
        """Tasks that go together, and single ones; those with the least slack first: they decide."""
        ends = found.judged.played.end[: len(found.device)]
        together = self.problem.together
        seen: set[int] = set()
        rank = self.problem.placed_rank(found.device)
        begins = ends - self.problem.times_ns[np.arange(len(ends)), found.device]
        slack = found.judged.makespan_ns - rank - begins
        for task in np.lexsort((np.arange(len(ends)), slack)).tolist():
            group = int(together[task])
            if group < 0:
                yield np.array([task])
            elif group not in seen:
                seen.add(group)
                yield np.flatnonzero(together == group)

    def _move(self, unit: Ints) -> bool:
        helped = False
        for target in range(len(self.problem.cluster)):
            best = self.best
            if best is None or best.device[unit[0]] == target:
                continue
            moved = best.device.copy()
            moved[unit] = target
            self._try(moved, moved)
            if self.problem.together[unit[0]] >= 0:  # what reads a variable may follow it
                self._try(moved, np.where(self.problem.together >= 0, moved, FREE))
            helped |= self.best is not best
        return helped

    def _try(self, ranked: Ints, pinned: Ints) -> Schedule | None:
        """Schedules by the ranks of a placement, with some of it kept; None: no schedule was left."""
        if self.left <= 0:
            return None
        self.left -= 1
        listed = by_rank(self.problem.order, self.problem.placed_rank(ranked))
        schedule = self.problem.schedule(listed, pinned=pinned.astype(np.int32), contention=True)
        if self.best is None or schedule.makespan_ns <= _PROMISING * self.best.judged.makespan_ns:
            self._judge(schedule.device, schedule.priority())
        return schedule

    def _judge(self, device: Ints, priority: Ints) -> None:
        judged = judge(self.problem.tasks, device, self.problem.cluster, priority)
        cluster = self.problem.cluster
        if self.best is None or worth(judged, cluster) < worth(self.best.judged, cluster):
            self.best = Found(device, priority, judged)


def worth(judged: Judged, cluster: Cluster) -> tuple[float, int]:
    """Smaller is better: first the share by which the fullest device is beyond its memory, then ns."""
    limit = cluster.memory_bytes()
    used = (judged.peak_bytes / np.where(limit == 0, np.inf, limit)).max()
    return max(0.0, float(used) - 1.0), judged.makespan_ns


def evaluations_for(problem: Problem) -> int:
    """How many schedules are made for a graph of that size."""
    return min(_MOST, _WORK // max(1, len(problem.tasks)))
