"""Unequal shares of a global batch: a slower rank computes fewer samples, a faster one more (HeteroG's proportional
data parallelism, CoNEXT 2020, section 3.1).

Knows each rank's ops of the forward and backward pass and what a pass was timed to take by samples
(``graph.info["shares"]``); not what shares are good. Gradients keep their size, so that synchronisation stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dpro.adapter import Knob
from dpro.graph.graph import Graph, OpKind
from dpro.graph.threads import COPY_BACK, COPY_IN
from dpro.trace.shares import SHARES, Share

Shares = tuple[int, ...]


class BatchShares:
    """A candidate is the samples of each rank, by rank."""

    name = "batch_shares"
    knobs = frozenset({Knob.BATCH_SHARES})

    def candidates(self, graph: Graph) -> Iterator[Shares]:
        """Shares by which all passes take as long, if they are others than now."""
        ranks = shares_of(graph)
        if ranks and (level := levelled(ranks)) != tuple(share.samples for share in ranks):
            yield level

    def legal(self, graph: Graph, candidate: Shares) -> bool:
        """Whether each rank was timed and has a sample, and the global batch stays what it is."""
        ranks = shares_of(graph)
        return len(ranks) == len(candidate) and min(candidate, default=0) >= 1 and sum(candidate) == ranks[0].total

    def apply(self, graph: Graph, candidate: Shares) -> int:
        """Stretch or shorten each rank's passes; returns the mark that undoes it."""
        mark = graph.mark()
        for rank, (share, samples) in enumerate(zip(shares_of(graph), candidate, strict=True)):
            if samples == share.samples:
                continue
            factor, ops = share.time_ns(samples) / share.time_ns(share.samples), _passes(graph, rank)
            for key in ("duration", "gap"):
                graph.set_many(ops, key, graph.column(key)[ops] * factor)
        return mark

    def cost(self, graph: Graph, candidate: Shares) -> float:
        """The longest pass, ns."""
        ranks = shares_of(graph)
        return max(share.time_ns(samples) for share, samples in zip(ranks, candidate, strict=True))

    def settings(self, candidate: Shares) -> dict[str, list[int]]:
        """Fields of a plan."""
        return {"batch_shares": list(candidate)}


def shares_of(graph: Graph) -> list[Share]:
    """By rank; empty unless every rank was timed, all with one global batch, and the ranks' parts are all of it."""
    known: dict[int, Share | None] = graph.info.get(SHARES, {})
    found = [share for rank in range(graph.ranks) if (share := known.get(rank)) is not None]
    if len(found) < graph.ranks or len({share.total for share in found}) != 1:
        return []
    return found if sum(share.samples for share in found) == found[0].total else []


def levelled(ranks: list[Share]) -> Shares:
    """Whole samples by which the longest pass is shortest: one after another goes to who is done with it first."""
    shares = [1] * len(ranks)
    left = ranks[0].total - len(ranks)
    steep = sum(1 / max(share.ns_per_sample, 1e-9) for share in ranks)
    # nearly all at once by the time at which all would be done, rounded down; the rest one by one
    fixed = sum(share.fixed_ns / max(share.ns_per_sample, 1e-9) for share in ranks)
    until_ns = (ranks[0].total + fixed) / steep
    for rank, share in enumerate(ranks):
        more = min(left, max(0, int((until_ns - share.fixed_ns) / max(share.ns_per_sample, 1e-9)) - 1))
        shares[rank] += more
        left -= more
    for _ in range(left):
        best = min(range(len(ranks)), key=lambda r: (ranks[r].time_ns(shares[r] + 1), shares[r], r))
        shares[best] += 1
    return tuple(shares)


def _passes(graph: Graph, rank: int) -> npt.NDArray[np.int64]:
    """The rank's ops of the forward and backward pass, but for the copies of gradients."""
    copies = [graph.name(name) for name in (COPY_IN, COPY_BACK)]
    kinds = np.isin(graph.column("kind"), (OpKind.FORWARD, OpKind.BACKWARD))
    mine = graph.column("alive") & kinds & (graph.column("rank") == rank)
    return np.flatnonzero(mine & ~np.isin(graph.column("name"), copies))
