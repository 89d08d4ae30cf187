"""Horovod timelines: responses by hand, files as Horovod leaves them, and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import TraceError
from dpro.trace import horovod, store
from dpro.trace.model import EventKind, Meta, Tensor, TraceBuilder

HEAD = {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1_000_000}}


def name(pid: int, tensor: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": tensor}}


def begin(pid: int, phase: str, ts: int) -> dict[str, Any]:
    return {"ph": "B", "name": phase, "ts": ts, "pid": pid}


def end(pid: int, ts: int, dtype: str = "", shape: str = "") -> dict[str, Any]:
    args = {"args": {"dtype": dtype, "shape": shape}} if dtype else {}
    return {"ph": "E", "ts": ts, "pid": pid, **args}


def tick(pid: int, rank: int, ts: int) -> dict[str, Any]:
    return {"ph": "X", "name": str(rank), "ts": ts, "pid": pid, "dur": 0}


#: a and b go together, c follows; then a and b again, without a negotiation (cached), then c, which is cut off.
EVENTS = [
    HEAD, name(1, "allreduce.a"), begin(1, "NEGOTIATE_ALLREDUCE", 10), tick(1, 0, 10),
    name(2, "allreduce.b"), begin(2, "NEGOTIATE_ALLREDUCE", 12), tick(2, 0, 12),
    tick(1, 1, 25), end(1, 25), tick(2, 1, 30), end(2, 30),
    begin(1, "ALLREDUCE", 40), begin(2, "ALLREDUCE", 41),
    begin(1, "MEMCPY_IN_FUSION_BUFFER", 42), begin(2, "MEMCPY_IN_FUSION_BUFFER", 42), end(1, 45), end(2, 46),
    begin(1, "GLOO_ALLREDUCE", 47), begin(2, "GLOO_ALLREDUCE", 47), end(1, 90), end(2, 90),
    end(1, 95, "float32", "[2, 3]"), end(2, 96, "float32", "[4]"),
    name(3, "allreduce.c"), begin(3, "ALLREDUCE", 96), begin(3, "GLOO_ALLREDUCE", 97), end(3, 110),
    end(3, 112, "float16", "[5]"),
    begin(1, "ALLREDUCE", 200), begin(2, "ALLREDUCE", 200), begin(1, "GLOO_ALLREDUCE", 201),
    begin(2, "GLOO_ALLREDUCE", 201), end(1, 250), end(2, 250),
    end(1, 251, "float32", "[2, 3]"), end(2, 252, "float32", "[4]"),
    begin(3, "ALLREDUCE", 260), begin(3, "GLOO_ALLREDUCE", 261),
]  # fmt: skip


def write(path: Path, events: list[dict[str, Any]], close: str = "") -> Path:
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + close)
    return path


@pytest.mark.parametrize("close", ["", "]", ",", ",\n\n"])
def test_responses_of_an_unclosed_timeline(tmp_path: Path, close: str) -> None:
    timeline = horovod.read(write(tmp_path / "timeline.json", EVENTS, close))
    assert timeline.epoch_ns == 1_000_000_000
    first, second, third = timeline.responses
    assert (first.sequence, first.operation, first.tensors) == (0, "allreduce", ("allreduce.a", "allreduce.b"))
    assert (first.start, first.end) == (40_000, 96_000)
    assert (first.nbytes, first.dtype) == (4 * 6 + 4 * 4, "float32")
    assert first.negotiated == (10_000, 30_000)
    assert first.ready == {0: 12_000, 1: 30_000}
    assert first.activities == {"MEMCPY_IN_FUSION_BUFFER": (42_000, 46_000), "GLOO_ALLREDUCE": (47_000, 90_000)}
    # begins in the very microsecond in which the one before ends, and is another one all the same
    assert (second.tensors, second.start, second.end, second.nbytes) == (("allreduce.c",), 96_000, 112_000, 10)
    assert (third.tensors, third.start, third.end) == (("allreduce.a", "allreduce.b"), 200_000, 252_000)
    assert (third.negotiated, third.ready) == (None, {})
    assert "1 response(s) without an end dropped" in timeline.warnings


def test_a_timeline_that_was_started_in_mid_response(tmp_path: Path) -> None:
    timeline = horovod.read(write(tmp_path / "t.json", [HEAD, *EVENTS[15:]]))
    assert next(r.tensors for r in timeline.responses) == ("allreduce.c",)
    assert any("without a beginning" in line for line in timeline.warnings)


def test_a_tick_of_no_rank_is_passed_over(tmp_path: Path) -> None:
    odd = {**tick(1, 0, 11), "name": "\N{SUPERSCRIPT TWO}"}  # a digit that is no number
    assert horovod.read(write(tmp_path / "t.json", [*EVENTS[:4], odd, *EVENTS[4:]])).responses[0].ready == {
        0: 12_000,
        1: 30_000,
    }


def test_a_lost_end_costs_one_response(tmp_path: Path) -> None:
    lost = [e for e in EVENTS if e != end(2, 96, "float32", "[4]")]
    timeline = horovod.read(write(tmp_path / "t.json", lost))
    assert [r.tensors for r in timeline.responses] == [("allreduce.c",), ("allreduce.a", "allreduce.b")]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(0, len("[\n" + ",\n".join(map(json.dumps, EVENTS))) - 1))
def test_cut_anywhere_what_is_read_is_true(tmp_path: Path, cut: int) -> None:
    whole = horovod.read(write(tmp_path / "whole.json", EVENTS)).responses
    file = tmp_path / "cut.json"
    file.write_bytes((tmp_path / "whole.json").read_bytes()[:cut])
    try:
        found = horovod.read(file).responses
    except TraceError as error:
        assert str(file) in str(error)
        return
    assert found == whole[: len(found)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty file"),
        ("hello", "not a JSON trace"),
        ('[{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]', "no Horovod"),
        (json.dumps([HEAD]), "no tensor's reduction in it"),
    ],
)
def test_what_is_no_timeline(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(TraceError, match=reason):
        horovod.read(file)


def test_store_reads_a_bare_timeline(tmp_path: Path) -> None:
    (trace,) = store.load(write(tmp_path / "timeline.json", EVENTS))
    assert [t.name for t in trace.tensors] == ["allreduce.a", "allreduce.b", "allreduce.c"]
    assert [(f.sequence, f.tensors) for _, f in sorted(trace.collectives.items())] == [
        (0, (0, 1)),
        (1, (2,)),
        (2, (0, 1)),
    ]
    assert trace.step_bounds.tolist() == [[40_000, 200_000], [200_000, 252_000]]
    assert set(trace.kind.tolist()) == {EventKind.COLLECTIVE}


@pytest.mark.parametrize(
    ("given_name", "plain"),
    [
        ("allreduce.layer.weight", ("layer.weight", 0, 0)),
        ("grouped_allreduce.layer.weight_2of3", ("layer.weight", 2, 3)),
        ("allreduce.layer_1of2", ("layer_1of2", 0, 0)),
    ],
)
def test_names(given_name: str, plain: tuple[str, int, int]) -> None:
    assert horovod.plain_names(given_name) == plain


def test_a_timeline_finds_its_place_on_the_traces_clock(tmp_path: Path) -> None:
    """Told a place 1 ms too late, it comes back to where no gradient is had before it was reduced."""
    builder = TraceBuilder(Meta())
    zero = 5_000_000_000
    for tensor, handed in ((0, 30), (1, 35), (2, 50)):
        builder.add(
            horovod.SUBMIT, EventKind.ANNOTATION, "cpu/1", zero + handed * 1000, zero + handed * 1000, tensor=tensor
        )
    for tensor, had in ((0, 96), (1, 97), (2, 113)):
        builder.add(horovod.WAIT, EventKind.ANNOTATION, "cpu/1", zero + 60_000, zero + had * 1000, tensor=tensor)
    trace = builder.freeze([(zero, zero + 150_000)])
    trace.tensors = [Tensor(n, (1,), "float32", 4) for n in "abc"]
    timeline = horovod.read(write(tmp_path / "t.json", EVENTS[: EVENTS.index(begin(1, "ALLREDUCE", 200))]))
    placed = horovod.with_timeline(trace, timeline, zero + 1_000_000, {})
    rows = sorted(placed.collectives)
    assert placed.start[rows].tolist() == [zero + 40_000, zero + 96_000]
    assert [placed.collectives[row].tensors for row in rows] == [(0, 1), (2,)]
    assert np.all(np.diff(placed.start) >= 0)
    assert placed.resources[placed.resource[rows[0]]] == horovod.BACKGROUND
