"""What if: a faster network, faster ops, more workers. Edits a graph through its journal.

Every function only changes durations, so ``graph.undo(mark)`` takes all of it back, and says what
it assumed in one line. Knows no file and no command line. A collective's duration is its transfer
(arrival wait is never part of it, see ``graph``), so scaling it scales what the network does and
nothing else; what the replay then shows as wait follows by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.errors import DproError
from dpro.graph.graph import Graph, OpKind
from dpro.graph.wire import ring_steps

_NETWORK = (OpKind.COLLECTIVE, OpKind.SEND, OpKind.RECV)

#: Bytes a rank sends, as a multiple of its payload, with n workers in a ring. Source: Patarasuk
#: and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
_RING: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}

#: Factors beyond these are slips of the keyboard; nothing is a million times as fast or slow.
MAX_FACTOR = 1e6
MAX_WORKERS = 1 << 24
#: All durations and gaps together; the engine counts in 62 bits.
MAX_TOTAL_NS = 1 << 61

_UNITS_GBIT = {"gbit": 1.0, "gbps": 1.0, "mbit": 1e-3, "mbps": 1e-3}  # GB or Gb? not guessed


@dataclass(frozen=True)
class Change:
    """What one what-if did: how many ops it touched and, in a line, what it assumed."""

    ops: int
    assumption: str


class WhatIfError(DproError):
    """A question that cannot be asked of this graph; the text says why."""


def scale_ops(graph: Graph, pattern: str, factor: float) -> Change:
    """Multiply the duration of every op whose name matches (``re.search``) by ``factor`` >= 0.

    Raises:
        WhatIfError: the pattern is not a regular expression, or matches no op.
    """
    try:
        regex = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise WhatIfError(f"{pattern!r} is not a regular expression ({error})") from error
    if not 0 <= factor <= MAX_FACTOR:
        raise WhatIfError(
            f"factor {factor} for {pattern!r} must be a finite number, 0 or more and {MAX_FACTOR:,.0f} at most"
        )
    hit = np.fromiter((regex.search(name) is not None for name in graph.name_table), "?", len(graph.name_table))
    ops = _living(graph, hit[graph.column("name")] if len(hit) else np.zeros(0, "?"))
    if not len(ops):
        raise WhatIfError(f"no op's name matches {pattern!r}")
    stretch(graph, ops, graph.column("duration")[ops] * factor)
    return Change(len(ops), f"{len(ops)} ops matching {pattern!r} take {factor:g}× their time")


def transfers(graph: Graph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(bytes, ns) of the collectives whose size is known: what a cost model can be fitted to."""
    ops = _living(graph, (graph.column("kind") == OpKind.COLLECTIVE) & (graph.column("nbytes") > 0))
    return graph.column("nbytes")[ops], graph.column("duration")[ops]


def scale_bandwidth(graph: Graph, bandwidth: str, *, ns_per_byte: float = 0.0, latency_ns: float = 0.0) -> Change:
    """Run every collective and message at another bandwidth.

    ``bandwidth`` is a factor ("2x", "0.5") or absolute ("10gbit", "800mbit"), which is taken
    relative to ``ns_per_byte``, the time one more byte of an all-reduce took (0: unknown).
    ``latency_ns`` of each transfer, and never more than all of it, stays as it is.

    Raises:
        WhatIfError: not such a text, nothing on the network, or absolute and ``ns_per_byte`` unknown.
    """
    ops = _living(graph, np.isin(graph.column("kind"), _NETWORK))
    if not len(ops):
        raise WhatIfError("no collective or message in this trace: there is no bandwidth to change")
    # What the link carries is more than the payload: each rank of a ring sends it 2 (n-1)/n times.
    measured_gbit = 8 / ns_per_byte * _RING["allreduce"](max(workers_of(graph), 2)) if ns_per_byte > 0 else None
    factor = parse_bandwidth(bandwidth, measured_gbit)
    if not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
        raise WhatIfError(
            f"bandwidth {bandwidth!r}: {factor:.3g}× the one measured; "
            f"{1 / MAX_FACTOR:g}× to {MAX_FACTOR:g}× can be asked"
        )
    before = graph.column("duration")[ops]
    fixed = np.minimum(before, latency_ns)
    stretch(graph, ops, fixed + (before - fixed) / factor)
    said = f"{len(ops)} transfers at {factor:.4g}× the bandwidth measured"
    if measured_gbit:
        said += f" (about {measured_gbit:.3g} Gbit/s)"
    return Change(len(ops), said + (f"; {latency_ns / 1e3:.0f} µs of latency stay in each" if latency_ns else ""))


