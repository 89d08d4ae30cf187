"""How long it takes to synchronise a gradient bucket of a given size, learnt from captured collectives.

Knows sizes and durations only: not which library moved the bytes, nor when. The form is the usual
latency-bandwidth one, ``t(s) = a + b·s`` (dPRO section 4.2 takes the same for a tensor that is not cut).
It refuses to look more certain than the data: :attr:`SyncModel.trust` says how far to believe it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro.graph.graph import Graph
from dpro.graph.topology import Network
from dpro.replay.engine import bucket_spans, replay
from dpro.replay.scale import collective_ns

#: One size cannot tell latency from bandwidth: this share of its time is then taken for latency.
ASSUMED_LATENCY_SHARE = 0.05
#: More distinct sizes than this are thinned out (by quantile) before lines are tried through pairs of them.
_MAX_PIVOTS = 64
#: Lines whose misfit is within this of the best are as good; the one with the most latency is taken, because
#: buckets that are a little too large cost less than a latency believed to be nothing.
_AS_GOOD = 0.1


@dataclass(frozen=True)
class SyncModel:
    """``time_ns(s) = latency_ns + ns_per_byte · s`` for one collective of s bytes on an idle channel.

    ``steal_ns_per_byte``: CPU time that each rank's host thread loses for every byte a collective moves,
    because the library's own threads share its core (gloo). 0 where transfers cost the host nothing.
    ``delay_ns``: from the last member's readiness to the start on an idle channel, where ranks negotiate what goes
    next (Horovod's cycle); while the channel is busy that is over before its turn comes.
    """

    latency_ns: float
    ns_per_byte: float
    steal_ns_per_byte: float = 0.0
    delay_ns: float = 0.0
    #: Median of |observed - predicted| / predicted over the observations.
    spread: float = 0.0
    observations: int = 0
    distinct_sizes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"SyncModel.{field.name} must be finite and not negative, got {value!r}")

    def time_ns(self, nbytes: float) -> int:
        """Duration of one collective of ``nbytes`` bytes, ns."""
        return round(self.latency_ns + self.ns_per_byte * nbytes)

    @property
    def trust(self) -> str:
        """``assumed`` (one size: the split of its time is a guess), ``weak`` (two sizes: nothing checks the
        line; or half the observations are over 20 % off), ``good``.
        """
        if self.distinct_sizes < 2:
            return "assumed"
        return "weak" if self.distinct_sizes == 2 or self.spread > 0.2 else "good"


def fit(
    nbytes: Sequence[float] | npt.NDArray[Any],
    duration_ns: Sequence[float] | npt.NDArray[Any],
    *,
    steal_ns_per_byte: float = 0.0,
    delay_ns: float = 0.0,
) -> SyncModel:
    """Fit a line to transfers: constrained least absolute deviation, *relative* to time plus mean time.

    ``nbytes[i]`` bytes took ``duration_ns[i]``: the transfer alone, arrival wait excluded. Relative, because
    noise grows with size and the latency is pinned by the small ones; plus the mean, because a step's many
    smallest, over in no time or held up by anything, are no evidence against its large ones; absolute, because
    a transfer that met a stall says nothing about the others. A least-absolute line under a, b >= 0 passes
    through two points, or through one with a = 0 or b = 0: all such lines through the medians of the distinct
    sizes are tried, and judged on every observation.

    Raises:
        ValueError: lengths differ, or no observation has a positive size and duration.
    """
    size, time = np.asarray(nbytes, np.float64), np.asarray(duration_ns, np.float64)
    if size.shape != time.shape:
        raise ValueError(f"{len(size)} sizes but {len(time)} durations")
    good = np.isfinite(size) & np.isfinite(time) & (size > 0) & (time > 0)
    size, time = size[good], time[good]
    if not len(size):
        raise ValueError("no collective with a positive size and duration: the cost of synchronisation is unknown")

    distinct = np.unique(size)
    if len(distinct) == 1:
        median = float(np.median(time))
        a, b = ASSUMED_LATENCY_SHARE * median, (1 - ASSUMED_LATENCY_SHARE) * median / float(distinct[0])
    else:
        a, b = _line(size, time, distinct)
    predicted = a + b * size
    return SyncModel(
        latency_ns=a,
        ns_per_byte=b,
        steal_ns_per_byte=steal_ns_per_byte,
        delay_ns=delay_ns,
        spread=float(np.median(np.abs(time - predicted) / predicted)),
        observations=len(size),
        distinct_sizes=len(distinct),
    )


def fit_buckets(
    graphs: Iterable[Graph],
    *,
    contention: Sequence[Mapping[str, float]] = (),
    steps: int = 1,
) -> SyncModel:
    """Fit to the buckets of captured graphs (one per step, or one average; all of one job).

    ``contention``: every rank's ``RankTrace.meta.contention``, sums over the ``steps`` captured steps; from
    it comes :attr:`SyncModel.steal_ns_per_byte` (:func:`steal`).

    Where several buckets are in flight, who of them got how much of the channel is noise (two gloo threads
    share one link), but the time they took together is not: buckets that ran back to back are taken
    together, n of them with s bytes in t ns being ``t = n·a + s·b``, a point (s/n, t/n) of the line; or
    ``t = a + s·b`` where several may be in flight (``graph.info["in_flight"]``) and hide one another's latency.

    Raises:
        ValueError: no bucket with a positive size and duration.
    """
    sizes: list[float] = []
    times: list[float] = []
    delays: list[int] = []
    step_bytes = busy_ns = given = 0
    known = True
    for graph in graphs:
        given += 1
        delays += _delays(graph)
        if graph.info.get("negotiated"):  # its thread goes round all the time: what that took must be told apart
            known &= all("idle_share" in c for c in contention)
        overlap = graph.info.get("in_flight", 1) > 1
        for nbytes, ns in _busy_periods(graph):
            latencies = 1 if overlap else len(nbytes)
            sizes.append(sum(nbytes) / latencies)
            times.append(ns / latencies)
            busy_ns += ns
        step_bytes = sum(bucket.nbytes for bucket in graph.buckets)
    moving = [_moving(c, busy_ns * steps / max(1, given)) for c in contention] if known else []
    return fit(
        sizes,
        times,
        steal_ns_per_byte=steal(moving, steps * step_bytes),
        delay_ns=float(np.median(delays)) if delays else 0.0,
    )


def fit_network(network: Network, nbytes: Sequence[int], captured: SyncModel) -> SyncModel:
    """What a bucket costs on ``network``, for a search there: a line through what ``nbytes`` take, and all together.

    What transfers cost the host and what passes before them stays as ``captured``. With parameter servers buckets
    overlap, and a line for one says too much of all.

    Raises:
        ValueError: no positive size.
    """
    sizes = sorted({size for size in (*nbytes, sum(nbytes), min(nbytes, default=0) // 2) if size > 0})
    line = fit(sizes, [collective_ns(network, size) for size in sizes])
    return replace(line, steal_ns_per_byte=captured.steal_ns_per_byte, delay_ns=captured.delay_ns)


def _delays(graph: Graph) -> list[int]:
    """ns from readiness to start of every negotiated bucket that found the channel idle."""
    if not graph.info.get("negotiated"):
        return []
    played, arrays = replay(graph), graph.arrays()
    row = {op: i for i, op in enumerate(arrays.ids.tolist())}
    ready_at: dict[int, int] = {}
    for (_, tensor), op in graph.out_op.items():
        ready_at[tensor] = max(ready_at.get(tensor, 0), int(played.end[row[op]]))
    spans = bucket_spans(graph, played, arrays)
    ready_ns = [max(ready_at[t] for t in bucket.tensors) for bucket in graph.buckets]
    found, idle_since = [], 0
    for (start, end), ready in sorted(zip(spans, ready_ns, strict=True)):
        if ready > idle_since:
            found.append(start - ready)
        idle_since = max(idle_since, end)
    return found


def _busy_periods(graph: Graph) -> list[tuple[list[int], int]]:
    """(bytes of each bucket, ns) of every stretch in which the channel was never idle."""
    played, arrays = replay(graph), graph.arrays()
    spans = bucket_spans(graph, played, arrays)
    sizes_of = [bucket.nbytes for bucket in graph.buckets]
    periods: list[tuple[list[int], int]] = []
    idle_since = -1
    for (start, end), nbytes in sorted(zip(spans, sizes_of, strict=True)):
        if periods and start <= idle_since:
            sizes, ns = periods[-1]
            periods[-1] = ([*sizes, nbytes], ns + max(0, end - idle_since))
        else:
            periods.append(([nbytes], end - start))
        idle_since = max(idle_since, end)
    return periods


def steal(contention: Sequence[Mapping[str, float]], nbytes: int) -> float:
    """Host time that a rank loses per byte moved, ns, when ``nbytes`` bytes were moved during capture.

    The main thread can't have lost more than it waited, runnable, for a core (``main_delay_ns``), nor more
    to the library's threads than those ran (``others_cpu_ns``): the smaller of the two, the median over
    ranks. With one core for all threads (``cores``) it is what those ran: where the captured buckets came after
    compute, nobody waited for a core, but buckets that come earlier take theirs from it. 0 where nothing is
    known, or where there are cores enough.
    """
    lost = [
        c.get("others_cpu_ns", 0.0)
        if c.get("cores") == 1
        else min(c.get("main_delay_ns", 0.0), c.get("others_cpu_ns", 0.0))
        for c in contention
    ]
    return max(0.0, float(np.median(lost)) / nbytes) if lost and nbytes > 0 else 0.0


def _moving(contention: Mapping[str, float], busy_ns: float) -> dict[str, float]:
    """``contention`` less what the library's threads ran while no bucket was under way (``busy_ns`` of the capture)."""
    idle_ns = max(0.0, contention.get("wall_ns", 0.0) - busy_ns)
    others_ns = contention.get("others_cpu_ns", 0.0) - contention.get("idle_share", 0.0) * idle_ns
    delay_ns = contention.get("main_delay_ns", 0.0) - idle_share([contention]) * idle_ns
    return {**contention, "others_cpu_ns": max(0.0, others_ns), "main_delay_ns": max(0.0, delay_ns)}


def idle_share(contention: Sequence[Mapping[str, float]]) -> float:
    """Share of its time that the host thread loses to a library that keeps going round with nothing to do.

    That is what the library's threads ran (``idle_share``), where they have the thread's core as well; where there
    are more cores, no more than it waited for one. The median over ranks; 0 where one of them does not say.
    """
    if not all("idle_share" in c for c in contention):
        return 0.0
    lost = [
        c["idle_share"]
        if c.get("cores") == 1
        else min(c["idle_share"], c.get("main_delay_ns", 0.0) / max(1.0, c.get("wall_ns", 0.0)))
        for c in contention
    ]
    return float(np.median(lost)) if lost else 0.0


def _line(
    size: npt.NDArray[np.float64], time: npt.NDArray[np.float64], distinct: npt.NDArray[np.float64]
) -> tuple[float, float]:
    if len(distinct) > _MAX_PIVOTS:
        distinct = distinct[np.linspace(0, len(distinct) - 1, _MAX_PIVOTS).round().astype(int)]
    x = distinct
    y = np.array([np.median(time[size == s]) for s in distinct])
    i, j = np.triu_indices(len(x), 1)
    slope = (y[j] - y[i]) / (x[j] - x[i])
    a = np.concatenate([y[i] - slope * x[i], np.zeros(len(x)), y])
    b = np.concatenate([slope, y / x, np.zeros(len(x))])
    allowed = (a >= 0) & (b >= 0)
    a, b = a[allowed], b[allowed]
    typical = time + time.mean()
    miss = np.array([np.sum(np.abs(time - ai - bi * size) / typical) for ai, bi in zip(a, b, strict=True)])
    close = miss <= miss.min() * (1 + _AS_GOOD) + 1e-9
    best = int(np.argmax(np.where(close, a, -1.0)))
    return float(a[best]), float(b[best])
