"""Delta replay against the whole one: any edit of any graph, ties and priorities included."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.replay.delta import DeltaReplay
from dpro.replay.engine import CycleError, replay
from tests.replay.random_graphs import random_graph


def edit(graph: Graph, source: random.Random) -> None:
    """A few random edits. What waits for what follows the ids of the ops, so that there is no cycle."""
    for _ in range(source.randint(1, 4)):
        living = np.flatnonzero(graph.column("alive")).tolist()
        if not living:
            return
        what = source.choice(["add", "add", "remove", "time", "edge", "resource", "priority"])
        op = source.choice(living)
        if what == "add":
            graph.add_op(
                "new",
                OpKind.LOCAL,
                resource=source.choice([NO_RESOURCE, *range(len(graph.resource_names))]),
                duration=source.choice([0, 1, 2, 50]),
                gap=source.choice([0, 0, 3]),
                priority=source.choice([0, 0, 0, 1]),
                after=source.sample(living, min(len(living), source.randint(0, 3))),
            )
        elif what == "remove":
            graph.remove_ops(source.sample(living, min(len(living), source.randint(1, 3))))
        elif what == "time":
            graph.set(op, source.choice(["duration", "gap"]), source.choice([0, 1, 5, 70]))
        elif what == "resource":
            graph.set(op, "resource", source.choice([NO_RESOURCE, *range(len(graph.resource_names))]))
        elif what == "priority":
            graph.set(op, "priority", source.choice([0, 1]))
        elif op > 0 and op > living[0]:
            graph.add_edge(source.choice([other for other in living if other < op]), op)


def assert_same(base: DeltaReplay, graph: Graph) -> None:
    whole = replay(graph)
    assert base.makespan_ns() == whole.makespan_ns
    told = base.replay()
    np.testing.assert_array_equal(told.start, whole.start)
    np.testing.assert_array_equal(told.end, whole.end)
    np.testing.assert_array_equal(told.cause, whole.cause)


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 2**32))
def test_equals_the_whole_replay_after_any_edits(seed: int) -> None:
    source = random.Random(seed)
    graph = random_graph(source)
    try:
        base = DeltaReplay(graph)
    except CycleError:
        return
    mark = graph.mark()
    for _ in range(5):  # each from the same base: what the last one did is taken back
        edit(graph, source)
        try:
            replay(graph)
        except CycleError:
            with pytest.raises(CycleError):
                base.makespan_ns()
        else:
            assert_same(base, graph)
        if source.random() < 0.7:  # else the next one comes on top
            graph.undo(mark)


def chain(ops: int) -> Graph:
    """A thread of ops of 10 ns with a gap of 1, each with a message of 5 on one link, which nobody waits for."""
    graph = Graph()
    thread, link = graph.resource("thread"), graph.resource("link")
    last: list[int] = []
    for _ in range(ops):
        last = [graph.add_op("work", OpKind.FORWARD, resource=thread, duration=10, gap=1, after=last)]
        graph.add_op("send", OpKind.SEND, resource=link, duration=5, after=last)
    return graph


def test_looks_at_what_changes_only() -> None:
    graph = chain(1000)
    base = DeltaReplay(graph)
    assert base.makespan_ns() == 1000 * 11 + 5 and base.looked_at == 0
    graph.set(1001, "duration", 8)  # in the middle: its link is free for 6 after each send
    assert base.makespan_ns() == 1000 * 11 + 5 and base.looked_at <= 3
    graph.set(1001, "duration", 8 + 3 * 6)  # it delays the next three, the fourth no more
    assert base.makespan_ns() == 1000 * 11 + 5 and base.looked_at <= 8
    assert base.whole == 0


def test_what_it_does_not_know_is_replayed_whole() -> None:
    graph = chain(100)
    base = DeltaReplay(graph)
    graph.set(0, "duration", 12)  # everything is 2 later
    assert base.makespan_ns() == 100 * 11 + 5 + 2 and base.whole == 0  # 200 ops: fewer than are worth a limit
    graph.set(0, "priority", -1)
    assert base.makespan_ns() == 100 * 11 + 5 + 2 and base.whole == 1
    large = chain(1000)
    base = DeltaReplay(large)
    large.set(0, "duration", 12)
    assert base.makespan_ns() == 1000 * 11 + 5 + 2 and base.whole == 1


def test_refuses_a_cycle_as_the_whole_replay_does() -> None:
    graph = chain(3)
    base = DeltaReplay(graph)
    graph.add_edge(4, 0)
    with pytest.raises(CycleError):
        base.makespan_ns()
