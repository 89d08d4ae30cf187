"""How urgent tasks are: the longest way from each to the end of the step, and from its begin to each.

Knows tasks, what they may take and what their tensors may; not where they run. Source: HEFT and CPOP (Topcuoglu et al.,
TPDS 2002), with FastT's weights (Middleware 2020, section 5.1): the most that a task takes on any device and a tensor
between any two, where HEFT takes the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dpro import _native
from dpro.errors import DproError
from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints, Tasks

#: Of several devices and pairs the slowest (FastT) or their mean (HEFT).
How = Literal["max", "mean"]


@dataclass(frozen=True)
class Weights:
    """``task_ns`` [n], ``use_ns`` [e]: what a task and a use of a tensor count for on a path."""

    task_ns: Ints
    use_ns: Ints


def weights(tasks: Tasks, cluster: Cluster, how: How = "max", times_ns: Ints | None = None) -> Weights:
    """What tasks and tensors take where nothing is placed yet.

    Args:
        times_ns: [n, devices], where not what ``cluster`` says.
    """
    times = cluster.times_ns(tasks.types, tasks.time_ns) if times_ns is None else times_ns
    lines, line = transfers_ns(tasks, cluster)
    if how == "max":
        return Weights(times.max(axis=1), lines.max(axis=0)[tasks.use_tensor])
    n = len(cluster)
    pairs = np.bincount(line[~np.eye(n, dtype=bool)], minlength=len(lines)) / max(1, n * (n - 1))
    return Weights(
        np.rint(times.mean(axis=1)).astype(np.int64), np.rint(pairs @ lines).astype(np.int64)[tasks.use_tensor]
    )


def placed_weights(tasks: Tasks, cluster: Cluster, device: Ints, times_ns: Ints | None = None) -> Weights:
    """What tasks take on their ``device`` [n], and tensors between the devices; 0 on one."""
    times = cluster.times_ns(tasks.types, tasks.time_ns) if times_ns is None else times_ns
    lines, line = transfers_ns(tasks, cluster)
    source, reader = device[tasks.tensor_of[tasks.use_tensor]], device[tasks.use_task]
    sent = np.where(source == reader, 0, lines[line[source, reader], tasks.use_tensor])
    return Weights(times[np.arange(len(tasks)), device], sent)


def transfers_ns(tasks: Tasks, cluster: Cluster) -> tuple[Ints, Ints]:
    """[lines, tensors] ns on each kind of line that there is, and [devices, devices] which kind a pair has.

    On the diagonal it is kind 0, which means nothing. One device: one kind, on which nothing takes time.
    """
    n = len(cluster)
    line = np.zeros((n, n), np.int64)
    away = ~np.eye(n, dtype=bool)
    if n == 1:
        return np.zeros((1, len(tasks.tensor_of)), np.int64), line
    kinds, number = np.unique(
        np.stack([cluster.latency_ns[away], cluster.ns_per_byte[away]], axis=1), axis=0, return_inverse=True
    )
    line[away] = number.reshape(-1)
    taken = np.rint(kinds[:, :1] + kinds[:, 1:] * tasks.tensor_bytes[None, :]).astype(np.int64)
    return taken, line


@dataclass(frozen=True)
class Order:
    """``tasks`` [n], each after what it reads from; ``reader[begin[i]:begin[i + 1]]`` read what i makes, by the uses
    ``use`` of the same places.
    """

    tasks: npt.NDArray[np.int32]
    begin: Ints
    reader: npt.NDArray[np.int32]
    use: Ints

    def readers(self, task: int) -> list[int]:
        out: list[int] = self.reader[self.begin[task] : self.begin[task + 1]].tolist()
        return out


def topological(tasks: Tasks) -> Order:
    """First in, first out; of tasks that are free together the one with the smaller number.

    Raises:
        DproError: some tasks wait for themselves.
    """
    source = tasks.tensor_of[tasks.use_tensor]
    use = np.argsort(source, kind="stable")
    reader = tasks.use_task[use].astype(np.int32)
    begin = np.searchsorted(source[use], np.arange(len(tasks) + 1)).astype(np.int64)
    order, count = _native.topological(begin, reader)
    if count < len(tasks):
        stuck = np.setdiff1d(np.arange(len(tasks)), order[:count])
        raise DproError(f"{len(stuck)} tasks wait for themselves, {tasks.names[stuck[0]]!r} among them")
    return Order(order, begin, reader, use)


def upward_rank(order: Order, along: Weights) -> Ints:
    """[n] ns from the begin of each task to the end of the step along the longest way, transfers counted."""
    return _native.upward_rank(order.begin, order.reader, order.tasks, along.task_ns, along.use_ns[order.use])


def downward_rank(order: Order, along: Weights) -> Ints:
    """[n] ns from the begin of the step to the begin of each task along the longest way, transfers counted."""
    return _native.downward_rank(order.begin, order.reader, order.tasks, along.task_ns, along.use_ns[order.use])


def critical_tasks(order: Order, rank: Ints) -> list[int]:
    """From the task of the largest upward rank always on to the reader of the largest: FastT's critical path.

    Of equals the one with the smaller number, which is also listed first: the path leads, replicas that are as long
    follow.
    """
    path: list[int] = []
    ways = np.setdiff1d(order.tasks, order.reader).tolist()
    value = rank.tolist()
    while ways:
        path.append(max(ways, key=lambda task: (value[task], -task)))
        ways = order.readers(path[-1])
    return path


def by_rank(order: Order, rank: Ints) -> Ints:
    """Tasks by decreasing upward rank, each after what it reads from: those of equal rank stay as they were."""
    tasks = order.tasks.astype(np.int64)
    return tasks[np.argsort(-rank[tasks], kind="stable")]


def positions(tasks: Sequence[int] | Ints) -> Ints:
    """[n] the place of each task in ``tasks``, as a priority: smaller goes first."""
    place = np.empty(len(tasks), np.int64)
    place[np.asarray(tasks, dtype=np.int64)] = np.arange(len(tasks))
    return place


def rank_order(tasks: Tasks, cluster: Cluster, device: Ints | None = None) -> Ints:
    """[n] a priority for each task by its upward rank, as it is placed (``device``) or may be."""
    order = topological(tasks)
    used = weights(tasks, cluster) if device is None else placed_weights(tasks, cluster, device)
    return positions(by_rank(order, upward_rank(order, used)))
