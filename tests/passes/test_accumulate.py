"""Gradient accumulation in a graph, by hand: passes over a part of the batch, and what is done once."""

from __future__ import annotations

import pytest

from dpro.passes.accumulate import Accumulate
from dpro.replay.engine import replay
from tests.passes.memory_graphs import MS, chain_graph, chain_profile

PROFILE = chain_profile([100, 200], [10, 20])
#: A half of the batch takes 60 % of the time of all of it, a fourth 40 %.
TIMED = {1: 1000, 2: 600, 4: 400}


def test_passes_over_parts() -> None:
    graph = chain_graph(PROFILE, [10, 20], [30, 40], ranks=2, micro=TIMED)
    edit = Accumulate()
    assert [*edit.candidates(graph)] == [2, 4]
    assert replay(graph).makespan_ns == 101 * MS
    before = [len(graph), graph.edges().tolist(), graph.column("duration").tolist()]
    for parts, ms in ((2, 2 * 60 + 1), (4, 4 * 40 + 1)):  # the update is done once
        mark = edit.apply(graph, parts)
        assert replay(graph).makespan_ns == ms * MS
        graph.undo(mark)
        assert edit.cost(graph, parts) == pytest.approx(2 * (ms - 101) * MS)
    assert [len(graph), graph.edges().tolist(), graph.column("duration").tolist()] == before


def test_only_what_was_timed() -> None:
    edit = Accumulate()
    assert not [*edit.candidates(chain_graph(PROFILE, [1, 1], [1, 1]))]
    graph = chain_graph(PROFILE, [1, 1], [1, 1], micro=TIMED)
    assert not any(edit.legal(graph, parts) for parts in (0, 1, 3, 8))
