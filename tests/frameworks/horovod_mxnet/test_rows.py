"""A step of an engine by hand: two gradients, one worker, a mark on another thread before each hand-in."""

from __future__ import annotations

import json

import pytest

from dpro.trace.horovod import SUBMIT, WAIT, spans
from dpro.trace.model import EventKind, Meta, RankTrace, TraceBuilder
from dpro_integrations.mxnet_rows import Log, rows

US = 1_000
SYMBOL = json.dumps(
    {
        "nodes": [
            {"op": "null", "name": "data", "inputs": []},
            {"op": "null", "name": "a_weight", "inputs": []},
            {"op": "FullyConnected", "name": "a", "inputs": [[0, 0, 0], [1, 0, 0]]},
            {"op": "null", "name": "b_weight", "inputs": []},
            {"op": "FullyConnected", "name": "b", "inputs": [[2, 0, 0], [3, 0, 0]]},
        ]
    }
)
#: name, thread, start, end: µs
STEP = (
    ("FullyConnected", "w", 10, 20),
    ("FullyConnected", "w", 20, 30),
    ("_backward_FullyConnected", "w", 40, 60),
    ("dpro/handed/0", "p1", 61, 62),
    ("horovod_allreduce", "h", 64, 130),
    ("_backward_FullyConnected", "w", 60, 90),
    ("dpro/handed/1", "p1", 92, 93),
    ("horovod_allreduce", "h", 95, 150),
    ("dpro/reduced/0", "p3", 131, 132),
    ("dpro/reduced/1", "p3", 151, 152),
    ("DeleteVariable", "w", 91, 93),
    ("sgd_update", "w", 131, 135),
    ("sgd_update", "w", 152, 156),
    ("dpro/pace", "p2", 157, 158),
)


def raw(*steps: tuple[tuple[str, str, int, int], ...], period: int = 200) -> RankTrace:
    """The profile of ``steps``, µs ``period`` apart, with marks at their bounds."""
    builder = TraceBuilder(Meta(extra={"dataflow": {}}))
    for k, step in enumerate(steps):
        for name, thread, start, end in step:
            if name.startswith(("dpro/handed", "dpro/reduced")):
                name = f"{name[:-1]}{int(name[-1]) + 2 * k}"
            at = k * period
            builder.add(name, EventKind.CPU_OP, f"cpu/{thread}", (at + start) * US, (at + end) * US)
        over = (k + 1) * period * US
        builder.add("dpro/step", EventKind.CPU_OP, "cpu/p2", over, over + US)
    builder.warnings.append("no step marks: 1 step(s) told by the optimizer's updates")
    trace = builder.freeze([])
    trace.meta.event_overhead_ns = 0.0
    return trace


#: b's gradient is there first; updates are pushed by number.
LOG = Log(handed=[(1,), (0,)], updates=[[(0,), (1,)]])
NAMES = ["a_weight", "b_weight"]


