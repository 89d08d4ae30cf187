"""Which rank computes how much of a batch, where ranks are not equally fast; the replay decides.

Knows the pass and the replay. It begins where all passes take as long and moves samples from the rank that gradients
wait for to the others, half as many each time, while the replayed step gets shorter. Leaves the graph as it found it.
"""

from __future__ import annotations

from dpro.graph.graph import Graph
from dpro.passes.batch_shares import BatchShares, Shares, levelled, shares_of
from dpro.replay.engine import replay

#: Shares must shorten the step by this to be worth having ranks differ.
WORTH = 0.03
#: With more ranks samples are moved between the two that differ most only.
_PAIRS = 64


def best_shares(graph: Graph) -> tuple[Shares, float] | None:
    """Samples of each rank and the replayed step over the captured one's; None where that gains less than 3 %."""
    ranks = shares_of(graph)
    if not ranks:
        return None
    edit, known = BatchShares(), dict[Shares, int]()

    def step_ns(shares: Shares) -> int:
        if shares not in known:
            mark = edit.apply(graph, shares)
            try:
                known[shares] = replay(graph).makespan_ns
            finally:
                graph.undo(mark)
        return known[shares]

    captured = tuple(share.samples for share in ranks)
    best = min((levelled(ranks), captured), key=step_ns)
    move = max(1, ranks[0].total // (4 * len(ranks)))
    while move:
        ways = _moves(best, [share.time_ns(n) for share, n in zip(ranks, best, strict=True)], move)
        better = min(ways, key=lambda way: (step_ns(way), way), default=best)
        if step_ns(better) < step_ns(best):
            best = better
        else:
            move //= 2
    gain = step_ns(best) / step_ns(captured)
    return (best, gain) if gain <= 1 - WORTH else None


def _moves(shares: Shares, times_ns: list[float], move: int) -> list[Shares]:
    """``move`` samples from one rank to another."""
    count = len(shares)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b and shares[a] > move]
    pairs.sort(key=lambda pair: times_ns[pair[1]] - times_ns[pair[0]])
    out = []
    for a, b in pairs[:_PAIRS]:
        moved = list(shares)
        moved[a] -= move
        moved[b] += move
        out.append(tuple(moved))
    return out
