"""Workers' clocks by what a server passed on between them."""

from __future__ import annotations

import pytest

from dpro.clock.align import align
from dpro.clock.identity import CLOCK_ID
from dpro.cost.sync import SyncModel
from dpro.graph.assemble import assemble
from dpro.replay.engine import replay
from dpro.trace.model import RankTrace
from tests.graph.ps_jobs import layout, model, ps_graph, traces

MS = 1_000_000
#: 10 ns a byte, 50 µs of naps on the way: a partition of 4,000 bytes is back after 230 µs
LINK, LAGS = SyncModel(0.0, 10.0), {"acknowledge": 50_000.0}


def job() -> list[RankTrace]:
    where = layout()
    graph = ps_graph([4_000, 400_000, 4_000], 1 << 20, where, model(where, LINK, lags=LAGS), bwd_ns=[5 * MS] * 3)
    return traces([graph] * 4)


@pytest.mark.parametrize("offset_ns", [0, 37 * MS, -100_000_000 * MS])
def test_a_pull_ends_after_all_pushes_began(offset_ns: int) -> None:
    first, second = job()
    for number, trace in enumerate((first, second)):
        trace.meta.extra[CLOCK_ID] = f"clock {number}"
    second.shift(offset_ns)
    found = align([first, second])
    assert found.source[1] == "messages"
    assert abs(found.offset_ns[1] + offset_ns) <= found.uncertainty_ns[1]
    # the smallest partition's way: 40 µs there, 40 back, 50 of naps, to either side of the middle
    assert found.uncertainty_ns[1] < 200_000
    assert found.warnings == []


def test_other_clocks_change_no_step() -> None:
    same, apart = job(), job()
    for number, trace in enumerate(apart):
        trace.meta.extra[CLOCK_ID] = f"clock {number}"
    apart[1].shift(10**12)
    as_one = replay(assemble(same)).makespan_ns
    assert replay(assemble(apart)).makespan_ns == pytest.approx(as_one, abs=300_000)


def test_one_worker_says_nothing_of_another() -> None:
    first, second = job()
    for number, trace in enumerate((first, second)):
        trace.meta.extra[CLOCK_ID] = f"clock {number}"
    second.columns["flow"][:] = 77  # partitions that the first does not have
    assert "not pinned" in align([first, second]).warnings[0]