def test_one_step() -> None:
    trace, ready = rows(raw(STEP), LOG, NAMES, ["horovod_allreduce"], SYMBOL)
    assert ready == [1, 0]
    assert trace.step_bounds.tolist() == [[0, 156 * US]]  # with the last update, not with the mark behind it
    assert trace.warnings == []
    ops = [
        (trace.names[name], int(start) // US, int(end) // US)
        for name, kind, start, end in zip(trace.name, trace.kind, trace.start, trace.end, strict=True)
        if kind == EventKind.CPU_OP
    ]
    assert ops == [
        ("a", 10, 20),
        ("b", 20, 30),
        ("b_backward", 40, 60),
        ("a_backward", 60, 90),
        ("horovod_allreduce/b_weight", 61, 64),
        ("horovod_allreduce/a_weight", 92, 95),
        ("b_weight_sgd_update", 131, 135),
        ("a_weight_sgd_update", 152, 156),
    ]
    flow = trace.meta.extra["dataflow"]
    assert flow["horovod_allreduce/a_weight"] == ["a_backward"]
    assert flow["a_weight_sgd_update"] == ["horovod_allreduce/a_weight"]
    assert flow["b"] == ["a", "b_weight", "b_weight_sgd_update"]  # of the step before
    for name, found in ((SUBMIT, {0: (92, 95), 1: (61, 64)}), (WAIT, {0: (95, 150), 1: (64, 130)})):
        told = {n: (int(s[0]) // US, int(e[0]) // US) for n, (s, e) in spans(trace, name).items()}
        assert told == found


def test_without_a_graph_the_clock_says_what_computed_a_gradient() -> None:
    trace, ready = rows(raw(STEP), LOG, NAMES, ["horovod_allreduce"], "")
    assert ready == [1, 0]
    assert trace.meta.extra["dataflow"]["horovod_allreduce/b_weight"] == ["_backward_FullyConnected"]


def test_a_group_is_one_op_and_one_update_uses_all_of_it() -> None:
    step = (
        *STEP[:3],
        STEP[5],
        ("dpro/handed/0", "p1", 92, 93),
        ("horovod_allreduce", "h", 95, 150),
        ("dpro/reduced/0", "p3", 151, 152),
        ("multi_sgd_update", "w", 152, 156),
    )
    log = Log(handed=[(0, 1)], updates=[[(0, 1)]])
    trace, _ = rows(raw(step), log, NAMES, ["horovod_allreduce"], SYMBOL)
    flow = trace.meta.extra["dataflow"]
    assert flow["horovod_allreduce/a_weight+1"] == ["b_backward", "a_backward"] or flow[
        "horovod_allreduce/a_weight+1"
    ] == ["a_backward", "b_backward"]
    assert flow["a_weight_multi_sgd_update"] == ["horovod_allreduce/a_weight+1"]
    assert {n: (int(s[0]) // US, int(e[0]) // US) for n, (s, e) in spans(trace, WAIT).items()} == {
        0: (95, 150),
        1: (95, 150),
    }


def test_loss_scaling_looks_at_all_gradients_first() -> None:
    step = (
        *STEP[:11],
        ("multi_all_finite", "w", 151, 152),
        ("sgd_update", "w", 160, 162),
        ("sgd_update", "w", 162, 164),
    )
    trace, _ = rows(raw(step), LOG, NAMES, ["horovod_allreduce"], SYMBOL)
    assert {n: int(e[0]) // US for n, (_, e) in spans(trace, WAIT).items()} == {0: 151, 1: 151}


def test_an_allreduce_of_the_jobs_own_and_an_optimizer_of_several_ops() -> None:
    """A metric is summed between; three update ops where two updates were made: told by the clock, not by name."""
    step = (
        *STEP[:11],
        ("dpro/handed/2", "p1", 96, 97),
        ("horovod_allreduce", "h", 98, 160),
        ("dpro/reduced/2", "p1", 161, 162),
        ("lamb_update_phase1", "w", 131, 133),
        ("lamb_update_phase1", "w", 152, 153),
        ("lamb_update_phase2", "w", 153, 154),
    )
    log = Log(handed=[(1,), (0,), ()], updates=LOG.updates)
    trace, _ = rows(raw(step), log, NAMES, ["horovod_allreduce"], SYMBOL)
    assert {n: int(e[0]) // US for n, (_, e) in spans(trace, WAIT).items()} == {0: 152, 1: 131}
    assert "lamb_update_phase1" in trace.names


def test_a_gradient_that_nothing_uses_has_no_wait() -> None:
    trace, _ = rows(raw(STEP[:11]), Log(handed=LOG.handed, updates=[[]]), NAMES, ["horovod_allreduce"], SYMBOL)
    assert spans(trace, WAIT) == {}


def test_several_steps() -> None:
    log = Log(handed=[(1,), (0,), (1,), (0,)], updates=[*LOG.updates, *LOG.updates])
    trace, ready = rows(raw(STEP, STEP), log, NAMES, ["horovod_allreduce"], SYMBOL)
    assert (trace.step_bounds // US).tolist() == [[0, 156], [156, 356]] and ready == [1, 0]
    assert {n: (s // US).tolist() for n, (s, _) in spans(trace, SUBMIT).items()} == {0: [92, 292], 1: [61, 261]}
    assert {n: (e // US).tolist() for n, (_, e) in spans(trace, WAIT).items()} == {0: [150, 350], 1: [130, 330]}


def test_a_forward_pass_that_begins_before_the_last_update() -> None:
    """Its op is of the next pass through the graph, and of the step in which it ran."""
    early = (*STEP[:12], ("FullyConnected", "w", 136, 140), *STEP[12:])
    late = STEP[1:]
    log = Log(handed=[(1,), (0,), (1,), (0,)], updates=[*LOG.updates, *LOG.updates])
    trace, _ = rows(raw(early, late), log, NAMES, ["horovod_allreduce"], SYMBOL)
    assert trace.warnings == []
    ran = [(trace.names[n], s) for n, s in zip(trace.name, trace.step.tolist(), strict=True) if trace.names[n] in "ab"]
    assert ran == [("a", 0), ("b", 0), ("a", 0), ("b", 1)]


def test_an_op_with_housekeeping_inside_is_on_its_thread() -> None:
    """Reader and rows together: what a thread did inside of an op does not take the op off it."""
    step = (*STEP[:5], ("_backward_FullyConnected", "w/aside0", 60, 90), ("DeleteVariable", "w", 70, 71), *STEP[6:])
    trace, _ = rows(raw(step), LOG, NAMES, ["horovod_allreduce"], SYMBOL)
    row = trace.name.tolist().index(trace.names.index("a_backward"))
    assert trace.resources[trace.resource[row]] == "cpu/w"


def test_a_profile_without_marks() -> None:
    builder = TraceBuilder(Meta(extra={"dataflow": {}}))
    builder.add("FullyConnected", EventKind.CPU_OP, "cpu/w", 0, 1)
    with pytest.raises(RuntimeError, match="no step"):
        rows(builder.freeze([]), LOG, NAMES, ["horovod_allreduce"], "")


def test_a_graph_that_is_none_costs_the_names() -> None:
    trace, _ = rows(raw(STEP), LOG, NAMES, ["horovod_allreduce"], "{")
    assert [line for line in trace.warnings if "the model's graph" in line]
    assert "FullyConnected" in trace.names
