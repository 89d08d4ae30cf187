"""Ranks that replay for rank 0: the same plan whoever replays, whoever fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dpro.adapter import Exchange, Knob
from dpro.errors import DproError
from dpro.graph.packed import pack, unpack
from dpro.replay.engine import replay
from dpro.search import team as module
from dpro.search.critical_path import SearchResult, optimize
from dpro.search.team import Team, assist
from tests.search.test_optimize import transformer
from tests.tuner.fakes import Board, MemoryExchange

BOTH = {Knob.BUCKET_LIST, Knob.BUCKET_CAP}
Helper = Callable[[Exchange], None]


class Timed(MemoryExchange):
    """One whose waits end."""

    def wait(self, key: str, timeout_s: float) -> str:
        with self._board.changed:
            if not self._board.changed.wait_for(lambda: key in self._board.agreed, timeout_s):
                raise TimeoutError(key)
            return self._board.agreed[key]


def helps(exchange: Exchange) -> None:
    assist(exchange, "k", 20.0)


def searched(ranks: int, helper: Helper = helps) -> tuple[SearchResult, Team]:
    board = Board(ranks)
    team = Team(Timed(board, 0), "k")

    threads = [threading.Thread(target=helper, args=(Timed(board, r),), daemon=True) for r in range(1, ranks)]
    for thread in threads:
        thread.start()
    try:
        result = optimize(transformer(), knobs=BOTH, time_budget_s=60.0, team=team)
    finally:
        team.end()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive(), "a helper was not let go"
    return result, team


@pytest.fixture(autouse=True)
def always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTHWHILE_S", 0.0)
    monkeypatch.setattr(module, "_LEAST_PATIENCE_S", 0.3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_plan_for_any_number_of_ranks(ranks: int) -> None:
    alone, _ = searched(1)
    shared, team = searched(ranks)
    assert [c.plan for c in shared.candidates] == [c.plan for c in alone.candidates]
    # one replay was here before the others were told; of the rest they had their shares
    assert team.evaluations > 0.4 * (ranks - 1) / ranks * alone.evaluations
    assert shared.evaluations == pytest.approx(alone.evaluations, rel=0.02)  # theirs among them


def test_another_cost_is_another_search_for_all_ranks() -> None:
    """A team serves one search after another; each is told under which cost of synchronisation."""

    def plans(ranks: int) -> list[object]:
        board = Board(ranks)
        team = Team(Timed(board, 0), "k")
        threads = [threading.Thread(target=helps, args=(Timed(board, r),), daemon=True) for r in range(1, ranks)]
        for thread in threads:
            thread.start()
        found: list[object] = []
        graph = transformer()
        for latency_ns in (5_000_000.0, 0.0):
            graph.info["sync"] = replace(graph.info["sync"], latency_ns=latency_ns)
            result = optimize(graph, knobs=BOTH, time_budget_s=60.0, team=team)
            found += [result.candidates[0].plan, team.evaluations > 0]
        team.end()
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive()
        return found

    (alone, _, alone_free, _), (shared, helped, shared_free, helped_free) = plans(1), plans(3)
    assert (alone, alone_free) == (shared, shared_free) and alone != alone_free
    assert helped and helped_free


def test_ranks_that_are_not_asked_do_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HELPERS", 1)
    assert assist(Timed(Board(3), 2), "k", 60.0) == 0


def silent(exchange: Exchange) -> None:
    """Leaves without a word, as one that is killed."""


def liar(exchange: Exchange) -> None:
    exchange.wait("k/0", 5.0)
    exchange.agree("k/0/1", "ready")
    exchange.agree("k/1/1", "[]")


@pytest.mark.parametrize("helper", [silent, liar])
def test_without_answers_it_goes_on_alone(helper: Helper) -> None:
    alone, _ = searched(1)
    shared, team = searched(2, helper)
    assert [c.plan for c in shared.candidates] == [c.plan for c in alone.candidates]
    assert team.evaluations == 0 and shared.evaluations == alone.evaluations


def test_a_slow_helper_has_less_to_do() -> None:
    """It says that it took for ever: 8 times as long as rank 0 is believed at most, half of it at once, so 4.5."""
    had: list[int] = []

    def slow(exchange: Exchange) -> None:
        exchange.wait("k/0", 5.0)
        exchange.agree("k/0/1", "ready")
        for question in ("k/1", "k/2"):
            share = json.loads(exchange.wait(question, 5.0))["shares"]["1"]
            had.append(len(share))
            exchange.agree(f"{question}/1", json.dumps([1e9, *(sum(caps) for caps in share)]))

    board = Board(2)
    thread = threading.Thread(target=slow, args=(Timed(board, 1),), daemon=True)
    thread.start()
    team = Team(Timed(board, 0), "k")
    graph = transformer()
    team.join(graph, 1.0)
    while team.size() == 1:
        time.sleep(0.001)
    asked = [(i, i) for i in range(22)]
    for _ in range(2):
        assert team.steps_ns(asked, sum) == [2 * i for i in range(22)]
    thread.join(5.0)
    assert had == [11, 4]  # 18 here take as long as 4 there


def test_a_short_search_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTHWHILE_S", 60.0)
    _, team = searched(2)
    assert team.size() == 1 and team.evaluations == 0


def test_a_packed_graph_replays_alike() -> None:
    graph = transformer()
    graph.remove_ops([3])
    again = unpack(pack(graph))
    np.testing.assert_array_equal(replay(again).end, replay(graph).end)
    assert [t.name for t in again.tensors] == [t.name for t in graph.tensors]
    assert again.info["main_resource"] == graph.info["main_resource"]
    assert [b.tensors for b in again.buckets] == [b.tensors for b in graph.buckets]


@pytest.mark.parametrize("blob", [b"", b"PK\x03\x04", pack(transformer())[:200]])
def test_refuses_what_is_no_packed_graph(blob: bytes) -> None:
    with pytest.raises(DproError, match="not a packed graph"):
        unpack(blob)
