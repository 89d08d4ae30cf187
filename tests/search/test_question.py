"""Questions as ``dpro whatif`` takes them, on steps worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from dpro.graph.graph import Graph, OpKind
from dpro.replay.engine import replay
from dpro.replay.whatif import WhatIfError
from dpro.search.question import ask, network_of
from tests.report.hand_graph import MAKESPAN_MS, MS, two_ranks
from tests.search.graphs import ddp_graph


@pytest.mark.parametrize(
    ("transfers", "expected"),
    [
        ([(1, 9), (2, 17), (4, 33)], {"ns_per_byte": 8.0, "latency_ns": 1e6}),  # 1 ms + 8 ms per MB
        ([(1, 12), (7, 4)], {"ns_per_byte": 2.0}),  # noise: 16 ms for 8 MB is all there is to say
        ([(4, 8)], {"ns_per_byte": 2.0}),
        ([], {}),
    ],
)
def test_bandwidth_is_fitted_to_the_transfers(transfers: list[tuple[int, int]], expected: dict[str, float]) -> None:
    graph = Graph()
    for mb, ms in transfers:
        graph.add_op("all_reduce", OpKind.COLLECTIVE, duration=ms * 1_000_000, nbytes=mb * 1_000_000)
    assert network_of(graph) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("question", "expected_ms", "lines"),
    [
        ({"scale": ["Backward=0.5"]}, 35, 1),
        ({"bandwidth": "2x", "workers": 4}, 1 + 14 + 20 + 6 + 2, 2),  # 8 ms · 1.5 / 2
        ({"precision": "bf16=0.5"}, 1 + 17 + 8 + 2, 1),
        ({"precision": None, "scale": [], "bandwidth": "1x"}, MAKESPAN_MS, 1),
        ({"scale": ["Adam=3"], "precision": "fp16=0", "bandwidth": "0.5x"}, 1 + 16 + 6, 3),
    ],
)
def test_all_of_a_question_is_asked_at_once(question: dict[str, Any], expected_ms: float, lines: int) -> None:
    graph = two_ranks()
    mark = graph.mark()
    assert len(ask(graph, question)) == lines
    assert replay(graph).makespan_ns == expected_ms * MS
    graph.undo(mark)
    assert replay(graph).makespan_ns == MAKESPAN_MS * MS


def test_compression_goes_by_the_latency_of_the_captured_transfers() -> None:
    """Transfers of 1, 2 and 4 MB of 1 ms + 8 ms per MB; casts as assumed, 0.5 ms per MB."""
    graph = ddp_graph([MS, 2 * MS, 4 * MS], 0, [0, 0, 0], groups=((0,), (1,), (2,)))
    for bucket in graph.buckets:
        graph.set(bucket.ops[0], "duration", MS + 8 * bucket.nbytes)
    assert replay(graph).makespan_ns == 3 * MS + 8 * 7 * MS
    fitted = graph.info["sync"]
    mark = graph.mark()
    [said] = ask(graph, {"compress": "bf16"})
    assert said.startswith("gradients reduced in bfloat16: 7 MB become 3.5 MB")
    assert replay(graph).makespan_ns == 500_000 + 3 * MS + 4 * 7 * MS
    assert graph.info["sync"] is fitted
    graph.undo(mark)
    del graph.info["sync"]
    ask(graph, {"compress": "fp16", "bandwidth": "2x"})  # half the bytes at twice the bandwidth
    assert replay(graph).makespan_ns == 500_000 + 3 * MS + 2 * 7 * MS
    assert "sync" not in graph.info


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"scale": ["gemm"]}, "is not REGEX=FACTOR"),
        ({"precision": "fp8"}, "precision 'fp8' is not bf16 or fp16"),
        ({"precision": "bf16+gradients"}, "no float32 gradients are known"),
        ({"compress": "fp16"}, "no float32 gradients are known"),
        ({"compress": "int8"}, "there is bf16 and fp16"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_line(question: dict[str, Any], said: str) -> None:
    with pytest.raises(WhatIfError, match=said) as caught:
        ask(two_ranks(), question)
    assert "\n" not in str(caught.value)


def test_no_product_to_compute() -> None:
    with pytest.raises(WhatIfError, match="no matrix product"):
        ask(Graph(), {"precision": "bf16"})
