"""How often Horovod's thread goes round (HOROVOD_CYCLE_TIME): what rounds cost the host, and how long gradients wait.

Conventions it relies on: ``graph.info["cycle_ns"]`` is the time of a cycle as captured, ``graph.info["idle_share"]``
the share of a core that rounds with nothing to do took from the host thread then, ``graph.info["negotiated"]`` says
that there are such rounds at all. A round costs the same however often there is one, so in idle time that share
falls as cycles grow. While a response is under way there are no rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dpro.adapter import Knob
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.replay.engine import bucket_spans, replay

_MS = 1_000_000
#: ns; Horovod's own autotune looks between 1 and 100 ms.
CYCLES_NS = tuple(ms * _MS for ms in (2, 3, 5, 8, 12, 20, 30, 50))


class CycleTime:
    """Let the thread go round every so many ns. A candidate is that time; the channel's delay is :func:`delayed`'s."""

    name = "cycle_time"
    knobs = frozenset({Knob.CYCLE_TIME})

    def candidates(self, graph: Graph) -> Iterator[int]:
        """Longer cycles than the captured one."""
        return (ns for ns in CYCLES_NS if self.legal(graph, ns) and ns > graph.info["cycle_ns"])

    def legal(self, graph: Graph, candidate: int) -> bool:
        """Whether the job has cycles, and the time is one."""
        return bool(graph.info.get("negotiated")) and graph.info.get("cycle_ns", 0) > 0 and candidate > 0

    def apply(self, graph: Graph, candidate: int) -> int:
        """Give the host what fewer rounds leave it; returns the mark that undoes it."""
        mark = graph.mark()
        before = float(graph.info.get("idle_share", 0.0))
        after = min(0.99, before * graph.info["cycle_ns"] / candidate)
        if not before:
            return mark
        played, arrays = replay(graph), graph.arrays()
        rows = np.flatnonzero(np.isin(arrays.resource, list(graph.info["main_resource"].values())))
        start, gap = played.start[rows], arrays.gap[rows]
        idle = _Idle(bucket_spans(graph, played, arrays))
        for key, values, since, until in (
            ("duration", arrays.duration[rows], start, played.end[rows]),
            ("gap", gap, start - gap, start),
        ):
            freed = idle.between(since, until) * (1 - (1 - before) / (1 - after))
            graph.set_many(arrays.ids[rows], key, np.round(values - np.minimum(freed, values)))
        return mark

    def cost(self, graph: Graph, candidate: int) -> float:
        """What rounds take of a second and what a gradient waits for one, ns each."""
        rounds_ns = graph.info.get("idle_share", 0.0) * graph.info["cycle_ns"] / candidate * 1e9
        return float(rounds_ns + candidate / 2)


def delayed(model: SyncModel, graph: Graph, cycle_ns: int) -> SyncModel:
    """``model`` under another cycle: a gradient that finds the channel idle waits half of one, on average."""
    later = (cycle_ns - graph.info["cycle_ns"]) / 2
    return replace(model, delay_ns=max(0.0, model.delay_ns + later))


class _Idle:
    """Time in which no bucket is under way.

    Args:
        spans: start and end of every bucket, ns.
    """

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        edges, busy, total, reached = [0.0], [0.0], 0.0, 0
        for begin, over in sorted(spans):
            begin = max(begin, reached)
            if over > begin:
                edges += [begin, over]
                busy += [total, total + over - begin]
                total, reached = total + over - begin, over
        self._edges, self._busy = np.array(edges, dtype=np.float64), np.array(busy, dtype=np.float64)

    def between(self, since: npt.NDArray[np.int64], until: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """ns of idle time in each stretch."""
        busy = np.interp(until, self._edges, self._busy) - np.interp(since, self._edges, self._busy)
        return np.asarray((until - since) - busy, dtype=np.float64)
