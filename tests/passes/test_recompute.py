"""Re-computation in a graph: where the second forward pass comes and what it takes, by hand."""

from __future__ import annotations

import pytest

from dpro.graph.graph import Graph, OpKind
from dpro.graph.memory import RankMemory
from dpro.passes.recompute import Recompute, families, saved_bytes
from dpro.replay.engine import replay
from dpro.trace.memory import MEMORY
from tests.passes.memory_graphs import MS, chain_graph, chain_profile

PROFILE = chain_profile([100, 200, 300, 0], [10, 20, 30, 40])


def graph_of(ranks: int = 1) -> Graph:
    return chain_graph(PROFILE, [1, 2, 4, 8], [10, 20, 40, 80], ranks)


@pytest.mark.parametrize(("blocks", "ms"), [(("net.1",), 2), (("net.0", "net.2"), 5), (("net.1..2", "net.0"), 7)])
def test_takes_its_forward_pass_once_more(blocks: tuple[str, ...], ms: int) -> None:
    graph = graph_of(ranks=2)
    plain_ns = replay(graph).makespan_ns
    assert plain_ns == (15 + 150 + 1) * MS
    edit = Recompute()
    assert edit.cost(graph, blocks) == 2 * ms * MS
    before = [len(graph), graph.edges().tolist(), graph.column("duration").tolist()]
    mark = edit.apply(graph, blocks)
    assert replay(graph).makespan_ns == plain_ns + ms * MS
    graph.undo(mark)
    assert [len(graph), graph.edges().tolist(), graph.column("duration").tolist()] == before


def test_right_before_its_backward_pass() -> None:
    """Layer 3's and 2's backward passes go first, then 1's forward pass again."""
    graph = graph_of()
    Recompute().apply(graph, ("net.1",))
    played, row = replay(graph), {op: i for i, op in enumerate(graph.arrays().ids.tolist())}
    start = {graph.name_of(op): int(played.start[i]) / MS for op, i in row.items()}
    assert start["recompute net.1"] == 15 + 80 + 40
    assert start["net.1 back"] == 15 + 80 + 40 + 2


def test_on_a_stream() -> None:
    """Kernels run again on their stream, launched by the host's own second pass: neither overtakes, nor waits, for more
    than it did."""
    graph = Graph()
    host, stream = graph.resource("rank0/cpu/main"), graph.resource("rank0/stream/7")
    profile = chain_profile([8], [8])
    ops: list[list[int]] = [[] for _ in range(profile.segments)]
    kernels: list[list[int]] = [[] for _ in range(profile.segments)]
    last: list[int] = []
    before: list[int] = []
    for segment, kind, kernel_ms in ((1, OpKind.FORWARD, 10), (3, OpKind.BACKWARD, 20)):
        call = graph.add_op("call", kind, resource=host, duration=MS, rank=0, after=last)
        kernel = graph.add_op("kernel", kind, resource=stream, duration=kernel_ms * MS, rank=0, after=[*last, *before])
        ops[segment], kernels[segment], last, before = [call], [kernel], [call], [kernel]
    graph.info[MEMORY] = {0: RankMemory(profile, tuple(map(tuple, ops)), tuple(map(tuple, kernels)))}
    assert replay(graph).makespan_ns == 30 * MS
    assert Recompute().cost(graph, ("net.0",)) == 10 * MS
    Recompute().apply(graph, ("net.0",))
    assert replay(graph).makespan_ns == 40 * MS


def test_legal() -> None:
    edit, graph = Recompute(), graph_of()
    assert edit.legal(graph, ("net.0", "net.1..3"))
    for wrong in ((), ("net.0", "net.0"), ("net.0..1", "net.1"), ("net.4",), ("nothing",)):
        assert not edit.legal(graph, wrong)
    refused = chain_graph(chain_profile([1, 1, 1], [1, 1, 1], {1: "it is compiled"}), [1] * 3, [1] * 3)
    assert not edit.legal(refused, ("net.1",)) and not edit.legal(refused, ("net.0..2",))
    assert edit.legal(refused, ("net.0", "net.2"))
    assert not edit.legal(Graph(), ("net.0",)) and not [*edit.candidates(Graph())]


def test_candidates() -> None:
    """Layer 3 holds nothing but what it hands on: recomputed it would save nothing, and is not offered alone."""
    graph = graph_of()
    singles = [one for (one,) in Recompute().candidates(graph)]
    assert "net.3" not in singles and {"net.0", "net.1", "net.2", "net.0..3"} <= set(singles)
    assert [saved_bytes(PROFILE, name) for name in ("net.2", "net.0..3")] == [300, 100 + 10 + 200 + 20 + 300 + 30]
    saved = [saved_bytes(PROFILE, name) for name in singles]
    assert saved == sorted(saved, reverse=True)
    for names in families(PROFILE):
        assert Recompute().legal(graph, tuple(names))
