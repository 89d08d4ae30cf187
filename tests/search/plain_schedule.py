"""List scheduling in plain Python, slot by slot: what the native one is held against."""

from __future__ import annotations

import numpy as np

from dpro.search.list_schedule import Problem

Busy = list[tuple[int, int]]


def slot(busy: Busy, ready: int, length: int) -> int:
    """The first time from ``ready`` on at which nothing of ``busy`` is in the way."""
    for time in sorted({ready, *(end for _, end in busy if end > ready)}):
        if all(end <= time or begin >= time + length for begin, end in busy):
            return time
    raise AssertionError("after all that is busy there is room")


def plain_schedule(
    problem: Problem, listed: list[int], pinned: list[int], *, insertion: bool = True, contention: bool = False
) -> tuple[list[int], list[int]]:
    """(device, start) of each task; no limit of memory, and of equals the lowest device."""
    tasks, cluster, times = problem.tasks, problem.cluster, problem.times_ns
    n, devices = len(tasks), len(cluster)
    reads = [sorted(set(tasks.use_tensor[tasks.use_task == i].tolist())) for i in range(n)]
    device, start, end = [-1] * n, [0] * n, [0] * n
    lanes: list[Busy] = [[] for _ in range(devices)]
    links: dict[int, Busy] = {}
    arrived: dict[tuple[int, int], int] = {}
    home: dict[int, int] = {}

    def where(task: int) -> int:
        return home.get(int(problem.together[task]), pinned[task])

    def put(task: int, d: int) -> None:
        if problem.together[task] >= 0:
            home[int(problem.together[task])] = d
        device[task] = d

    def floats(task: int) -> bool:
        return device[task] < 0 and not reads[task] and not times[task].any() and where(task) < 0

    def earliest(task: int, d: int) -> tuple[int, list[tuple[int, int, int, int]]]:
        ready, moved = 0, []
        order = sorted(reads[task], key=lambda t: (end[tasks.tensor_of[t]], t))
        for t in order:
            source = int(tasks.tensor_of[t])
            at = device[source] if device[source] >= 0 else where(source)
            if at in (d, -1):
                ready = max(ready, end[source])
            elif (t, d) in arrived:
                ready = max(ready, arrived[t, d])
            else:
                taken = cluster.transfer_ns(int(tasks.tensor_bytes[t]), at, d)
                link = int(cluster.link[at, d])
                busy = [*links.get(link, []), *((b, e) for other, b, e, _ in moved if other == link)]
                begin = slot(busy, end[source], taken) if contention else end[source]
                moved.append((link, begin, begin + taken, t))
                ready = max(ready, begin + taken)
        length = int(times[task, d])
        if length:
            last = max((e for _, e in lanes[d]), default=0)
            ready = slot(lanes[d], ready, length) if insertion else max(ready, last)
        return ready, moved

    for task in listed:
        if floats(task):
            continue
        fixed = where(task)
        ways = [fixed] if fixed >= 0 else range(devices)
        d = min(ways, key=lambda d: (earliest(task, d)[0] + times[task, d], d))
        for t in reads[task]:
            source = int(tasks.tensor_of[t])
            if device[source] < 0:
                put(source, where(source) if where(source) >= 0 else d)
        start[task], moved = earliest(task, d)
        put(task, d)
        end[task] = start[task] + int(times[task, d])
        if times[task, d]:
            lanes[d].append((start[task], end[task]))
        for link, begin, finish, t in moved:
            if finish > begin:
                links.setdefault(link, []).append((begin, finish))
            arrived[t, d] = finish
    for task in np.flatnonzero(np.array(device) < 0).tolist():
        put(task, max(0, where(task)))
    return device, start
