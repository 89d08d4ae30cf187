"""What others would predict for the same trace: kept beside dpro's figure, to see what it adds.

Daydream (Zhu et al., ATC 2020), in the form dPRO (MLSys 2022, section 6) compares with: the local
graph of one worker, in which each synchronisation is one op of size / bandwidth. No latency per
message, no waiting for peers, no other worker at all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro.graph.graph import Graph, OpKind
from dpro.replay.engine import replay

_S = 10**9


def daydream(graph: Graph, bandwidth_bytes_per_s: float | None = None) -> int:
    """Iteration time Daydream would predict, ns. The graph is as before afterwards.

    The worker is the lowest rank. ``bandwidth_bytes_per_s`` defaults to all bytes of the graph's
    collectives over all their time. A collective of unknown size keeps its measured time.

    Raises:
        ValueError: the bandwidth is not a positive number.
    """
    alive = graph.column("alive")
    collectives = np.flatnonzero(alive & (graph.column("kind") == OpKind.COLLECTIVE) & (graph.column("nbytes") >= 0))
    bandwidth = bandwidth_bytes_per_s
    if bandwidth is None:
        bandwidth = measured_bandwidth(graph, collectives)
    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise ValueError(f"bandwidth {bandwidth} bytes/s must be a positive number")
    mark = graph.mark()
    try:
        if bandwidth is not None:
            graph.set_many(collectives, "duration", graph.column("nbytes")[collectives] * float(_S) / bandwidth)
        ranks = graph.column("rank")
        workers = np.unique(ranks[alive & (ranks >= 0)])
        if len(workers) > 1:
            graph.remove_ops(np.flatnonzero(alive & (ranks > workers[0])).tolist())
        return replay(graph).makespan_ns
    finally:
        graph.undo(mark)


def measured_bandwidth(graph: Graph, collectives: npt.NDArray[np.int64]) -> float | None:
    """Bytes per second over the given ops together; None if they have no bytes or take no time."""
    nbytes = int(graph.column("nbytes")[collectives].sum())
    spent_ns = int(graph.column("duration")[collectives].sum())
    return nbytes * _S / spent_ns if nbytes and spent_ns else None
