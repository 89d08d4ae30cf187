"""BytePS traces: stages by hand, files as BytePS leaves them, and others; joined to a capture and alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import TraceError
from dpro.trace import byteps, store
from dpro.trace.horovod import SUBMIT, WAIT
from dpro.trace.model import EventKind, Meta, RankTrace, Tensor, TraceBuilder

#: µs since the epoch, as BytePS writes them
EPOCH = 1_574_685_000_000_000
ORDER = ("REDUCE", "COPYD2H", "PUSH", "PULL", "COPYH2D", "BROADCAST")


def event(tensor: str, tid: str, stage: str, start: int, length: int) -> dict[str, Any]:
    name = f"Comm.{tensor}" + (f".{stage}" if stage else "")
    return {
        "ph": "X", "args": {"name": f"Comm.{tensor}"}, "pid": f"Comm.{tensor}", "name": name, "ts": EPOCH + start,
        "dur": length, "tid": tid, "cat": "Comm",
    }  # fmt: skip


def partition(tensor: str, key: int, start: int) -> list[dict[str, Any]]:
    """Taken up at ``start``: 0 + 10 + 100 + 80 + 10 + 0 µs, with 2 between stages."""
    out, at = [], start
    for stage, length in zip(ORDER, (0, 10, 100, 80, 10, 0), strict=True):
        out.append(event(tensor, str(key), stage, at, length))
        at += length + 2
    return out


#: Two tensors of two and one partitions, two rounds; 210 µs from a partition's first stage to its last.
A, B = "byteps.gradient_0", "byteps.layer.weight"
ROUNDS = (1_000, 6_000)
EVENTS = [
    e
    for start in ROUNDS
    for e in (
        event(A, "total", "", start - 5, 230),
        *partition(A, 3 << 16, start),
        *partition(A, (3 << 16) + 1, start + 10),
        event(B, "total", "", start + 15, 230),
        *partition(B, 5 << 16, start + 20),
    )
]


def write(path: Path, events: list[dict[str, Any]], close: str = '\n],\n"displayTimeUnit": "ms"\n}') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{\n"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + close)
    return path


@pytest.mark.parametrize("close", ['\n],\n"displayTimeUnit": "ms"\n}', "\n]", "", ",", ",\n{"])
def test_stages_of_a_file(tmp_path: Path, close: str) -> None:
    file = write(tmp_path / "comm.json", EVENTS, close)
    assert byteps.is_comm(file)
    comm = byteps.read(file)
    assert len(comm.stages) == 2 * 3 * 6
    first = comm.stages[0]
    assert first == (A, 3 << 16, "REDUCE", (EPOCH + 1_000) * 1000, (EPOCH + 1_000) * 1000)
    push = next(stage for stage in comm.stages if stage.stage == "PUSH")
    assert (push.start, push.end) == ((EPOCH + 1_014) * 1000, (EPOCH + 1_114) * 1000)
    assert [(whole.tensor, whole.key, whole.end - whole.start) for whole in comm.totals] == [
        (A, -1, 230_000), (B, -1, 230_000), (A, -1, 230_000), (B, -1, 230_000),
    ]  # fmt: skip
    assert bool(comm.warnings) == (not close.endswith("}"))


def test_keys_of_the_upper_half_are_written_as_negative_numbers(tmp_path: Path) -> None:
    """As C++ does it: 32,770 << 16 + 1 in an ``int``."""
    key = (32_770 << 16) + 1
    comm = byteps.read(write(tmp_path / "comm.json", partition(A, key - (1 << 32), 0)))
    assert {stage.key for stage in comm.stages} == {key}
    assert comm.warnings == []


def test_what_never_ended_is_dropped_and_counted(tmp_path: Path) -> None:
    """A duration of 0 is what BytePS writes for a stage that was not over; a spare total has it as well."""
    bad = [
        event(A, "196608", "PUSH", 9_000, 0),
        event(A, "total", "", 9_000, 0),
        event(A, "196608", "SHUFFLE", 9_000, 3),
        event(A, "many", "PULL", 9_000, 3),
        event(A, "\N{SUPERSCRIPT TWO}", "PULL", 9_000, 3),  # a digit that is no number
        event(A, "196608", "PULL", 9_000, -3),
        {**event(A, "196608", "PULL", 9_000, 3), "ts": "soon"},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 1, "tid": 1},
    ]
    comm = byteps.read(write(tmp_path / "comm.json", [*EVENTS, *bad]))
    assert len(comm.stages) == 36
    assert comm.warnings == [
        "3 event(s) of no known stage dropped",
        "2 event(s) without a usable time dropped",
        "1 stage(s) without an end dropped",
        "1 tensor(s) without an end dropped",
    ]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, len('{\n"traceEvents": [\n' + ",\n".join(map(json.dumps, EVENTS))) - 1))
def test_cut_anywhere_what_is_read_is_true(tmp_path: Path, at: int) -> None:
    whole = byteps.read(write(tmp_path / "whole.json", EVENTS)).stages
    file = tmp_path / "cut.json"
    file.write_bytes((tmp_path / "whole.json").read_bytes()[:at])
    try:
        found = byteps.read(file).stages
    except TraceError as error:
        assert str(file) in str(error)
        return
    assert set(found) <= set(whole)
    byteps.read_trace(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty file"),
        ("hello", "not a JSON trace"),
        ('[{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]', "no BytePS"),
        (json.dumps([EVENTS[0]]), "no stage of a partition"),
        ('{"traceEvents": [\n\n],\n"displayTimeUnit": "ms"\n}', "no BytePS"),  # the folder was there, no tensor traced
    ],
)
def test_what_is_no_trace_of_bytepss(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "comm.json"
    file.write_text(text)
    with pytest.raises(TraceError, match=reason):
        byteps.read(file)
    assert byteps.is_comm(file) == ("Comm." in text)


# -- what BytePS makes of sizes and keys ---------------------------------------------------------


def test_a_bound_is_whole_pages_and_the_last_part_takes_the_rest() -> None:
    assert [byteps.aligned(n) for n in (1, 4096, 4097, 4_096_000)] == [4096, 4096, 8192, 4_096_000]
    assert byteps.aligned(4097, local_size=4) == 16_384
    assert byteps.cut(8_388_608, 4_096_000) == [4_096_000, 4_096_000, 196_608]
    assert byteps.cut(8_192, 4_096) == [4_096, 4_096]
    assert byteps.cut(5, 4_096) == [5]


def test_servers_by_key() -> None:
    """``((key >> 16) + key % 65536) · 9973``, and djb2 and sdbm of the key in decimal digits."""
    naive = [[byteps.server_of(tensor << 16 | part, 2, "naive") for part in range(4)] for tensor in range(2)]
    assert naive == [[0, 1, 0, 1], [1, 0, 1, 0]]
    assert [byteps.server_of(tensor << 16, 3, "naive") for tensor in range(4)] == [0, 1, 2, 0]  # 9973 = 3 · 3324 + 1
    assert byteps.server_of(7, 1_000_003, "djb2") == (5381 * 33 + ord("7")) % 1_000_003
    assert byteps.server_of(7, 1_000_003, "sdbm") == ord("7") % 1_000_003
    assert byteps.server_of(12, 97, "sdbm") == (ord("2") + ord("1") * 65_599) % 97
    assert byteps.server_of(1 << 40, 1, "built_in") == 0


def test_a_started_job_gets_the_bound_that_most_have() -> None:
    assert byteps.launch_bytes({"a": 4096, "b": 8192, "c": 8192}) == 8192
    assert byteps.launch_bytes({}) == byteps.DEFAULT_PARTITION_BYTES


@pytest.mark.parametrize(
    "told",
    [
        None, 3, [], {"servers": 0, "credit": -1, "partition_bytes": 0}, {"servers": True, "partition_bytes": "1"},
        {"partitions": 4, "declared": [1], "server_nodes": "a"},
        {"partitions": {"a": 0, "b": 1.5}, "declared": {"a": -1}},
    ],
)  # fmt: skip
def test_nonsense_in_settings_is_not_believed(told: Any) -> None:
    trace = TraceBuilder(Meta(extra={byteps.SETTINGS: told})).freeze([])
    assert byteps.settings(trace) == byteps.Settings()


def test_settings() -> None:
    told = {
        "workers": 2, "servers": 2, "partition_bytes": 1_000_000, "credit": 4, "hash_fn": "naive", "node": "10.0.0.1",
        "server_nodes": ["10.0.0.1", "10.0.0.2"], "partitions": {"w": 8192}, "declared": {"w": 3},
    }  # fmt: skip
    known = byteps.settings(TraceBuilder(Meta(extra={byteps.SETTINGS: told})).freeze([]))
    assert (known.servers, known.credit, known.hash_fn, known.server_nodes) == (2, 4, "naive", ("10.0.0.1", "10.0.0.2"))
    assert (known.bound("w"), known.bound("v")) == (8192, 1_003_520)  # 245 pages
    assert known.declared == {"w": 3}


# -- alone ---------------------------------------------------------------------------------------


def test_a_folder_of_workers(tmp_path: Path) -> None:
    """As a launcher leaves them: a folder per worker, the local rank in it."""
    for worker in (0, 1):
        write(tmp_path / f"worker{worker}" / "0" / "comm.json", EVENTS)
    traces = store.load(tmp_path)
    assert [trace.meta.rank for trace in traces] == [0, 1]
    trace = traces[0]
    assert [tensor.name for tensor in trace.tensors] == [A, B]
    begin = (EPOCH + 995) * 1000
    # a step ends where the first tensor comes again, the last one where the last tensor ends
    assert trace.step_bounds.tolist() == [[begin, begin + 5_000_000], [begin + 5_000_000, begin + 5_250_000]]
    names = [trace.names[n] for n in trace.name]
    assert {name: names.count(name) for name in names} == {
        SUBMIT: 4, WAIT: 4, byteps.COPY_OUT: 6, byteps.PUSH: 6, byteps.PULL: 6, byteps.COPY_IN: 6,
    }  # fmt: skip
    assert set(trace.kind.tolist()) == {EventKind.ANNOTATION}
    assert set(trace.nbytes.tolist()) == {-1}
    assert byteps.settings(trace).declared == {A: 3, B: 5}
    # all waits end where the last tensor of the step does
    waits = [row for row, name in enumerate(names) if name == WAIT]
    assert trace.end[waits].tolist() == [begin + 250_000] * 2 + [begin + 5_250_000] * 2
    assert any("a BytePS trace alone" in line for line in trace.warnings)


def test_one_file(tmp_path: Path) -> None:
    (trace,) = store.load(write(tmp_path / "comm.json", [e for e in EVENTS if e["tid"] != "total"]))
    # without totals a tensor lasts from its first stage to its last: 1,000 to 1,220 and 1,020 to 1,230
    names = [trace.names[n] for n in trace.name]
    handed_in = sorted(int(trace.start[row]) // 1000 - EPOCH for row, name in enumerate(names) if name == SUBMIT)
    assert handed_in == [1_000, 1_020, 6_000, 6_020]
    assert trace.step_bounds[-1, 1] // 1000 - EPOCH == 6_230


# -- joined to a capture -------------------------------------------------------------------------

#: where the epoch lies on the capture's clock, ns
ZERO = 7_000_000_000 - EPOCH * 1000


def capture(settings_: dict[str, Any] | None = None, *, late_ns: int = 0) -> RankTrace:
    """Two steps of 5 ms: gradients handed in 2 µs before they are taken up, needed 3 µs after they are there."""
    builder = TraceBuilder(Meta(extra={byteps.SETTINGS: settings_ or {"partition_bytes": 8192}}))
    bounds = []
    for start in ROUNDS:
        at = 7_000_000_000 + start * 1000 + late_ns
        bounds.append((at - 100_000, at + 4_800_000))
        for tensor, after in ((0, 0), (1, 20_000)):
            begin, over = at + after - 2_000, at + after + (222_000 if tensor == 0 else 212_000) + 3_000
            builder.add(SUBMIT, EventKind.ANNOTATION, "cpu/1", begin, begin + 500, tensor=tensor)
            builder.add(WAIT, EventKind.ANNOTATION, "cpu/1", begin + 500, over, tensor=tensor)
    trace = builder.freeze(bounds)
    trace.tensors = [
        Tensor("gradient_0", (3000,), "float32", 12_000, 0),
        Tensor("layer.weight", (9,), "float32", 36, 1),
    ]
    return trace


def rows(trace: RankTrace, name: str) -> list[tuple[int, int, int, int, int]]:
    """(tensor, partition, bytes, start, step) of the rows so called; start in µs of the first round."""
    found = [row for row in range(len(trace)) if trace.names[trace.name[row]] == name]
    keys = ("tensor", "flow", "nbytes", "start", "step")
    table = [[int(trace.columns[key][row]) for key in keys] for row in found]
    return [(t, f, n, (start - 7_000_000_000) // 1000, step) for t, f, n, start, step in table]


def test_a_capture_gets_its_stages(tmp_path: Path) -> None:
    comm = byteps.read(write(tmp_path / "comm.json", EVENTS))
    trace = byteps.with_comm(capture(), comm, ZERO)
    assert rows(trace, byteps.COPY_OUT) == [
        (0, 0, 8192, 1_002, 0), (0, 1, 3808, 1_012, 0), (1, 0, 36, 1_022, 0),
        (0, 0, 8192, 6_002, 1), (0, 1, 3808, 6_012, 1), (1, 0, 36, 6_022, 1),
    ]  # fmt: skip
    assert [row[3] for row in rows(trace, byteps.PULL)][:3] == [1_116, 1_126, 1_136]
    assert trace.warnings == []
    assert len(trace.step_bounds) == 2
    # what the keys say; the capture itself is as it was
    assert byteps.settings(trace).declared == {"gradient_0": 3, "layer.weight": 5}
    assert byteps.settings(capture()).declared == {}


def test_names_of_a_generation_and_names_that_are_told(tmp_path: Path) -> None:
    renamed = json.loads(json.dumps(EVENTS).replace(A, A + "~3"))
    comm = byteps.read(write(tmp_path / "comm.json", renamed))
    assert len(rows(byteps.with_comm(capture(), comm, ZERO), byteps.PUSH)) == 6
    told = byteps.with_comm(capture(), comm, ZERO, {B: 0})
    assert {row[:3] for row in rows(told, byteps.PUSH)} == {(0, 0, 12_000)}  # one partition of 12,000 bytes


def first_copy(trace: RankTrace) -> int:
    return rows(trace, byteps.COPY_OUT)[0][3]


def test_clocks_read_apart_are_brought_together(tmp_path: Path) -> None:
    """Nothing is copied out before it was handed in (4 µs earlier), nor needed before it was copied in (7 µs later)."""
    comm = byteps.read(write(tmp_path / "comm.json", EVENTS))
    late, early = (byteps.with_comm(capture(), comm, ZERO + off) for off in (40_000, -40_000))
    assert (first_copy(late), first_copy(early)) == (1_002 + 7, 1_002 - 4)
    assert late.warnings == early.warnings == []
    # 3 ms are not a moment between two readings
    far = byteps.with_comm(capture(), comm, ZERO + 3_000_000)
    assert first_copy(far) == 1_002 + 2_000
    assert any("was a clock set" in line for line in far.warnings)


def test_a_trace_of_other_steps_is_said_to_be_one(tmp_path: Path) -> None:
    comm = byteps.read(write(tmp_path / "comm.json", EVENTS))
    trace = byteps.with_comm(capture(), comm, ZERO + 10**12)
    assert rows(trace, byteps.PUSH) == []
    assert "no stage of BytePS's trace lies in the captured steps" in trace.warnings


def test_sizes_that_fit_no_bound_are_unknown_and_said(tmp_path: Path) -> None:
    """The trace shows two partitions where the bound makes one: the bound that makes two is taken; three fit none."""
    comm = byteps.read(write(tmp_path / "comm.json", EVENTS))
    two = byteps.with_comm(capture({"partition_bytes": 1 << 20}), comm, ZERO)
    assert {row[2] for row in rows(two, byteps.PUSH)} == {8192, 3808, 36}
    third = [e for start in ROUNDS for e in partition(A, (3 << 16) + 7, start + 30)]
    more = byteps.read(write(tmp_path / "more.json", [*EVENTS, *third]))
    lost = byteps.with_comm(capture(), more, ZERO)
    assert {row[2] for row in rows(lost, byteps.PUSH) if row[0] == 0} == {-1}
    assert "1 gradient(s) whose partitions fit no bound: their sizes are not known" in lost.warnings


def test_what_is_waited_for_by_hand() -> None:
    assert byteps.waits([], 10) == []
    assert byteps.waits([4, 4, 4, 4], 8) == [[], [], [0], [0, 1]]
    assert byteps.waits([4, 4, 4, 4], 100) == [[]] * 4
    assert byteps.waits([4, 4, 4, 4], 4) == [[], [0], [1], [2]]  # the second is through: so is the first
    assert byteps.waits([1, 1, 1, 3, 1], 3) == [[], [], [], [0, 1, 2], [3]]
    assert byteps.waits([2, 9, 2], 3) == [[], [0], [1]]  # larger than all that may go: alone


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20))
def test_no_more_is_under_way_than_may_be(sizes: list[int], most: int) -> None:
    """Whatever is through when: a piece that goes knows that what it waited for is, and what that waited for."""
    through: list[set[int]] = []
    for at, before in enumerate(byteps.waits(sizes, most)):
        assert all(earlier < at for earlier in before)
        through.append(set(before).union(*(through[earlier] for earlier in before)))
        under_way = sum(n for k, n in enumerate(sizes[: at + 1]) if k not in through[at])
        assert under_way <= most or under_way == sizes[at]
        if through[at]:  # and it waits no longer than needed
            assert through[at] == set(range(len(through[at])))
            assert under_way + sizes[max(through[at])] > most or len(through[at]) == len(through[at - 1])