def parse_bandwidth(text: str, measured_gbit: float | None = None) -> float:
    """Factor meant by ``text``: "2x" -> 2.0; "10gbit" -> 10 / ``measured_gbit``.

    Raises:
        WhatIfError: not a positive number with a known unit, or absolute without a fit.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z×]*)(?:/s)?\s*", text.lower())
    if found is None or not (0 < float(found[1]) < float("inf")):
        raise WhatIfError(f"bandwidth {text!r}: give a factor such as 2x, or a speed such as 10gbit")
    value, unit = float(found[1]), found[2]
    if unit in ("", "x", "×"):
        return value
    if unit not in _UNITS_GBIT:
        raise WhatIfError(f"bandwidth {text!r}: unknown unit; known are x, {', '.join(_UNITS_GBIT)}")
    if not measured_gbit:
        raise WhatIfError(f"bandwidth {text!r}: this trace has no sizes to fit its own from; give a factor such as 2x")
    return value * _UNITS_GBIT[unit] / measured_gbit


def set_workers(graph: Graph, workers: int, *, latency_ns: float = 0.0) -> Change:
    """Transfers as they would be among ``workers`` ranks, each doing the same work as now.

    Scales each collective by the bytes a ring sends per rank: an all-reduce of s bytes among n
    sends 2 s (n-1)/n. ``latency_ns`` of each now, and never more than all of it, is that of its ring
    steps and grows with their number, 2 (n-1): what :func:`dpro.graph.comm.expand_rings` replays step
    by step. The ranks stay as measured, so new ranks are no slower than those seen.

    Raises:
        WhatIfError: fewer than 2 workers now or then, no collective, or one with no such model.
    """
    if not 2 <= workers <= MAX_WORKERS:
        raise WhatIfError(
            f"{workers} workers: a collective needs 2 or more, and {MAX_WORKERS:,} are the most that can be asked"
        )
    now = workers_of(graph)
    if now < 2:
        raise WhatIfError("the trace is of 1 worker: it holds no transfer to scale to more")
    ops = _living(graph, graph.column("kind") == OpKind.COLLECTIVE)
    if not len(ops):
        raise WhatIfError("no collective in this trace: only collectives have a model for more workers")
    before = graph.column("duration")[ops]
    fixed = np.minimum(before, latency_ns)
    factors, slower = np.empty(len(ops)), np.ones(len(ops))
    for index, op in enumerate(ops.tolist()):
        model = ring_model(graph.name_of(op))
        if model is None:
            raise WhatIfError(f"no model says how {graph.name_of(op)!r} grows with the number of workers")
        factors[index] = _RING[model](workers) / _RING[model](now)
        if steps := ring_steps(model, now):
            slower[index] = ring_steps(model, workers) / steps
    stretch(graph, ops, fixed * slower + (before - fixed) * factors)
    return Change(
        len(ops),
        f"{now} → {workers} workers: ring collectives, so an all-reduce's transfer grows as 2(N-1)/N; "
        + (f"the {latency_ns / 1e3:.0f} µs of latency now as their steps do, 2(N-1); " if latency_ns else "")
        + "same work and same bandwidth per worker, none slower than those measured",
    )


def ring_model(name: str) -> str | None:
    """Which ring formula a collective's name asks for ("ncclDevKernel_AllReduce_Sum…" -> "allreduce")."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((model for model in _RING if model in plain), None)


def total_ns(graph: Graph) -> float:
    """All durations and gaps together: what a step could last at most."""
    alive = graph.column("alive")
    return float(sum(graph.column(key)[alive].sum(dtype=np.float64) for key in ("duration", "gap")))


def stretch(graph: Graph, ops: npt.NDArray[np.int64], durations: npt.NDArray[np.float64]) -> None:
    """Set durations, unless the step could then last longer than the engine can count."""
    before = float(graph.column("duration")[ops].sum(dtype=np.float64))
    if not total_ns(graph) - before + float(durations.sum()) < MAX_TOTAL_NS:
        raise WhatIfError("a step would last for years: ask for less")
    graph.set_many(ops, "duration", durations)


def workers_of(graph: Graph) -> int:
    """World size where the builder knew it (a trace may hold a few ranks of many), else the ranks seen."""
    return int(graph.info.get("world_size", graph.ranks))


def _living(graph: Graph, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(graph.column("alive") & mask)
