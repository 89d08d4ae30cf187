"""HEFT, CPOP and DPOS: a device and a start for each task, one after the other, where it ends first.

Knows tasks and a cluster; its times are estimates, and what a placement is worth is for the replayer to say
(:mod:`dpro.replay.placed`). Sources: HEFT and CPOP (Topcuoglu et al., TPDS 2002); DPOS (FastT, Middleware 2020,
Algorithm 1). Each also *contention-aware*, which neither paper has: a transfer reserves a slot on its link, as it will
need one. Times are then exact: a replay in which devices and links keep the schedule's order ends when it says.

Departures from the papers: tasks of one ``together`` number go where the first of them goes; a tensor is sent once to
each device; equal finish times go away from the critical path's device (the literal rule, the lowest device, breaks the
bound that the paper proves: ``literal_ties``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpro import _native
from dpro.errors import DproError
from dpro.graph.cluster import Cluster
from dpro.graph.graph import OpKind
from dpro.graph.tasks import Ints, Tasks
from dpro.search.ranks import (
    How,
    Order,
    Weights,
    by_rank,
    critical_tasks,
    downward_rank,
    placed_weights,
    positions,
    topological,
    transfers_ns,
    upward_rank,
    weights,
)

FREE = -1


@dataclass(frozen=True)
class Schedule:
    """``device``, ``start_ns``, ``end_ns`` [n]; ``sent`` [transfers, 4]: tensor, device it goes to, start, end.

    ``fits``: no task was put where there was no room for it.
    """

    device: Ints
    start_ns: Ints
    end_ns: Ints
    sent: Ints
    fits: bool
    makespan_ns: int
    #: [n] tasks as they were scheduled
    listed: Ints

    def priority(self) -> Ints:
        """[n] FastT's order ``A``: by start, of equals as they were scheduled."""
        return positions(self.listed[np.argsort(self.start_ns[self.listed], kind="stable")])


class Problem:
    """Tasks that are to be placed on a cluster, and what follows from the two.

    Args:
        times_ns: [n, devices], where not what ``cluster`` says.

    Raises:
        DproError: tasks wait for themselves, or one is a collective.
    """

    def __init__(self, tasks: Tasks, cluster: Cluster, times_ns: Ints | None = None) -> None:
        if (tasks.kind == OpKind.COLLECTIVE).any():
            raise DproError("collectives run on all devices: list scheduling cannot place them")
        self.tasks, self.cluster = tasks, cluster
        self.times_ns = cluster.times_ns(tasks.types, tasks.time_ns) if times_ns is None else times_ns
        self.order: Order = topological(tasks)
        self.need_bytes = resident_bytes(tasks)
        groups, number = np.unique(tasks.together[tasks.together >= 0], return_inverse=True)
        self.groups = len(groups)
        self.together = np.full(len(tasks), -1, np.int32)
        self.together[tasks.together >= 0] = number
        self.group_bytes = np.zeros(self.groups, np.int64)
        np.add.at(self.group_bytes, number, self.need_bytes[tasks.together >= 0])
        tensors = len(tasks.tensor_of)
        pairs = np.unique(tasks.use_task * tensors + tasks.use_tensor)
        self._read_begin = np.searchsorted(pairs, tensors * np.arange(len(tasks) + 1)).astype(np.int64)
        self._read = (pairs % max(1, tensors)).astype(np.int32)
        self._producer = tasks.tensor_of.astype(np.int32)
        taken, line = transfers_ns(tasks, cluster)
        self._taken, self._line = np.ascontiguousarray(taken), line.astype(np.int32)

    @cached_property
    def max_weights(self) -> Weights:
        return weights(self.tasks, self.cluster, "max", self.times_ns)

    def weights(self, how: How) -> Weights:
        return self.max_weights if how == "max" else weights(self.tasks, self.cluster, how, self.times_ns)

    @cached_property
    def rank(self) -> Ints:
        """[n] upward, by FastT's weights."""
        return upward_rank(self.order, self.max_weights)

    def placed_rank(self, device: Ints) -> Ints:
        """[n] upward, of tasks that are placed."""
        return upward_rank(self.order, placed_weights(self.tasks, self.cluster, device, self.times_ns))

    def pinned(self, devices: dict[int, int] | None = None) -> npt.NDArray[np.int32]:
        """[n] where each task must go: ``devices`` (task -> device), with all that is together with it."""
        pins = np.full(len(self.tasks), FREE, np.int32)
        for task, device in (devices or {}).items():
            group = self.together[task]
            pins[self.together == group if group >= 0 else task] = device
        return pins

    def schedule(
        self,
        listed: Ints,
        *,
        pinned: npt.NDArray[np.int32] | None = None,
        avoid: Sequence[int] = (),
        insertion: bool = True,
        contention: bool = False,
        room: float = 1.0,
    ) -> Schedule:
        """Each task of ``listed`` [n] where it ends first.

        Args:
            pinned: [n] a device or :data:`FREE`.
            avoid: devices that come last where several are equal; else the lowest comes first.
            insertion: slots between tasks are used.
            contention: transfers wait for their links.
            room: share of the memory that is used.
        """
        n = len(self.cluster)
        preference = np.arange(n, dtype=np.int32)
        preference[list(avoid)] += n
        device, start, end, sent, fits = _native.schedule(
            listed.astype(np.int32), self.times_ns, self.need_bytes, self.together,
            self.pinned() if pinned is None else pinned, self._read_begin, self._read, self._producer, self._taken,
            self._line, self.cluster.link, (self.cluster.memory_bytes() * room).astype(np.int64), preference,
            len(self.cluster.links), self.groups, insertion, contention,
        )  # fmt: skip
        makespan_ns = int(end.max(initial=0))
        return Schedule(device.astype(np.int64), start, end, sent, fits, makespan_ns, listed)


