"""What changed between two captures: step time, and time per op name, largest change first.

Compares what was measured, not what was replayed: the durations in two graphs (time no child op
accounts for, so names add up), per rank and step. Knows no file and no output format.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import numpy.typing as npt

from dpro.graph.graph import Graph


class OpChange(TypedDict):
    """Time of all ops of one name, ms per rank and step; counts per rank and step."""

    name: str
    a_ms: float
    b_ms: float
    change_ms: float
    a_count: float
    b_count: float


def time_by_name(graph: Graph) -> dict[str, tuple[float, float]]:
    """Name -> (ms, count), both per rank and step. An op shared by ranks counts once for each."""
    alive = np.flatnonzero(graph.column("alive"))
    ranks = max(graph.ranks, 1)
    weight = _members(graph)[alive]
    names = graph.column("name")[alive]
    size = len(graph.name_table)
    ms = np.bincount(names, weights=graph.column("duration")[alive] * weight / 1e6, minlength=size) / ranks
    count = np.bincount(names, weights=weight, minlength=size) / ranks
    return {name: (float(ms[i]), float(count[i])) for i, name in enumerate(graph.name_table) if count[i]}


def _members(graph: Graph) -> npt.NDArray[np.int64]:
    """Ranks in each op: of a shared one those that it waits for, all where none is known."""
    rank, edges = graph.column("rank"), graph.edges()
    arrivals = edges[(rank[edges[:, 0]] >= 0) & (rank[edges[:, 1]] < 0)]
    pairs = np.unique(np.stack([arrivals[:, 1], rank[arrivals[:, 0]]], axis=1), axis=0)
    shared = np.bincount(pairs[:, 0], minlength=len(rank))
    return np.where(rank >= 0, 1, np.where(shared > 0, shared, max(graph.ranks, 1)))


def compare(a: Graph, b: Graph) -> list[OpChange]:
    """Every op name of either graph, sorted by absolute change (then by name)."""
    before, after = time_by_name(a), time_by_name(b)
    rows = []
    for name in before.keys() | after.keys():
        (a_ms, a_count), (b_ms, b_count) = before.get(name, (0.0, 0.0)), after.get(name, (0.0, 0.0))
        rows.append(OpChange(name=name, a_ms=a_ms, b_ms=b_ms, change_ms=b_ms - a_ms, a_count=a_count, b_count=b_count))
    return sorted(rows, key=lambda row: (-abs(row["change_ms"]), row["name"]))
