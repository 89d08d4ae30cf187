"""OS-DPOS: cut ops of the critical path into parts while that makes the estimated step shorter (FastT, Algorithm 2).

Knows estimates only; the replay has the last word elsewhere. Departures from the paper: the numbers of parts tried are
powers of two (a batch divides by them) and the number of devices, not all of 2 to |D|; and no more than ``tries`` cuts
are looked at, fewer in larger graphs, so that a search ends in seconds whatever it is given (the paper: more than an
hour for a Transformer on 8 devices).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Tasks
from dpro.passes.split import Split, dimensions, split
from dpro.search.list_schedule import Problem, Schedule
from dpro.search.ranks import critical_tasks

#: Tasks scheduled in all, over all tries.
_WORK = 100_000
_MOST_TRIES, _LEAST_TRIES = 100, 8

Scheduler = Callable[[Problem], Schedule]


@dataclass(frozen=True)
class Cut:
    """``splits`` in the order in which they were made, the graph after them, and its schedule."""

    problem: Problem
    schedule: Schedule
    splits: tuple[Split, ...]
    tries: int


def os_dpos(problem: Problem, scheduler: Scheduler, tries: int | None = None) -> Cut:
    """``problem`` with ops of its critical path cut, as ``scheduler`` (DPOS) places it.

    The path is that of the schedule of the whole ops, those that take longest first; the first that does not pay ends
    it. Times of tasks must follow from the cluster.
    """
    left = tries = tries if tries is not None else tries_for(problem.tasks)
    best, schedule = problem, scheduler(problem)
    device = schedule.device
    path = critical_tasks(problem.order, problem.placed_rank(device))
    path.sort(key=lambda task: (-int(problem.times_ns[task, device[task]]), task))
    splits: list[Split] = []
    for task in path:
        found: tuple[Problem, Schedule, Split] | None = None
        for dimension in dimensions(problem.tasks, task):
            for parts in parts_for(problem.cluster):
                if left == 0:
                    break
                left -= 1
                cut = Problem(split(best.tasks, task, dimension, parts), problem.cluster)
                placed = scheduler(cut)
                if placed.fits >= schedule.fits and placed.makespan_ns < (found[1] if found else schedule).makespan_ns:
                    found = cut, placed, Split(problem.tasks.names[task], dimension, parts)
        if found is None and dimensions(problem.tasks, task):
            break
        if found is not None:
            best, schedule = found[:2]
            splits.append(found[2])
    return Cut(best, schedule, tuple(splits), tries - left)


def tries_for(tasks: Tasks) -> int:
    """How many cuts are looked at in a graph of that size."""
    return max(_LEAST_TRIES, min(_MOST_TRIES, _WORK // max(1, len(tasks))))


def parts_for(cluster: Cluster) -> list[int]:
    """Powers of two up to the number of devices, and that number."""
    n = len(cluster)
    return sorted({n, *(1 << k for k in range(1, n.bit_length()))} - {1}) if n > 1 else []
