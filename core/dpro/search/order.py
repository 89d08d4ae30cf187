"""In which order ready ops run: HeteroG's part II (CoNEXT 2020, section 4.2).

Knows the arrays of a lowered graph, in which transfers and collectives are ops on resources of their own; not what made
it. ``rank(op) = its time + the largest rank of what waits for it``: the longest way to the end. Each resource runs the
ready op of the highest rank. List scheduling like that is within ``H`` times the optimum for H resources (with M
devices and a link for each pair at most ``M + M²``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dpro.graph.graph import NO_RESOURCE, Arrays
from dpro.graph.tasks import Ints
from dpro.replay.engine import Replay, replay_arrays


def upward_ranks(arrays: Arrays) -> Ints:
    """[rows] ns: the longest way from an op's start to the end, itself included.

    It is when the op would end in a replay of the graph turned round, were nothing ever waited for.
    """
    src = np.repeat(np.arange(len(arrays.ids), dtype=np.int32), np.diff(arrays.indptr))
    order = np.argsort(arrays.indices, kind="stable")
    indptr = np.zeros_like(arrays.indptr)
    np.cumsum(np.bincount(arrays.indices, minlength=len(arrays.ids)), out=indptr[1:])
    free = np.full_like(arrays.resource, NO_RESOURCE)
    turned = replace(arrays, indptr=indptr, indices=np.ascontiguousarray(src[order]), resource=free)
    return replay_arrays(turned).end


def earliest_starts(arrays: Arrays) -> Ints:
    """[rows] ns: when each could start, were nothing ever waited for: what the released code orders by, near enough."""
    return replay_arrays(replace(arrays, resource=np.full_like(arrays.resource, NO_RESOURCE))).start


def by_rank(rank: Ints) -> npt.NDArray[np.int32]:
    """Priorities: 0 for the highest rank, equal ones for equal ranks."""
    levels, place = np.unique(rank, return_inverse=True)
    return (len(levels) - 1 - place.ravel()).astype(np.int32)


def replay_ordered(arrays: Arrays) -> tuple[Replay, npt.NDArray[np.int32]]:
    """The replay by upward ranks, and the priorities [rows]."""
    priority = by_rank(upward_ranks(arrays))
    return replay_arrays(replace(arrays, priority=priority)), priority
