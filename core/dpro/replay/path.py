"""The critical path of a replayed graph: the chain of ops whose times add up to the iteration.

Knows why each op started when it did (``Replay.cause``: a dependency, or the op that held its
resource; dPRO, MLSys 2022, section 4.3 calls the union of both the execution graph), and follows
that back from the op that ended last. It does not judge: what to do about the path is for
``search``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.replay.engine import Replay

_COMMUNICATION = frozenset({OpKind.SEND, OpKind.RECV, OpKind.COLLECTIVE})
_WORK = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE})


@dataclass(frozen=True)
class Step:
    """One op on the path. It starts ``gap_ns`` after the step before it ends."""

    op: int
    name: str
    kind: OpKind
    rank: int
    start_ns: int
    end_ns: int
    #: Host gap or launch latency on the path: nothing of the path runs. 0 where it was hidden, i.e.
    #: the op queued for its resource.
    gap_ns: int
    #: Time the op queued, eligible, for its resource. It passed while earlier steps ran, so it is
    #: no part of the path's length.
    wait_ns: int


@dataclass(frozen=True)
class CriticalPath:
    """``steps`` in order of time, without holes: each begins where the one before it ended, plus its gap.

    ``breakdown`` maps each of these to ns on the path; they sum exactly to the makespan:

    * ``compute``: an op runs on a thread or a stream (bucket copies and launches too);
    * ``communication``: a transfer runs;
    * ``gap``: between ops: Python, launch latency;
    * ``wait``: an op that only lets time pass (kind LOCAL, IN or OUT without a resource: queueing,
      latency outside the job).
    """

    steps: list[Step]
    breakdown: dict[str, int]


def critical_path(graph: Graph, replay: Replay) -> CriticalPath:
    """Follow the causes back from the op that ended last (of equals: the smallest id).

    ``replay`` must be of ``graph`` as it is now.
    """
    breakdown = {"compute": 0, "communication": 0, "wait": 0, "gap": 0}
    steps: list[Step] = []
    arrays = graph.arrays()
    kinds, ranks = graph.column("kind"), graph.column("rank")
    eligible_ns = np.zeros(len(arrays.ids), dtype=np.int64)
    np.maximum.at(eligible_ns, arrays.indices, np.repeat(replay.end, np.diff(arrays.indptr)))
    eligible_ns += arrays.gap
    row = int(replay.end.argmax()) if len(replay.end) else -1
    while row >= 0:
        op, cause = int(arrays.ids[row]), int(replay.cause[row])
        start_ns, end_ns = int(replay.start[row]), int(replay.end[row])
        gap_ns = start_ns - (int(replay.end[cause]) if cause >= 0 else 0)
        wait_ns = start_ns - int(eligible_ns[row])
        kind = OpKind(kinds[op])
        steps.append(Step(op, graph.name_of(op), kind, int(ranks[op]), start_ns, end_ns, gap_ns, wait_ns))
        breakdown["gap"] += gap_ns
        breakdown[_part(kind, int(arrays.resource[row]))] += end_ns - start_ns
        row = cause
    steps.reverse()
    return CriticalPath(steps, breakdown)


def _part(kind: OpKind, resource: int) -> str:
    if kind in _COMMUNICATION:
        return "communication"
    return "compute" if kind in _WORK or resource != NO_RESOURCE else "wait"
