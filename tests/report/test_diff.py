"""Differences of two hand-made steps, by arithmetic."""

from __future__ import annotations

from dpro.graph.graph import Graph, OpKind
from dpro.report.diff import compare, time_by_name
from tests.report.hand_graph import MS, two_ranks


def test_time_is_per_rank_and_a_shared_op_counts_for_each() -> None:
    assert time_by_name(two_ranks()) == {
        "linear": (12.0, 1.0),  # (10 + 14) / 2
        "LinearBackward": (20.0, 1.0),
        "all_reduce": (8.0, 1.0),  # both ranks are in it for its 8 ms
        "Adam": (2.0, 1.0),
    }


def test_an_op_of_a_subgroup_counts_for_those_in_it() -> None:
    graph = two_ranks()
    graph.ranks = 4  # two more that take no part in the all_reduce
    assert time_by_name(graph)["all_reduce"] == (4.0, 0.5)


def test_changes_come_largest_first_whatever_their_sign() -> None:
    a, b = two_ranks(), two_ranks()
    for op in range(2):
        b.set(2 * op, "duration", 5 * MS)  # both forwards: 12 -> 5
    b.set(4, "duration", 9 * MS)  # all_reduce: 8 -> 9
    b.add_op("dropout", OpKind.FORWARD, duration=4 * MS, rank=0)  # one rank of two: 2 ms, half a time
    rows = [(r["name"], r["a_ms"], r["b_ms"], r["change_ms"], r["a_count"], r["b_count"]) for r in compare(a, b)]
    assert rows == [
        ("linear", 12.0, 5.0, -7.0, 1.0, 1.0),
        ("dropout", 0.0, 2.0, 2.0, 0.0, 0.5),
        ("all_reduce", 8.0, 9.0, 1.0, 1.0, 1.0),
        ("Adam", 2.0, 2.0, 0.0, 1.0, 1.0),
        ("LinearBackward", 20.0, 20.0, 0.0, 1.0, 1.0),
    ]


def test_removed_ops_and_empty_graphs() -> None:
    graph = two_ranks()
    graph.remove_ops([5, 6])
    assert "Adam" not in time_by_name(graph)
    assert compare(Graph(), Graph()) == []
