"""What partitions cost: known costs found again, what is said where they can't be, and the closed form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.ps import HELD_SHARE, PsModel, best_parts, fit_ps
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO, Ps, Seen
from dpro.graph.ps_pace import Pace
from tests.graph.ps_jobs import layout

MS = 1_000_000
THERE, BACK = "link/worker0>server0", "link/server0>worker0"
SIZES = (4_000, 400_000, 4_000_000)


#: What messages that queued show.
PACES = {THERE: Pace(8.0, 0.01, 20, 3), BACK: Pace(9.0, 0.02, 20, 3)}


def graph_of(seen: list[Seen], lags: dict[str, list[int]] | None = None, paces: dict[str, Pace] | None = None) -> Graph:
    graph = Graph()
    graph.info[INFO] = Ps(layout(), {}, paces or {}, seen, lags or {})
    return graph


def messages(what: str, where: str, latency: int, pace: float, *, queued: bool = False, times: int = 4) -> list[Seen]:
    return [Seen(what, where, n, round(latency + pace * n), queued) for n in SIZES for _ in range(times)]


def test_known_costs_are_found_again() -> None:
    """8 and 9 ns a byte; alone, a push is acknowledged 1.5 ms later, a pull begins 0.4 ms after it was asked for."""
    seen = [
        *messages("push", THERE, 1_500_000, 8.0),
        *messages("pull", BACK, 400_000, 9.0),
        *messages("answer", BACK, 450_000, 9.25),
        *messages("out", "rank0/byteps/copyd2h", 0, 0.25),
        *messages("push", THERE, 0, 0.0, queued=True),  # came in a batch
    ]
    lags = {"out": [5, 7, 90_000], "push": [10], "ask": [20], "in": []}
    held, free = fit_ps([graph_of(seen, lags, PACES)]).beliefs()
    assert (free.link(THERE).latency_ns, free.link(THERE).ns_per_byte) == (0.0, 8.0)
    assert (free.link(BACK).latency_ns, free.link(BACK).ns_per_byte) == (0.0, 9.0)
    assert free.copy("rank0/byteps/copyd2h").ns_per_byte == pytest.approx(0.25, rel=1e-3)
    assert free.lag("acknowledge") == 1_500_000
    assert free.lag("pull") == 400_000
    # adding is believed to be like copying; what answers take beyond is a lag: 50 us
    assert free.sums.time_ns(1_000_000) == 250_000
    assert free.lag("sum") == pytest.approx(50_000, abs=10)
    assert (free.lag("out"), free.lag("push"), free.lag("ask"), free.lag("in")) == (7, 10, 20, 0)
    assert held.trust == free.trust == "good"
    # a direction that was not seen is as slow as the slowest that was
    assert free.link("link/elsewhere") == free.link(BACK)
    # first a hundredth of a typical message is believed to hold its link: of 1.468 MB at 8 ns a byte
    typical = 8.0 * sum(SIZES) / 3
    assert held.link(THERE).latency_ns == pytest.approx(HELD_SHARE * typical)
    assert held.link(THERE).time_ns(sum(SIZES) / 3) == pytest.approx(typical, abs=1)


def test_a_stall_moves_nothing() -> None:
    seen = [*messages("push", THERE, MS, 8.0), Seen("push", THERE, 400_000, 900 * MS)]
    line = fit_ps([graph_of(seen)]).link(THERE)
    assert (line.latency_ns, line.ns_per_byte) == pytest.approx((MS, 8.0), rel=1e-2)


def test_messages_that_never_queued_leave_two_beliefs() -> None:
    """1 ms beyond its bytes: it holds the link, or it doesn't. A captured part costs the same."""
    seen = [*messages("push", THERE, MS, 8.0), *messages("pull", BACK, MS, 8.0)]
    held, free = fit_ps([graph_of(seen)]).beliefs()
    assert held.link(THERE).latency_ns == pytest.approx(MS, rel=1e-3)
    assert held.lag("acknowledge") == 0
    assert free.link(THERE).latency_ns == 0
    for part in SIZES:
        there, back = held.link(THERE).time_ns(part), held.link(BACK).time_ns(part)
        assert free.link(THERE).time_ns(part) + free.lag("acknowledge") == pytest.approx(there, rel=1e-3)
        assert free.link(BACK).time_ns(part) + free.lag("pull") == pytest.approx(back, rel=1e-3)


