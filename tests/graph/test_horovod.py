"""A Horovod step of three gradients in two responses, by hand: as captured, regrouped, and told from the wire."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.cost.sync import SyncModel, fit_buckets
from dpro.graph.assemble import assemble
from dpro.graph.graph import Graph, OpKind
from dpro.graph.horovod import with_responses
from dpro.graph.threads import ACCUMULATE
from dpro.passes.tensor_fusion import Grouping, TensorFusion, captured
from dpro.replay.engine import replay
from dpro.trace import horovod, horovod_wire
from dpro.trace.model import Collective, EventKind, Meta, RankTrace, Tensor, TraceBuilder

US = 1_000
BYTES = 40_000
#: Responses of the step: members, start, end, µs.
RESPONSES = (((0, 1), 310, 600), ((2,), 610, 800))


def trace(
    rank: int = 0,
    *,
    later: int = 0,
    responses: bool = True,
    clock: int = 0,
    sizes: tuple[int, ...] = (),
    told: tuple[tuple[tuple[int, ...], int, int], ...] = RESPONSES,
) -> RankTrace:
    """One step of 1,000 µs. Backward ends at 400; rank 1 hands the second gradient in at ``300 + later``.

    ``clock``: µs added to every time, another host's clock.
    """
    builder = TraceBuilder(Meta(rank=rank, world_size=2, host=f"host{clock}"))

    def add(name: str, kind: EventKind, start: int, end: int, resource: str = "cpu/1", **more: int) -> None:
        builder.add(name, kind, resource, (start + clock) * US, (end + clock) * US, **more)

    add("ProfilerStep#0", EventKind.ANNOTATION, 0, 1000)
    add("aten::mm", EventKind.CPU_OP, 0, 100)
    for tensor, (start, end) in enumerate(((100, 200), (200, 300 + later), (300 + later, 400))):
        add(ACCUMULATE, EventKind.CPU_OP, start, end)
        add(horovod.SUBMIT, EventKind.ANNOTATION, end - 10, end - 5, tensor=tensor)
    for tensor, (start, end) in enumerate(((400, 600), (600, 600), (600, 800))):
        add(horovod.WAIT, EventKind.ANNOTATION, start, end, tensor=tensor)
    add("aten::add_", EventKind.CPU_OP, 800, 900)
    for sequence, (members, start, end) in enumerate(told if responses else ()):
        facts = Collective("allreduce", horovod.GROUP, sequence, tensors=members)
        spans = (start + clock) * US, (end + clock) * US
        horovod.collective_row(builder, facts, *spans, BYTES * len(members))
    made = builder.freeze([(clock * US, (clock + 1000) * US)])
    made.tensors = [Tensor(f"p{i}", (n // 4,), "float32", n, i) for i, n in enumerate(sizes or (BYTES,) * 3)]
    return made


def graph_of(*traces: RankTrace) -> Graph:
    graph = assemble(list(traces), 0)
    assert graph.warnings == []
    return graph


def test_as_captured() -> None:
    graph = graph_of(trace(0), trace(1, later=6))
    assert captured(graph) == ((0, 1), (2,))
    # handed in on the last rank at 306, negotiated until 310; the second finds the channel busy until 600
    [(one,), (two,)] = [bucket.ops for bucket in graph.buckets]
    assert (graph.column("gap")[one], graph.column("duration")[one]) == (4 * US, 290 * US)
    assert (graph.column("gap")[two], graph.column("duration")[two]) == (0, 200 * US)
    assert [bucket.nbytes for bucket in graph.buckets] == [2 * BYTES, BYTES]
    assert replay(graph).makespan_ns == graph.info["measured_ns"] == 1000 * US
    kinds = graph.column("kind")
    assert {OpKind(kinds[op]) for op in graph.out_op.values()} == {OpKind.OUT}
    assert {OpKind(kinds[op]) for op in graph.in_op.values()} == {OpKind.IN}
    assert len(graph.out_op) == len(graph.in_op) == 6


@pytest.mark.parametrize(
    ("groups", "expected_us"),
    [
        # ready at 400, negotiated for 20, 50 + 120 on the wire: 590, then 100 of optimizer and 100 of silence
        (((0, 1, 2),), 790),
        # (0, 1) from 306 + 20 for 50 + 80 until 456; (2), listed first, is complete at 400 and goes after: 546
        (((2,), (0, 1)), 746),
        # alone: 0 from 220 to 310; 1 from 326 to 416; 2 from 420 (negotiated, the channel being idle) to 510
        (((0,), (1,), (2,)), 710),
    ],
)
def test_regrouped(groups: Grouping, expected_us: int) -> None:
    graph = graph_of(trace(0), trace(1, later=6))
    graph.info["sync"] = SyncModel(latency_ns=50 * US, ns_per_byte=1.0, delay_ns=20 * US)
    TensorFusion().apply(graph, groups)
    assert replay(graph).makespan_ns == expected_us * US


def test_cost_is_told_from_negotiation() -> None:
    model = fit_buckets([graph_of(trace(0), trace(1, later=6))])
    assert model.delay_ns == 4 * US
    # one busy stretch of two buckets: 120,000 bytes in 490 µs, the mean of which is one point
    assert model.time_ns(60_000) == 245 * US


def test_what_was_long_in_coming_is_not_overtaken() -> None:
    """Handed in at 200, agreed on at 450; the other two, complete at 400, go after it all the same."""
    late = ((0,), 450, 600), ((1, 2), 610, 800)
    graph = graph_of(trace(0, told=late), trace(1, told=late))
    assert replay(graph).makespan_ns == 1000 * US


def test_the_other_rank_is_told() -> None:
    """By the ends of its waits, 5 ms of clock apart."""
    first, second = with_responses([trace(0), trace(1, responses=False, clock=5_000)])
    rows = sorted(second.collectives)
    assert [second.collectives[row].tensors for row in rows] == [(0, 1), (2,)]
    assert second.start[rows].tolist() == [5_310 * US, 5_610 * US]
    assert second.end[rows].tolist() == [5_600 * US, 5_800 * US]
    assert len(first.collectives) == 2
    graph = graph_of(first, second)
    assert replay(graph).makespan_ns == 1000 * US


def test_tensors_are_told_by_name() -> None:
    """A rank that counts its gradients otherwise."""
    other = trace(1, responses=False)
    other.tensors = [other.tensors[2], other.tensors[0], other.tensors[1]]
    other.columns["tensor"] = np.where(other.tensor >= 0, (other.tensor + 1) % 3, -1).astype(np.int32)
    _, told = with_responses([trace(0), other])
    assert [told.collectives[row].tensors for row in sorted(told.collectives)] == [(1, 2), (0,)]


def on_the_wire(made: RankTrace, *runs: tuple[int, int, int], ask_at: tuple[int, ...], bit_bytes: int = 8) -> RankTrace:
    """Rows of a socket: runs (bytes, first sent, last received) and, each before one of them, an exchange of bits."""
    builder = TraceBuilder(made.meta)

    def add(kind: EventKind, start: int, end: int, nbytes: int) -> None:
        builder.add(
            "payload", kind, "wire/a>b" if kind == EventKind.SEND else "wire/b>a", start * US, end * US, nbytes=nbytes
        )

    for at in ask_at:
        add(EventKind.SEND, at, at + 1, 48 + bit_bytes)
        add(EventKind.RECV, at + 2, at + 3, bit_bytes)
    for nbytes, start, end in runs:
        add(EventKind.SEND, start, start + 5, 48 + nbytes)
        add(EventKind.RECV, start + 2, start + 8, nbytes // 2)
        add(EventKind.RECV, start + 9, end, nbytes - nbytes // 2)
    return made.joined(builder.freeze([]))


# one word of bits, or five: the job has metrics, or had other groups, and all are in Horovod's cache
@pytest.mark.parametrize("bit_bytes", [8, 40])
def test_told_from_the_wire(bit_bytes: int) -> None:
    asks = (100, 200, 305, 600, 801)
    runs = (2 * BYTES, 312, 580), (BYTES, 612, 790)
    seen = on_the_wire(trace(responses=False), *runs, ask_at=asks, bit_bytes=bit_bytes)
    found = horovod_wire.with_responses(seen, 2)
    rows = sorted(found.collectives)
    assert [found.collectives[row].tensors for row in rows] == [(0, 1), (2,)]
    assert found.nbytes[rows].tolist() == [2 * BYTES, BYTES]
    # from the answer to the exchange before; the thread slept until the next one, so the last byte is the end
    assert found.start[rows].tolist() == [308 * US, 603 * US]
    assert found.end[rows].tolist() == [580 * US, 790 * US]
    assert found.warnings == []


def test_one_handed_in_later_elsewhere_stays_behind() -> None:
    sizes = (40_000, 64_000, 100_000)
    seen = on_the_wire(
        trace(responses=False, sizes=sizes), (164_000, 412, 580), (40_000, 612, 790), ask_at=(405, 600, 801)
    )
    found = horovod_wire.with_responses(seen, 2)
    assert [found.collectives[row].tensors for row in sorted(found.collectives)] == [(1, 2), (0,)]


def another_order(made: RankTrace) -> RankTrace:
    """Hands in 1, 2, 0."""
    made.columns["tensor"] = np.where(made.tensor >= 0, (made.tensor + 1) % 3, -1).astype(np.int32)
    return made


def test_what_all_ranks_have_handed_in_goes() -> None:
    """By 300 that is gradient 1, which its bytes do not say: rank 0 had handed in 0 before, rank 1 will last."""
    runs, asks = ((BYTES, 312, 380), (2 * BYTES, 412, 500)), (100, 305, 405, 801)
    one = on_the_wire(trace(0, responses=False), *runs, ask_at=asks)
    other = another_order(trace(1, responses=False))
    other = on_the_wire(other, *((n, start + 3, end + 5) for n, start, end in runs), ask_at=asks)
    told = with_responses([one, other])
    for made in told:
        assert [set(made.collectives[row].tensors) for row in sorted(made.collectives)] == [{1}, {0, 2}]
        assert made.warnings == []
    ends = [made.end[sorted(made.collectives)] for made in told]
    assert (ends[1] - ends[0]).tolist() == [5 * US] * 2


def test_a_rank_that_saw_fewer_responses_is_told() -> None:
    """An exchange of rank 1's looks like payload: to it, all went at once."""
    one = on_the_wire(trace(0, responses=False), (BYTES, 312, 380), (2 * BYTES, 412, 500), ask_at=(100, 305, 405, 801))
    other = another_order(trace(1, responses=False, clock=0))
    other = on_the_wire(other, (3 * BYTES, 412, 500), ask_at=(100, 305, 801))
    for made in with_responses([one, other]):
        assert [made.collectives[row].tensors for row in sorted(made.collectives)] == [(0,), (1, 2)]


