"""A step of a framework that runs a graph, by hand: two gradients, two responses, one executor thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dpro.cost.sync import SyncModel
from dpro.graph.assemble import assemble
from dpro.graph.dataflow import DATAFLOW
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.passes.tensor_fusion import Grouping, TensorFusion, captured
from dpro.replay.engine import replay
from dpro.trace import horovod
from dpro.trace.model import Collective, EventKind, Meta, RankTrace, Tensor, TraceBuilder

US = 1_000
BYTES = 40_000
#: Name, start, end, µs; one thread.
OPS = (
    ("A", 0, 100),
    ("gradient_tape/B", 100, 200),
    ("Allreduce0", 200, 210),
    ("gradient_tape/D", 210, 310),
    ("Allreduce1", 310, 320),
    ("u0", 430, 480),
    ("u1", 500, 530),
    ("n", 530, 540),
)
GRAPH = {
    "gradient_tape/B": ["A"],
    "identity": ["gradient_tape/B"],
    "Allreduce0": ["identity"],
    "gradient_tape/D": ["gradient_tape/B"],
    "Allreduce1": ["gradient_tape/D"],
    "u0": ["Allreduce0"],
    "cast": ["Allreduce1", "again"],
    "again": ["cast"],  # a loop among nodes that were not seen
    "u1": ["cast"],
    "n": ["u0", "u1"],
}


def trace(
    rank: int = 0,
    graph: Any = GRAPH,
    ops: tuple[tuple[str, int, int], ...] = OPS,
    used: tuple[int, int] = (430, 500),
    responses: tuple[tuple[int, int, tuple[int, ...]], ...] = ((220, 420, (0,)), (420, 500, (1,))),
) -> RankTrace:
    """One step of 600 µs; ``used`` is when the reduced gradients were, ``responses`` from when to when, of which."""
    builder = TraceBuilder(Meta(rank=rank, world_size=2, host="host", extra={DATAFLOW: graph}))

    def add(name: str, kind: EventKind, start: int, end: int, **more: int) -> None:
        builder.add(name, kind, "cpu/1", start * US, end * US, **more)

    for name, start, end in ops:
        add(name, EventKind.CPU_OP, start, end)
    for tensor, (submitted, until) in enumerate(((200, 210), (310, 320))):
        add(horovod.SUBMIT, EventKind.ANNOTATION, submitted, until, tensor=tensor)
    for tensor, (submitted, until) in enumerate(zip((210, 320), used, strict=True)):
        add(horovod.WAIT, EventKind.ANNOTATION, submitted, until, tensor=tensor)
    for sequence, (start, end, members) in enumerate(responses):
        facts = Collective("allreduce", horovod.GROUP, sequence, tensors=members)
        horovod.collective_row(builder, facts, start * US, end * US, BYTES * len(members))
    made = builder.freeze([(0, 600 * US)])
    made.tensors = [Tensor(f"p{i}", (BYTES // 4,), "float32", BYTES, i) for i in range(2)]
    return made


def graph_of(*traces: RankTrace) -> Graph:
    graph = assemble(list(traces), 0)
    assert graph.warnings == []
    return graph


@pytest.mark.parametrize("told", [GRAPH, {}, {"u0": 7, "n": [None, "u1"]}])
def test_as_captured(told: Any) -> None:
    graph = graph_of(trace(0, told), trace(1, told))
    assert captured(graph) == ((0,), (1,))
    assert replay(graph).makespan_ns == 600 * US
    kinds, resources = graph.column("kind"), graph.column("resource")
    assert {OpKind(kinds[op]) for op in graph.out_op.values()} == {OpKind.OUT}
    assert {OpKind(kinds[op]) for op in graph.in_op.values()} == {OpKind.IN}
    assert {int(resources[op]) for op in [*graph.out_op.values(), *graph.in_op.values()]} == {NO_RESOURCE}


@pytest.mark.parametrize(
    ("groups", "expected_us"),
    [
        # 0 from 210 + 20 for 50 + 40 until 320: u0 10 later, until 380; 1 from 340 to 430: u1 until 460, n until 470,
        # and 60 to the step's end
        (((0,), (1,)), 530),
        # from 340 for 50 + 80 until 470: u1 at once until 500, and u0, which comes 10 later, until 550; n 560
        (((0, 1),), 620),
    ],
)
def test_regrouped(groups: Grouping, expected_us: int) -> None:
    """What waits for gradients is not bound to the captured order of its thread."""
    graph = graph_of(trace(0), trace(1))
    graph.info["sync"] = SyncModel(latency_ns=50 * US, ns_per_byte=1.0, delay_ns=20 * US)
    TensorFusion().apply(graph, groups)
    assert replay(graph).makespan_ns == expected_us * US


def test_without_a_graph_ops_keep_their_place() -> None:
    """Nothing says that n needs the updates, so it stays behind the last."""
    graph = graph_of(trace(0, {}), trace(1, {}))
    graph.info["sync"] = SyncModel(latency_ns=50 * US, ns_per_byte=1.0, delay_ns=20 * US)
    TensorFusion().apply(graph, ((0,), (1,)))
    assert replay(graph).makespan_ns == 530 * US


def test_what_needs_no_gradient_keeps_its_order() -> None:
    """An op that is ready early and was captured late is not run early: another order is another capture."""
    early = (*OPS[:5], ("early", 320, 330), *OPS[5:])
    graph = graph_of(trace(0, GRAPH | {"early": ["A"]}, early), trace(1, GRAPH | {"early": ["A"]}, early))
    played, arrays = replay(graph), graph.arrays()
    [first, second] = [i for i, op in enumerate(arrays.ids.tolist()) if graph.name_of(op) == "early"]
    assert played.start[first] == played.start[second] == 320 * US


def test_nested_rows_count_once_and_recording_is_taken_out() -> None:
    nested = (*OPS[:1], ("inner", 20, 60), *OPS[1:])
    made = [trace(rank, GRAPH, nested) for rank in (0, 1)]
    for one in made:
        one.meta.event_overhead_ns = 5 * US
    graph = graph_of(*made)
    durations = {graph.name_of(op): int(graph.column("duration")[op]) for op in graph.arrays().ids.tolist()}
    assert "inner" not in durations
    assert durations["A"] == 95 * US


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model/conv1/Conv2D", OpKind.FORWARD),
        ("gradient_tape/model/conv1/Conv2D/Conv2DBackpropFilter", OpKind.BACKWARD),
        ("StatefulPartitionedCall/gradient_tape/model/dense/MatMul", OpKind.BACKWARD),
        ("gradients/dense/MatMul_grad", OpKind.BACKWARD),
        ("resnetv10_conv0_fwd", OpKind.FORWARD),
        ("resnetv10_conv0_fwd_backward", OpKind.BACKWARD),
        ("batch_dot0_backward_lhs", OpKind.BACKWARD),
    ],
)
def test_the_pass_is_told_by_the_name(name: str, kind: OpKind) -> None:
    """As Keras, tf.gradients and the MXNet reader write it."""
    ops = ((name, 0, 100), *OPS[1:])
    graph = graph_of(trace(0, {}, ops), trace(1, {}, ops))
    assert {OpKind(graph.column("kind")[op]) for op in graph.arrays().ids if graph.name_of(op) == name} == {kind}


def test_the_next_pass_waits_for_the_update() -> None:
    """Its first op was captured behind u0, in the time that u1 waited; without u0's gradient it can't run."""
    ops = (*OPS[:6], ("A", 480, 500), *OPS[6:])
    graph = graph_of(*(trace(rank, GRAPH | {"A": ["u0"]}, ops) for rank in (0, 1)))
    graph.info["sync"] = SyncModel(latency_ns=50 * US, ns_per_byte=1.0, delay_ns=20 * US)
    TensorFusion().apply(graph, ((0, 1),))
    played, arrays = replay(graph), graph.arrays()
    row = {graph.name_of(op): i for i, op in enumerate(arrays.ids.tolist())}  # the last of a name
    # the response ends at 470, u1 begins at once; u0, 10 later, from 500 to 550
    assert (played.start[row["u1"]], played.start[row["u0"]], played.start[row["A"]]) == (470 * US, 500 * US, 550 * US)


def test_waiting_for_its_turn_is_no_time_of_a_gradient() -> None:
    """Both come with one response until 420, u0 first. With one each, u1 need not wait for u0 as it did."""
    ops = (*OPS[:5], ("u0", 430, 480), ("u1", 480, 510), ("n", 510, 520))
    graph = graph_of(*(trace(rank, GRAPH, ops, (430, 480), ((320, 420, (0, 1)),)) for rank in (0, 1)))
    assert replay(graph).makespan_ns == 600 * US
    graph.info["sync"] = SyncModel(latency_ns=50 * US, ns_per_byte=1.0, delay_ns=20 * US)
    TensorFusion().apply(graph, ((0,), (1,)))
    # delivery takes 10. 0 from 210 + 20 until 320, u0 330 to 380; 1 from 340 until 430, u1 440 to 470; n 480; 80 more
    assert replay(graph).makespan_ns == 560 * US


def test_what_a_rank_did_before_the_others_began_belongs_to_the_step_before() -> None:
    """Rank 0 begins its second step 40 sooner than rank 1, in the midst of A."""
    made = [trace(0), trace(1, GRAPH, (("A", 40, 100), *OPS[1:]))]
    for one, begin in zip(made, (50, 90), strict=True):
        one.shift(50 * US)
        one.step_bounds = np.array([(0, begin * US), (begin * US, 650 * US)])
        one.assign_steps()
    graph = assemble(made, 1)
    assert graph.info["measured_ns"] == replay(graph).makespan_ns == 560 * US
    assert [int(graph.column("duration")[op]) for op in graph.arrays().ids if graph.name_of(op) == "A"] == [60 * US] * 2


@pytest.mark.parametrize(
    ("captured_ops", "start_us"),
    [
        # E and F ran since 0 was there, at 230: the thread goes on with what it has, also with Allreduce1, until 410
        ((("E", 310, 350), ("F", 350, 400), ("u0", 400, 450)), 410),
        # E alone may have been in the queue before it: u0 takes the thread when D is over
        ((("E", 310, 350), ("u0", 350, 400), ("F", 400, 450)), 310),
    ],
)
def test_whether_a_thread_first_goes_on_with_its_own_is_seen(
    captured_ops: tuple[tuple[str, int, int], ...], start_us: int
) -> None:
    ops = (*OPS[:4], *captured_ops, ("Allreduce1", 450, 460), *OPS[6:])
    used = next(start for name, start, _ in captured_ops if name == "u0"), 500
    told = (220, 230, (0,)), (460, 500, (1,))
    more = GRAPH | {"E": ["gradient_tape/D"], "F": ["gradient_tape/D"]}
    graph = graph_of(*(trace(rank, more, ops, used, told) for rank in (0, 1)))
    played, arrays = replay(graph), graph.arrays()
    starts = [played.start[i] for i, op in enumerate(arrays.ids.tolist()) if graph.name_of(op) == "u0"]
    assert starts == [start_us * US] * 2


def test_a_thread_that_idles_has_nothing_to_run() -> None:
    """The wire says that 0 was through at 230, during D. But u0 did not run when the thread idled, 320 to 430."""
    told = (220, 230, (0,)), (460, 500, (1,))
    graph = graph_of(*(trace(rank, GRAPH, OPS, (430, 500), told) for rank in (0, 1)))
    durations = [int(graph.column("duration")[op]) for op in graph.arrays().ids if graph.name_of(op) == "u0"]
    assert durations == [50 * US] * 2
    assert replay(graph).makespan_ns == 600 * US
