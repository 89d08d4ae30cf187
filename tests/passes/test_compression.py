"""Gradients of half the bytes, on steps made by hand: 100 µs a transfer and 1 ns a byte."""

from __future__ import annotations

import pytest

from dpro.adapter import Knob
from dpro.graph.graph import Graph, OpKind
from dpro.passes.compression import ASSUMED_CAST_NS_PER_BYTE, Compression, cast_ns_per_byte
from dpro.passes.registry import Pass, find
from dpro.passes.tensor_fusion import TensorFusion
from dpro.replay.engine import replay
from dpro.trace.model import Meta
from tests.graph.ps_jobs import layout, model, ps_graph
from tests.passes.test_batched_copy import one_rank
from tests.search.graphs import SYNC, ddp_graph

MB = 1_000_000


def two_gradients(dtypes: tuple[str, str] = ("float32", "float32")) -> Graph:
    """Forward 1 ms, two backward ops of 1 ms; 4 and 2 MB in one bucket each."""
    return ddp_graph([4 * MB, 2 * MB], MB, [MB, MB], groups=((0,), (1,)), dtypes=dtypes)


def test_half_the_bytes_and_the_casts() -> None:
    graph = two_gradients()
    # forward 1, backward 1; the first goes from 2 to 6.1 ms, the second to 6.1 + 2.1
    assert replay(graph).makespan_ns == 8_200_000
    edit = Compression()
    assert isinstance(edit, Pass) and edit.knobs == {Knob.COMPRESSION}
    assert [*edit.candidates(graph)] == ["bfloat16", "float16"]
    mark = edit.apply(graph, "bfloat16")
    # no copy was captured: 4 MB of casts are 2 ms, so the first goes at 4; 2.1 + 1.1 ms of transfers
    assert ASSUMED_CAST_NS_PER_BYTE == 0.5
    assert replay(graph).makespan_ns == 4_000_000 + 2_100_000 + 1_100_000
    assert [(b.nbytes, t.nbytes) for b, t in zip(graph.buckets, graph.tensors, strict=True)] == [
        (2 * MB,) * 2,
        (MB,) * 2,
    ]
    # buckets that are made under it are of the smaller gradients: one of 3 MB, ready after 3 ms of compute, 3 of casts
    fused = TensorFusion().apply(graph, ((0, 1),))
    assert replay(graph).makespan_ns == 6_000_000 + 3_100_000
    graph.undo(fused)
    graph.undo(mark)
    assert replay(graph).makespan_ns == 8_200_000
    assert [t.nbytes for t in graph.tensors] == [4 * MB, 2 * MB] and graph.buckets[0].nbytes == 4 * MB
    # 3 ms of transfer saved once; 3 ms of casts on each of two ranks
    assert edit.cost(graph, "float16") == -3 * MB + 2 * 3 * MB


def test_what_is_16_bit_already_stays() -> None:
    graph = two_gradients(("float32", "bfloat16"))
    mark = Compression().apply(graph, "float16")
    assert replay(graph).makespan_ns == 4_000_000 + 2_100_000 + 2_100_000
    graph.undo(mark)
    narrow = two_gradients(("bfloat16", "float16"))
    assert not [*Compression().candidates(narrow)]
    assert not Compression().legal(two_gradients(), "float32")
    assert not Compression().legal(Graph(), "float16")
    where = layout()
    served = ps_graph([4_000], 4_000, where, model(where, SYNC))
    assert served.buckets and not Compression().legal(served, "float16")


def test_without_a_fitted_latency_all_of_the_time_is_for_bytes() -> None:
    graph = two_gradients()
    del graph.info["sync"]
    Compression().apply(graph, "float16")
    assert replay(graph).makespan_ns == 4_000_000 + 2_050_000 + 1_050_000


def test_contention_is_halved_with_the_bytes() -> None:
    graph = two_gradients()
    host = graph.info["main_resource"][0]
    loss = graph.add_op(
        "contention", OpKind.LOCAL, resource=host, duration=400, rank=0, after=[graph.buckets[0].ops[0]]
    )
    graph.buckets[0].ops += (loss,)
    Compression().apply(graph, "float16")
    assert graph.column("duration")[loss] == 200


def test_casts_cost_two_of_the_copies_captured() -> None:
    graph, _ = one_rank()  # 2 ns a byte, 1,000 a call
    assert cast_ns_per_byte(graph) == pytest.approx(4)
    assert "as captured copies" in Compression().assumed(graph, "float16")
    graph.resource("rank0/stream/7")
    assert cast_ns_per_byte(graph) == 0
    assert "on the device" in Compression().assumed(graph, "float16")


def test_the_job_says_what_it_can_reduce() -> None:
    graph = two_gradients()
    graph.info["gradient_dtypes"] = ["float16", "complex64"]
    assert [*Compression().candidates(graph)] == ["float16"]
    assert Meta(extra={"gradient_dtypes": ["float16", 7]}).gradient_dtypes() == ["float16"]
    assert Meta(extra={"gradient_dtypes": "float16"}).gradient_dtypes() == Meta().gradient_dtypes() == []
    assert find("compression").name == "compression"


def test_the_assumption_in_one_line() -> None:
    said = Compression().assumed(two_gradients(), "bfloat16")
    assert "6 MB become 3 MB" in said and "(assumed)" in said and "\n" not in said
    assert Compression().settings("bfloat16") == {"gradient_dtype": "bfloat16"}