def test_a_cut_exchange_in_the_middle_of_a_response() -> None:
    """The last bytes of a frame may look like an exchange of bits: the two halves are one response."""
    seen = on_the_wire(
        trace(responses=False), (BYTES, 312, 400), (BYTES, 412, 580), (BYTES, 612, 790), ask_at=(305, 405, 600, 801)
    )
    two = horovod_wire.with_responses(seen, 2)
    assert [two.collectives[row].tensors for row in sorted(two.collectives)] == [(0,), (1,), (2,)]
    sizes = (30_000, 50_000, 40_000)  # 40,000 are neither of the first two
    seen.tensors = [Tensor(f"p{i}", (n // 4,), "float32", n, i) for i, n in enumerate(sizes)]
    one = horovod_wire.with_responses(seen, 2)
    assert [one.collectives[row].tensors for row in sorted(one.collectives)] == [(0, 1), (2,)]


def test_dtypes_do_not_go_together() -> None:
    made = trace(responses=False)
    made.tensors[1].dtype = "float16"
    seen = on_the_wire(made, (2 * BYTES, 312, 580), (BYTES, 612, 790), ask_at=(305, 600, 801))
    found = horovod_wire.with_responses(seen, 2)
    rows = sorted(found.collectives)
    assert [(found.collectives[row].tensors, found.collectives[row].dtype) for row in rows] == [
        ((0,), "float32"), ((1,), "float16"), ((2,), "float32"),
    ]  # fmt: skip
    assert found.end[rows[0]] == found.start[rows[1]] == (308 + (580 - 308) // 2) * US


def test_bytes_that_fit_nothing_are_said() -> None:
    seen = on_the_wire(trace(responses=False), (7_000, 312, 580), ask_at=(305, 600))
    found = horovod_wire.with_responses(seen, 2)
    assert found.collectives == {}
    assert any("could not be told" in line for line in found.warnings)
