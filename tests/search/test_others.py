"""Passes that the search does not turn: replayed alone, by cost, never trusted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dpro.adapter import Knob
from dpro.graph.graph import Graph, OpKind
from dpro.passes.mixed_precision import MixedPrecision
from dpro.passes.registry import Pass
from dpro.plan import Plan
from dpro.replay.engine import replay
from dpro.search.critical_path import Candidate, SearchResult
from dpro.search.others import REPLAYED, Tried, try_out
from tests.report.hand_graph import MAKESPAN_MS, MS, two_ranks


class Backward:
    """Backward ops in so many percent of their time; 20 of the 45 ms."""

    name = "backward"
    knobs: frozenset[Knob] = frozenset()
    percents: Iterable[int] = (75, 50)

    def candidates(self, graph: Graph) -> Iterable[int]:
        return self.percents

    def legal(self, graph: Graph, candidate: int) -> bool:
        return candidate != 13

    def apply(self, graph: Graph, candidate: int) -> int:
        mark = graph.mark()
        graph.scale((graph.column("kind") == OpKind.BACKWARD).nonzero()[0], candidate / 100)
        return mark

    def cost(self, graph: Graph, candidate: int) -> float:
        return candidate


class Caps(Backward):
    name = "caps"
    knobs = frozenset({Knob.BUCKET_CAP})

    def settings(self, candidate: int) -> dict[str, Any]:
        return {"bucket_caps": [candidate / 10]}


def tried(*edits: Pass, found: SearchResult | None = None, knobs: Iterable[Knob] = Knob) -> Tried:
    """The search took the captured step to last 90 ms, twice what the replay says."""
    graph = two_ranks()
    told = try_out(graph, edits, found or SearchResult(2 * MAKESPAN_MS), knobs=set(knobs), fingerprint={"model": "abc"})
    assert replay(graph).makespan_ns == MAKESPAN_MS * MS
    assert graph.mark() == two_ranks().mark()
    return told


def test_what_ifs_by_cost() -> None:
    told = tried(Backward())
    # 45 - 20 + 10 and 45 - 20 + 15 ms, times two
    assert told == Tried([], [("backward 50", 70.0), ("backward 75", 80.0)], [])


def test_only_the_cheapest_of_many_and_only_legal_ones() -> None:
    edit = Backward()
    edit.percents = range(1_000_000_000)  # never all looked at
    told = tried(edit)
    assert len(told.whatifs) == REPLAYED
    assert [name for name, _ in told.whatifs[12:15]] == ["backward 12", "backward 14", "backward 15"]


def test_what_can_be_set_is_a_plan_where_it_is_faster() -> None:
    edit = Caps()
    edit.percents = (50, 75, 100, 200)
    told = tried(edit)
    assert [(c.name, c.predicted_ms) for c in told.candidates] == [("caps 50", 70.0), ("caps 75", 80.0)]
    assert told.candidates[0].plan == Plan(
        fingerprint={"model": "abc"}, bucket_caps=[5.0], predicted_ms=70.0, baseline_ms=90.0
    )
    assert told.whatifs == [("caps 100", 90.0), ("caps 200", 130.0)]
    # where the job has no such knob
    assert tried(edit, knobs=[Knob.GROUPS]).candidates == []


@pytest.mark.parametrize(
    ("own_ms", "names"), [(60.0, ["own", "caps 50", "caps 75"]), (75.0, ["caps 50", "caps 75", "own"])]
)
def test_the_fastest_comes_first(own_ms: float, names: list[str]) -> None:
    own = Candidate("own", Plan(), own_ms, ())
    told = tried(Caps(), found=SearchResult(90.0, [own]))
    assert [candidate.name for candidate in told.candidates] == names


def test_a_built_in_one_that_no_plan_carries() -> None:
    told = tried(MixedPrecision())
    # rank 1: 1 + 34 / 3 + 8 + 2
    assert [ms for _, ms in told.whatifs] == pytest.approx([2 * (11 + 34 / 3)] * 2, rel=1e-6)
    assert told.candidates == []


def broken(method: str, does: Any) -> Pass:
    edit = Caps()
    setattr(edit, method, does)
    return edit


def leaves_an_edit(graph: Graph, candidate: int) -> float:
    graph.set(0, "duration", 0)
    return 0.0


def adds_and_fails(graph: Graph, candidate: int) -> int:
    graph.remove_ops([0])
    raise KeyError("no\nluck")


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [
        ("candidates", lambda graph: 1 / 0, "ZeroDivisionError: division by zero"),
        ("candidates", lambda graph: [], "nothing to do here"),
        ("legal", lambda graph, candidate: {}[candidate], "KeyError"),
        ("cost", lambda graph, candidate: float("nan"), "a cost that is no number"),
        ("cost", lambda graph, candidate: "cheap", "ValueError"),
        ("apply", adds_and_fails, "KeyError: 'no\\nluck'"),
        ("settings", lambda candidate: {"version": 2}, "'version', which is not for a pass to say"),
        ("settings", lambda candidate: {"bucket_caps": [-1]}, "bad value for 'bucket_caps'"),
        ("settings", lambda candidate: {"speed": 2}, "unexpected keyword argument 'speed'"),
    ],
)
def test_whatever_a_pass_does_is_a_line(method: str, does: Any, said: str) -> None:
    told = tried(broken(method, does), Backward())
    [line] = told.warnings
    assert line.startswith("pass 'caps': ") and said in line and "\n" not in line
    assert len(told.whatifs) == 2 and told.candidates == []


def test_a_cost_that_forgets_to_undo() -> None:
    assert [c.predicted_ms for c in tried(broken("cost", leaves_an_edit)).candidates] == [70.0, 80.0]