def resident_bytes(tasks: Tasks) -> Ints:
    """[n] what a task takes of its device for good: what it keeps, and what a backward pass will read of it.

    An estimate from above for what is freed early, from below for what is only passed on; the replay has the peak.
    """
    need: Ints = tasks.kept_bytes.copy()
    saved = np.zeros(len(tasks.tensor_of), bool)
    saved[tasks.use_tensor[tasks.kind[tasks.use_task] == OpKind.BACKWARD]] = True
    saved &= tasks.kind[tasks.tensor_of] == OpKind.FORWARD
    np.add.at(need, tasks.tensor_of[saved], tasks.tensor_bytes[saved])
    return need


def heft(problem: Problem, *, contention: bool = False, room: float = 1.0) -> Schedule:
    """By upward rank, each where it ends first. Weights are means."""
    rank = upward_rank(problem.order, problem.weights("mean"))
    return problem.schedule(by_rank(problem.order, rank), contention=contention, room=room)


def cpop(problem: Problem, *, contention: bool = False, room: float = 1.0) -> Schedule:
    """What is ready by upward plus downward rank; the critical path on the one device that is through with it first."""
    used = problem.weights("mean")
    rank = upward_rank(problem.order, used) + downward_rank(problem.order, used)
    value, longest = rank.tolist(), int(rank.max(initial=0))
    path = _longest_way(problem.order, value, longest)
    device = int(np.argmin(problem.times_ns[path].sum(axis=0)))
    waits = np.bincount(problem.tasks.use_task, minlength=len(value)).tolist()
    ready = [(-value[task], task) for task, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    listed = []
    while ready:
        _, task = heapq.heappop(ready)
        listed.append(task)
        for user in problem.order.readers(task):
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, (-value[user], user))
    return problem.schedule(
        np.array(listed, dtype=np.int64),
        pinned=problem.pinned(dict.fromkeys(path, device)), contention=contention, room=room,
    )  # fmt: skip


def _longest_way(order: Order, value: list[int], longest: int) -> list[int]:
    """From a task on to readers, all of them of the longest way through the step."""
    path: list[int] = []
    ways = order.tasks.tolist()
    while (step := next((task for task in ways if value[task] == longest), None)) is not None:
        path.append(step)
        ways = order.readers(step)
    return path


def dpos(
    problem: Problem, *, contention: bool = False, literal_ties: bool = False, room: float = 1.0,
    pin_path: bool = True,
) -> Schedule:  # fmt: skip
    """FastT's Algorithm 1: by upward rank, the critical path on d_CP, all else where it ends first.

    Args:
        pin_path: False: the critical path is placed like all else, which is HEFT with FastT's weights.
        literal_ties: equal finish times go to the lowest device, as the listing has it.
    """
    path = _with_variables(problem, critical_tasks(problem.order, problem.rank)) if pin_path else []
    pins = path_devices(problem, path, room)
    avoid = () if literal_ties else sorted(set(pins.values()))
    return problem.schedule(
        by_rank(problem.order, problem.rank),
        pinned=problem.pinned(pins), avoid=avoid, contention=contention, room=room,
    )  # fmt: skip


def _with_variables(problem: Problem, path: list[int]) -> list[int]:
    """``path`` and, before each of its tasks, the variables that it reads: they are on the way to it, at no time."""
    source, reader, _ = problem.tasks.edges()
    on_path = np.zeros(len(problem.tasks), bool)
    on_path[path] = True
    still = problem.times_ns.max(axis=1) == 0
    still[problem.tasks.use_task] = False
    used = on_path[reader] & still[source] & ~on_path[source]
    variables: dict[int, list[int]] = {}
    for variable, task in zip(source[used].tolist(), reader[used].tolist(), strict=True):
        variables.setdefault(task, []).append(variable)
    return list(dict.fromkeys(one for task in path for one in (*variables.get(task, ()), task)))


def path_devices(problem: Problem, path: Sequence[int], room: float = 1.0) -> dict[int, int]:
    """Task -> d_CP: the device on which those that it has room for take the least on average; when it is full, the
    next one for the rest. What no device has room for is not pinned.
    """
    free = problem.cluster.memory_bytes() * room
    free[free == 0] = np.inf
    pins: dict[int, int] = {}
    left = list(path)
    while left:
        taken = [_taken(problem, left, free[d]) for d in range(len(problem.cluster))]
        means = [problem.times_ns[left[:count], d].mean() if count else np.inf for d, (count, _) in enumerate(taken)]
        best = int(np.argmin(means))
        count, nbytes = taken[best]
        if not count:
            break
        pins |= dict.fromkeys(left[:count], best)
        free[best] -= nbytes
        left = left[count:]
    return pins


def _taken(problem: Problem, path: Sequence[int], free: float) -> tuple[int, int]:
    """How many of ``path`` from its begin on there is room for in ``free`` bytes, and what they take."""
    used, seen = 0, set[int]()
    for i, task in enumerate(path):
        group = int(problem.together[task])
        if group < 0:
            need = int(problem.need_bytes[task])
        else:
            need = 0 if group in seen else int(problem.group_bytes[group])
        if used + need > free:
            return i, used
        seen.add(group)
        used += need
    return len(path), used
