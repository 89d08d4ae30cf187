"""The replay engine's plain-Python twin: one heap of events, nothing clever.

It is what the semantics of ``engine.py`` mean; tests hold the native engine to it. Slow on purpose.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from dpro.graph.graph import NO_RESOURCE, Arrays
from dpro.replay.engine import Replay, cycle_error

FINISH, ELIGIBLE, DISPATCH = range(3)


def replay_arrays(arrays: Arrays) -> Replay:
    """Same contract as :func:`dpro.replay.engine.replay_arrays`."""
    rows = len(arrays.ids)
    resource, duration, gap = arrays.resource.tolist(), arrays.duration.tolist(), arrays.gap.tolist()
    priority, indptr, indices = arrays.priority.tolist(), arrays.indptr.tolist(), arrays.indices.tolist()
    if min(duration + gap, default=0) < 0:
        raise ValueError("negative duration or gap")

    pending = [0] * rows
    for after in indices:
        pending[after] += 1
    start, end, cause = [-1] * rows, [-1] * rows, [-1] * rows
    eligible = [0] * rows
    last_pred = [-1] * rows  # the predecessor that ended last, smallest row of equals
    events: list[tuple[int, int, int]] = []  # (time, phase, row; DISPATCH: resource)
    queue: list[list[tuple[int, int, int]]] = [[] for _ in range(arrays.resources)]
    running = [-1] * arrays.resources
    ran_last = [-1] * arrays.resources

    def ready(row: int, time: int) -> None:
        eligible[row] = time + gap[row]
        heappush(events, (eligible[row], ELIGIBLE, row))

    def begin(row: int, time: int) -> None:
        start[row], end[row] = time, time + duration[row]
        heappush(events, (end[row], FINISH, row))

    for row in range(rows):
        if pending[row] == 0:
            ready(row, 0)

    while events:
        time, phase, row = heappop(events)
        if phase == FINISH:
            for after in indices[indptr[row] : indptr[row + 1]]:
                best = last_pred[after]
                if best < 0 or (end[best], -best) < (time, -row):
                    last_pred[after] = row
                pending[after] -= 1
                if pending[after] == 0:
                    ready(after, time)
            if resource[row] != NO_RESOURCE:
                running[resource[row]] = -1
                heappush(events, (time, DISPATCH, resource[row]))
        elif phase == ELIGIBLE:
            if resource[row] == NO_RESOURCE:
                cause[row] = last_pred[row]
                begin(row, time)
            else:
                heappush(queue[resource[row]], (priority[row], time, row))
                heappush(events, (time, DISPATCH, resource[row]))
        else:
            chosen = row  # the resource that may pick now
            if running[chosen] < 0 and queue[chosen]:
                _, since, row = heappop(queue[chosen])
                cause[row] = last_pred[row] if since == time else ran_last[chosen]
                running[chosen] = ran_last[chosen] = row
                begin(row, time)

    if -1 in start:
        raise cycle_error(arrays, np.asarray(start) < 0)
    return Replay(
        np.asarray(start, dtype=np.int64),
        np.asarray(end, dtype=np.int64),
        np.asarray(cause, dtype=np.int32),
        max(end, default=0),
    )
