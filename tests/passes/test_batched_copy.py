"""Batched gradient copies on a step made by hand: 1,000 ns a call, 2 ns a byte."""

from __future__ import annotations

from dpro.graph.graph import Bucket, Graph, OpKind, TensorInfo
from dpro.passes.batched_copy import BatchedCopy
from dpro.replay.engine import replay

SIZES = (100, 300, 50)


def one_rank() -> tuple[Graph, list[int]]:
    """Three gradients, each copied into a bucket as it becomes ready; one bucket for the first two."""
    graph = Graph()
    graph.ranks = 1
    host = graph.resource("rank0/cpu/main")
    copies: list[int] = []
    last: list[int] = []
    for t, nbytes in enumerate(SIZES):
        graph.tensors.append(TensorInfo(f"p{t}", nbytes, "float32", t))
        copy = graph.add_op(
            "torch::distributed::reducer::mul_out",
            OpKind.BACKWARD,
            resource=host,
            duration=1_000 + 2 * nbytes,
            rank=0,
            after=last,
        )
        last = [graph.add_op("gradient ready", OpKind.OUT, resource=host, tensor=t, rank=0, after=[copy])]
        graph.out_op[0, t] = last[0]
        copies.append(copy)
    graph.set_buckets([Bucket((0, 1), 400), Bucket((2,), 50)])
    return graph, copies


def test_two_calls_a_bucket_and_every_byte_twice() -> None:
    graph, copies = one_rank()
    assert replay(graph).makespan_ns == 3_000 + 2 * 450
    edit = BatchedCopy()
    [groups] = edit.candidates(graph)
    assert groups == ((0, 1), (2,))
    mark = edit.apply(graph, groups)
    # bucket one: 2 · (1,000 + 2 · 400), at its last gradient; bucket two: 2 · (1,000 + 2 · 50)
    assert graph.column("duration")[copies].tolist() == [0, 3_600, 2_200]
    graph.undo(mark)
    assert replay(graph).makespan_ns == 3_900
    assert edit.cost(graph, groups) == 5_800 - 3_900
    # one bucket for all three: 2 · (1,000 + 2 · 450), less than three calls
    assert edit.cost(graph, ((0, 1, 2),)) == 3_800 - 3_900


def test_not_legal_where_a_gradient_has_no_copy() -> None:
    graph, copies = one_rank()
    graph.remove_ops([copies[1]])
    assert not BatchedCopy().legal(graph, ((0, 1), (2,)))
    assert list(BatchedCopy().candidates(graph)) == []


def test_not_legal_where_a_rank_shows_no_cost() -> None:
    """Contention taken out of a rank's copies can leave nothing of them: there is no line to fit there."""
    graph, copies = one_rank()
    for op in copies:
        graph.set(op, "duration", 0)
    assert not BatchedCopy().legal(graph, ((0, 1), (2,)))
