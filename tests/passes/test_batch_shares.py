"""Unequal shares of a batch in a graph and their search, by hand; whole samples by trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.graph import Graph, OpKind
from dpro.graph.threads import COPY_IN
from dpro.passes.batch_shares import BatchShares, levelled
from dpro.replay.engine import replay
from dpro.search.batch_shares import best_shares
from dpro.trace.shares import SHARES, Share, load_share, told

MS = 1_000_000


def ranks_graph(shares: list[Share], sync_ms: float = 10.0) -> Graph:
    """Each rank: a forward and a backward op, a copy of 1 ms, then one transfer that waits for all, and an update."""
    graph = Graph()
    graph.ranks = len(shares)
    graph.info[SHARES] = dict(enumerate(shares))
    ends, hosts = [], []
    for rank, share in enumerate(shares):
        host = graph.resource(f"rank{rank}/cpu/main")
        whole = share.time_ns(share.samples)
        first = graph.add_op("f", OpKind.FORWARD, resource=host, duration=round(whole / 4), rank=rank)
        second = graph.add_op(
            "b",
            OpKind.BACKWARD,
            resource=host,
            duration=round(whole / 2),
            gap=round(whole / 4),
            rank=rank,
            after=[first],
        )
        ends.append(graph.add_op(COPY_IN, OpKind.BACKWARD, resource=host, duration=MS, rank=rank, after=[second]))
        hosts.append(host)
    transfer = graph.add_op("all_reduce", OpKind.COLLECTIVE, duration=round(sync_ms * MS), after=ends)
    for rank, host in enumerate(hosts):
        graph.add_op("update", OpKind.UPDATE, resource=host, duration=2 * MS, rank=rank, after=[transfer])
    return graph


def share(samples: int, total: int, fixed_ms: float, sample_ms: float) -> Share:
    return Share(samples, total, fixed_ms * MS, sample_ms * MS)


def test_by_hand() -> None:
    """8 ms for 4 samples, 16 ms on the slow rank: 13 ms around it. With 5 : 3 they take 10 and 12."""
    graph = ranks_graph([share(4, 8, 0, 2), share(4, 8, 0, 4)])
    edit = BatchShares()
    assert replay(graph).makespan_ns == 29 * MS
    before = graph.column("duration").tolist(), graph.column("gap").tolist()
    mark = edit.apply(graph, (5, 3))
    assert replay(graph).makespan_ns == 25 * MS
    graph.undo(mark)
    assert (graph.column("duration").tolist(), graph.column("gap").tolist()) == before
    assert [*edit.candidates(graph)] == [(5, 3)] and edit.cost(graph, (5, 3)) == 12 * MS
    assert edit.settings((5, 3)) == {"batch_shares": [5, 3]}
    shares, gain = best_shares(graph) or ((), 0.0)
    assert shares == (5, 3) and gain == pytest.approx(25 / 29)


def test_what_is_refused() -> None:
    graph = ranks_graph([share(4, 8, 0, 2), share(4, 8, 0, 4)])
    assert not any(BatchShares().legal(graph, wrong) for wrong in ((8, 0), (4, 3), (8,), (3, 3, 2), ()))
    alike = ranks_graph([share(4, 8, 1, 2), share(4, 8, 1, 2)])
    assert not [*BatchShares().candidates(alike)] and best_shares(alike) is None
    for broken in (
        {0: share(4, 8, 0, 2)},
        {0: share(4, 8, 0, 2), 1: None},
        {0: share(4, 8, 0, 2), 1: share(5, 10, 0, 1)},
    ):
        graph.info[SHARES] = broken
        assert not [*BatchShares().candidates(graph)] and best_shares(graph) is None


def test_a_gain_too_small_to_differ_for() -> None:
    """1 ms of 1,013."""
    assert best_shares(ranks_graph([share(4, 8, 0, 2), share(4, 8, 0, 2.5)], sync_ms=1000)) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=2, max_size=3),
    st.integers(3, 14),
)
def test_levelled_is_the_shortest_longest_pass(lines: list[tuple[int, int]], total: int) -> None:
    ranks = [share(1, total, fixed, slope) for fixed, slope in lines]
    ways = [w for w in itertools.product(range(1, total), repeat=len(ranks)) if sum(w) == total]

    def longest(shares: tuple[int, ...]) -> float:
        return max(rank.time_ns(n) for rank, n in zip(ranks, shares, strict=True))

    found = levelled(ranks)
    assert sum(found) == total and min(found) >= 1
    assert longest(found) == min(map(longest, ways))


def test_timed_parts_become_a_line() -> None:
    """3 ms and half a millisecond a sample: passes over 8, 4 and 2."""
    raw = told(8, 24, {1: 7 * MS, 2: 5 * MS, 4: 4 * MS})
    assert load_share(raw) == share(8, 24, 3, 0.5)
    assert told(8, 24, {1: MS}) is None and told(8, 8, {1: 2 * MS, 2: MS}) is None
    # a pass over less that takes longer: nothing is gained by fewer samples
    assert load_share(told(8, 16, {1: 4 * MS, 2: 5 * MS})) == share(8, 16, 4, 0)


@pytest.mark.parametrize(
    "raw",
    [None, 3, {}, {"samples": 0, "total": 8, "fixed_ns": 1, "ns_per_sample": 1}, {"samples": "4"},
     {"samples": 4, "total": 8, "fixed_ns": float("nan"), "ns_per_sample": 1},
     {"samples": 4, "total": 8, "fixed_ns": 0, "ns_per_sample": 0}],
)  # fmt: skip
def test_refuses_stored_shares_that_cannot_be(raw: object) -> None:
    assert load_share(raw) is None
