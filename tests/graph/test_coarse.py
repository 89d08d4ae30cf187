"""The coarsened view: fewer ops, the same ends of what a search looks at."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.sync import SyncModel
from dpro.graph.coarse import coarsen
from dpro.graph.graph import Graph, OpKind, TensorInfo
from dpro.passes.tensor_fusion import Grouping, TensorFusion
from dpro.replay.engine import replay

MS = 1_000_000


def step(ops: list[list[tuple[int, int]]], tail: list[tuple[int, int]], sync: SyncModel, ranks: int = 2) -> Graph:
    """Host threads of (duration, gap) ops: those of ``ops[t]`` come before gradient t is ready, ``tail`` is the end."""
    graph = Graph()
    graph.ranks = ranks
    graph.tensors = [TensorInfo(f"p{t}", 1 << 20, "float32", t) for t in range(len(ops))]
    graph.info.update(sync=sync, launch_ns=10_000, channel="group/default", main_resource={})
    for rank in range(ranks):
        host = graph.info["main_resource"][rank] = graph.resource(f"rank{rank}/cpu/main")
        chain: list[int] = []

        def add(
            kind: OpKind,
            duration: int,
            gap: int,
            tensor: int = -1,
            host: int = host,
            rank: int = rank,
            chain: list[int] = chain,
        ) -> int:
            more = {"duration": duration, "gap": gap, "tensor": tensor, "rank": rank, "after": chain[-1:]}
            chain.append(graph.add_op(kind.name, kind, resource=host, **more))
            return chain[-1]

        for t, before in enumerate(ops):
            for duration, gap in before:
                add(OpKind.BACKWARD, duration, gap)
            graph.out_op[rank, t] = add(OpKind.OUT, 0, 0, t)
        for t in range(len(ops)):
            graph.in_op[rank, t] = add(OpKind.IN, 20_000, 0, t)
        for duration, gap in tail:
            add(OpKind.UPDATE, duration, gap)
    TensorFusion().apply(graph, (tuple(range(len(ops))),))
    return graph


def ends(graph: Graph) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int], int]:
    """When gradients are ready and handed on, and the step."""
    played, arrays = replay(graph), graph.arrays()
    at = {op: int(played.end[i]) for i, op in enumerate(arrays.ids.tolist())}
    ready, handed = ({key: at[op] for key, op in table.items()} for table in (graph.out_op, graph.in_op))
    return ready, handed, played.makespan_ns


HOST_OPS = st.lists(st.tuples(st.integers(0, 3 * MS), st.integers(0, 100_000)), max_size=6)


@st.composite
def steps(draw: st.DrawFn, steal: float) -> tuple[Graph, Grouping]:
    tensors = draw(st.integers(1, 6))
    sync = SyncModel(draw(st.sampled_from([0.0, 200_000.0])), draw(st.sampled_from([0.5, 4.0])), steal)
    graph = step([draw(HOST_OPS) for _ in range(tensors)], draw(HOST_OPS), sync)
    cuts = [0, *sorted(draw(st.sets(st.integers(1, tensors), max_size=3)) | {tensors})]
    return graph, tuple(tuple(range(a, b)) for a, b in pairwise(cuts))


@settings(max_examples=150, deadline=None)
@given(steps(0.0))
def test_ends_are_the_same_under_any_buckets(drawn: tuple[Graph, Grouping]) -> None:
    graph, grouping = drawn
    before = graph.edges().tolist()
    small = coarsen(graph, set())
    assert graph.edges().tolist() == before and len(small) <= len(graph)
    for each in (graph, small):
        TensorFusion().apply(each, grouping)
    assert ends(small) == ends(graph)


@settings(max_examples=100, deadline=None)
@given(steps(1.0))
def test_with_contention_no_turn_is_more_than_a_grain_late(drawn: tuple[Graph, Grouping]) -> None:
    graph, grouping = drawn
    grain = 250_000
    small = coarsen(graph, set(graph.info["main_resource"].values()), grain_ns=grain)
    for each in (graph, small):
        TensorFusion().apply(each, grouping)
    pieces = sum(len(bucket.ops) for bucket in graph.buckets)
    assert abs(ends(small)[2] - ends(graph)[2]) <= grain * max(1, pieces)


def test_by_hand() -> None:
    # before the gradient: 3 + (gap 1) 2 + OUT; after: IN 20 µs, then updates of 5 and (gap 2) 4 ms
    graph = step([[(3 * MS, 0), (2 * MS, MS)]], [(5 * MS, 0), (4 * MS, 2 * MS)], SyncModel(0.0, 1.0), ranks=1)
    small = coarsen(graph, set())
    kinds = [OpKind(k) for k in small.column("kind")[small.column("alive")]]
    assert sorted(kinds) == sorted([OpKind.OUT, OpKind.IN, OpKind.UPDATE, OpKind.COLLECTIVE])
    durations = {OpKind(k): int(d) for k, d in zip(small.column("kind"), small.column("duration"), strict=True)}
    assert durations[OpKind.OUT] == 6 * MS + 10_000  # the launch of its bucket
    assert durations[OpKind.UPDATE] == 11 * MS


def test_runs_are_cut_where_others_take_turns() -> None:
    graph = step([[(100_000, 0)] * 6], [], SyncModel(0.0, 1.0), ranks=1)
    host = graph.info["main_resource"][0]
    small = coarsen(graph, {host}, grain_ns=250_000)
    backward = small.column("duration")[small.column("kind") == OpKind.BACKWARD].tolist()
    assert backward == [200_000, 200_000] and len(coarsen(graph, set())) == len(small) - 2


@pytest.mark.parametrize("what", ["name", "user", "second thread"])
def test_what_others_look_for_stays(what: str) -> None:
    graph = step([[(MS, 0), (MS, 0), (MS, 0)]], [], SyncModel(0.0, 1.0), ranks=1)
    if what == "user":
        graph.add_op("message", OpKind.SEND, duration=MS, after=[1])
    elif what == "second thread":  # it may come between any two of the others
        graph.add_op("other", OpKind.FORWARD, resource=graph.info["main_resource"][0], duration=MS)
    kept = np.arange(len(graph.column("kind"))) == (1 if what == "name" else -1)
    small = coarsen(graph, set(), kept)
    assert len(small) == {"name": len(graph) - 1, "user": len(graph) - 2, "second thread": len(graph)}[what]
    assert replay(small).makespan_ns == replay(graph).makespan_ns
