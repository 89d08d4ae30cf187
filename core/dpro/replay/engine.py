"""Replays a graph with the native engine: when every op starts and ends, and why then.

Knows the arrays of a graph, not what its ops mean. Semantics: when the last predecessor of an op
ends at T (0 for sources) the op is *eligible* at T + gap. Without a resource it starts there. A
resource runs one op at a time; when free it picks, among the ops eligible by then, the smallest
(priority, eligible time, row). Events at one instant run in the order finish, eligible, dispatch
(by resource), so a resource sees everything that became eligible at that instant, except what a
zero-duration op dispatched after it sets free. ``oracle.py`` says the same in plain Python.

Source: dPRO (MLSys 2022) section 4.3, corrected to run the earliest op first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro import _native
from dpro.errors import DproError
from dpro.graph.graph import Arrays, Graph


class CycleError(DproError, ValueError):
    """Ops that can never run. ``op`` is one on a cycle (a graph op id), ``stuck`` how many there are."""

    def __init__(self, stuck: int, op: int, name: str = "") -> None:
        label = f"op {op} ({name!r})" if name else f"op {op}"
        super().__init__(f"{stuck} op{'s' * (stuck > 1)} can never run: {label} waits for itself")
        self.stuck = stuck
        self.op = op


@dataclass(frozen=True)
class Replay:
    """One replayed iteration; row i is the op ``arrays.ids[i]``. Times in ns from its begin."""

    start: npt.NDArray[np.int64]  # [rows]
    end: npt.NDArray[np.int64]  # [rows]
    #: [rows] row whose end fixed the start: the last-ending predecessor if the op started when
    #: eligible (smallest row of equals), else the op that held its resource; -1 for sources.
    cause: npt.NDArray[np.int32]
    makespan_ns: int
    #: Peak memory the engine allocated besides its input and these arrays (0: not measured).
    working_bytes: int = 0


def replay(graph: Graph) -> Replay:
    """Replay all living ops of ``graph``.

    Raises:
        CycleError: some ops wait for themselves.
        ValueError: a negative duration or gap.
    """
    try:
        return replay_arrays(graph.arrays())
    except CycleError as error:
        raise CycleError(error.stuck, error.op, graph.name_of(error.op)) from None


def bucket_spans(graph: Graph, played: Replay, arrays: Arrays) -> list[tuple[int, int]]:
    """(first start, last end) of every bucket's ops, ns, in the order of ``graph.buckets``."""
    row = {op: i for i, op in enumerate(arrays.ids.tolist())}
    of_buckets = [[row[op] for op in bucket.ops] for bucket in graph.buckets]
    return [(int(played.start[rows].min()), int(played.end[rows].max())) for rows in of_buckets]


def replay_arrays(arrays: Arrays) -> Replay:
    """Replay frozen arrays, without copying them and without holding the GIL; errors as :func:`replay`."""
    start, end, cause, makespan_ns, done, working_bytes = _native.replay(*native_arrays(arrays))
    if done < len(start):
        raise cycle_error(arrays, start < 0)
    return Replay(start, end, cause, makespan_ns, working_bytes)


def native_arrays(
    arrays: Arrays,
) -> tuple[
    npt.NDArray[np.int32],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int32],
    npt.NDArray[np.int64],
    npt.NDArray[np.int32],
    int,
]:
    """What the native core takes a graph as."""
    return (
        arrays.resource, arrays.duration, arrays.gap, arrays.priority, arrays.indptr, arrays.indices, arrays.resources,
    )  # fmt: skip


def cycle_error(arrays: Arrays, stuck: npt.NDArray[np.bool_]) -> CycleError:
    """The error for the rows that did not run; finds one that is on a cycle, not merely behind it."""
    source = np.repeat(np.arange(len(stuck)), np.diff(arrays.indptr))
    held = stuck[source] & stuck[arrays.indices]
    before = np.full(len(stuck), -1, dtype=np.int64)
    before[arrays.indices[held]] = source[held]
    row, seen = int(np.flatnonzero(stuck)[0]), set[int]()
    while row not in seen:  # every stuck op has a stuck predecessor
        seen.add(row)
        row = int(before[row])
    return CycleError(int(np.count_nonzero(stuck)), int(arrays.ids[row]))
