"""Link rates from messages, on a capture written by hand."""

from __future__ import annotations

import pytest

from dpro.cost.links import fit_all_reduce, fit_links
from dpro.graph.assemble import assemble
from dpro.graph.graph import Graph
from tests.graph.ring_traces import US, AllReduce, job


def capture(slow: float = 1.0) -> Graph:
    """Two ranks, all-reduces of 2,000 and 6,000 bytes: a message is 10 µs + 20 ns a byte; 0 to 1 ``slow`` times."""
    reduces = []
    at = 100.0
    for half in (1_000, 3_000):
        messages = []
        for step in range(2):
            begin = at + 20 + step * slow * 100
            for sender in (0, 1):
                ns = (10 + half * 0.02) * (slow if sender == 0 else 1)
                messages.append((sender, 1 - sender, begin, begin + ns, half))
        left = max(received for *_, received, _ in messages)
        reduces.append(AllReduce(2 * half, [at, at], [left, left], messages))
        at = left + 50
    return assemble(job(reduces, used=[at, at], end=at + 100))


def test_each_direction_has_its_own_rate() -> None:
    links = fit_links(capture(slow=2))
    assert links.keys() == {(0, 1), (1, 0)}
    assert links[1, 0].latency_ns == pytest.approx(10 * US, rel=0.01)
    assert links[1, 0].ns_per_byte == pytest.approx(20, rel=0.01)
    assert links[0, 1].latency_ns == pytest.approx(20 * US, rel=0.01)
    assert links[0, 1].ns_per_byte == pytest.approx(40, rel=0.01)


def test_an_all_reduce_goes_at_the_pace_of_the_slowest_link() -> None:
    model = fit_all_reduce(capture(slow=2))
    assert model is not None
    assert model.ns_per_byte == pytest.approx(40, rel=0.01)  # 2 (n-1)/n is 1 for two ranks
    # step 1 begins 220 after the arrival, takes 60 or 140 of the slow link: 280 and 360; less 80 and 240
    assert model.latency_ns == pytest.approx((200 + 120) / 2 * US, rel=0.01)


def test_without_messages_nothing_is_told() -> None:
    assert fit_links(Graph()) == {}
    assert fit_all_reduce(Graph()) is None