def test_a_latency_that_does_not_matter_is_no_second_belief() -> None:
    assert len(fit_ps([graph_of(messages("push", THERE, 1_000, 8.0))]).beliefs()) == 1


def test_one_size_is_an_assumption() -> None:
    model = fit_ps([graph_of([Seen("push", THERE, 4_096_000, 40 * MS)] * 9)])
    assert model.trust == "assumed"
    assert len(model.beliefs()) == 2
    assert model.link(THERE).time_ns(4_096_000) == 40 * MS


@pytest.mark.parametrize("seen", [[], [Seen("out", "x", 10, 10)], [Seen("push", THERE, -1, 9)]])
def test_nothing_to_learn_from(seen: list[Seen]) -> None:
    with pytest.raises(ValueError, match="partition"):
        fit_ps([graph_of(seen)])
    with pytest.raises(ValueError, match="partition"):
        fit_ps([Graph()])


def test_the_beliefs_of_nothing() -> None:
    assert PsModel({}).trust == "assumed"
    assert PsModel({}).link("any").time_ns(10) == 0


# -- the closed form -----------------------------------------------------------------------------

lines = st.builds(SyncModel, st.floats(1_000, 5e6), st.floats(0.1, 50))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 400_000_000), lines, st.builds(SyncModel, st.floats(0, 1e6), st.floats(0, 5)), lines)
def test_the_closed_form_is_the_best_of_all(nbytes: int, send: SyncModel, add: SyncModel, receive: SyncModel) -> None:
    """Against every number of parts up to where overheads alone are worse than one part."""
    slow, other = sorted((send, receive), key=lambda line: line.time_ns(nbytes), reverse=True)

    def pipeline_ns(k: int) -> float:
        part = nbytes / k
        return (
            k * (slow.latency_ns + slow.ns_per_byte * part)
            + (other.latency_ns + other.ns_per_byte * part)
            + (add.latency_ns + add.ns_per_byte * part)
        )

    found = best_parts(nbytes, send, add, receive)
    assert 1 <= found <= nbytes
    around = {k for step in range(-3, 4) for k in (found + step, round(found * 1.3**step)) if 1 <= k <= nbytes}
    # half a part off is what rounding to a whole number may be, to the second order
    best = min(map(pipeline_ns, around))
    assert pipeline_ns(found) <= best * (1 + 1e-9) + slow.latency_ns / 4
    assert pipeline_ns(found) <= pipeline_ns(1) + slow.latency_ns / 4


def test_the_closed_form_by_hand() -> None:
    """40 MB over 200 Mbit: 40 ns a byte each way, 1 ms a message: sqrt(40e6 · 40 / 1e6) = 40."""
    link = SyncModel(1e6, 40.0)
    assert best_parts(40_000_000, link, SyncModel(0, 0), link) == 40
    # a server that takes as long as three such links: twice as many
    assert best_parts(40_000_000, link, SyncModel(0, 120.0), link) == 80
    # the way back is slower: its latency counts, and the bytes of the way there
    assert best_parts(40_000_000, SyncModel(9e9, 10.0), SyncModel(0, 0), SyncModel(4e6, 1000.0)) == 10
    assert best_parts(8, SyncModel(0, 1.0), SyncModel(0, 0), SyncModel(0, 1.0)) == 8
    assert best_parts(8, SyncModel(0, 0), SyncModel(0, 0), SyncModel(0, 0)) == 1
