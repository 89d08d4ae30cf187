"""TensorFlow's profiles: by hand, by TensorFlow itself (read beside its own protobuf classes), cut and broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import TraceError
from dpro.trace import xplane
from dpro.trace.model import EventKind, RankTrace
from tests.trace.engine_files import Plane, executor_step, facts, pb, real, space, varint

STEP = space(executor_step())
TWO = space(executor_step(), Plane("/host:metadata"), executor_step(2_000, step=1))


def ops(trace: RankTrace) -> list[tuple[str, str, int, int]]:
    rows = np.flatnonzero(trace.kind == EventKind.CPU_OP)
    return [
        (trace.names[trace.name[i]], trace.resources[trace.resource[i]], int(trace.start[i]), int(trace.end[i]))
        for i in rows
    ]


def whole(trace: RankTrace) -> None:
    """What every trace must be, whatever was read."""
    assert len(trace) > 0 and trace.steps > 0
    assert (trace.end >= trace.start).all() and (trace.step_bounds[:, 1] >= trace.step_bounds[:, 0]).all()
    assert trace.name.max() < len(trace.names) and trace.resource.max() < len(trace.resources)


# -- by hand -----------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    trace = xplane.read_bytes(STEP, "memory")
    assert ops(trace) == [
        ("dense/MatMul", "cpu/tf_Compute/7", 1_000_000, 1_040_000),
        ("dense/BiasAdd", "cpu/tf_Compute/7", 1_050_000, 1_100_000),
    ]
    assert trace.step_bounds.tolist() == [[1_000_000, 1_100_000]]
    assert trace.meta.extra == {"dataflow": {}, "op_types": {"dense/MatMul": "MatMul", "dense/BiasAdd": "BiasAdd"}}
    assert (trace.meta.source, trace.meta.clock, trace.meta.rank) == ("memory", "trace", -1)
    assert not trace.warnings


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("a/b_1.c-d:Conv2D", "a/b_1.c-d"),
        ("while/body/_3/x:_Arg", "while/body/_3/x"),
        ("cluster_0_1/xla_run:_XlaRun", "cluster_0_1/xla_run"),
        ("EagerLocalExecute: AddV2", None),
        ("Iterator::Root::Prefetch", None),
        ("$training.py:1742 fit", None),
        ("ExecutorState::Process", None),
        ("TFE_Py_ExecuteCancelable", None),
        ("a:lower", None),
    ],
)
def test_what_is_an_op(name: str, op: str | None) -> None:
    plane = executor_step().add("tf_Compute/7", name, 1_045_000, 1_046_000)
    found = [row[0] for row in ops(xplane.read_bytes(space(plane), "memory"))]
    assert found == ["dense/MatMul", *([op] if op else []), "dense/BiasAdd"]


def test_allocations_by_hand() -> None:
    """On the trace's clock, which a mark makes the monotonic one: 1,000 ns of the profile are 5,000 of it."""
    plane = executor_step().add("python", xplane.CLOCK_MARK, 1_000, 1_000, monotonic_ns=5_000)
    taken = {"addr": 64, "requested_bytes": 256}
    plane.add("tf_Compute/7", "MemoryAllocation", 1_010_000, 1_010_000, **taken, tf_op="dense/MatMul")
    plane.add("tf_Compute/7", "MemoryAllocation", 1_011_000, 1_011_000, addr=-1, requested_bytes=8)
    plane.add("tf_Compute/7", "MemoryAllocation", 1_012_000, 1_012_000, addr=128, requested_bytes=1 << 60)
    plane.add("python", "MemoryDeallocation", 1_060_000, 1_060_000, addr=64, requested_bytes=0)
    found: list[xplane.Allocation] = []
    trace = xplane.read_bytes(space(plane), "memory", found)
    assert found == [(1_014_000, 64, 256, "dense/MatMul"), (1_064_000, 64, 0, "")]
    assert trace.meta.clock == "monotonic" and len(ops(trace)) == 2


def test_threads_of_one_name_are_told_apart() -> None:
    plane = Plane()
    plane.add("ab", "x:Mul", 0, 10)
    first = plane.encode()
    blob = pb(1, first.replace(b"ab", b"py")) + pb(1, first.replace(b"ab", b"py").replace(pb(1, 1), pb(1, 2), 1))
    assert {row[1] for row in ops(xplane.read_bytes(blob, "memory"))} == {"cpu/py", "cpu/py/2"}


def test_steps_of_training_and_not_of_evaluation() -> None:
    plane = executor_step()
    for k in range(3):
        plane.add("python", "test", 2_000_000 + k, 2_000_001 + k, step_num=k)
    assert xplane.read_bytes(space(plane), "memory").step_bounds.tolist() == [[1_000_000, 1_100_000]]
    assert xplane.read_bytes(space(executor_step(name="my_step")), "memory").steps == 1


def test_steps_by_the_function_that_takes_most_of_the_time() -> None:
    plane = Plane()
    for begin in (1_000, 2_000, 3_000):
        plane.add("python", "train_step", begin, begin + 800, tf_function_call=-1)
        plane.add("python", "inner", begin + 100, begin + 200, tf_function_call=-1)
        plane.add("tf_Compute/1", "ExecutorPropagateOutputs", begin, begin + 1)
        plane.add("tf_Compute/1", "a:Mul", begin + 10, begin + 700)
    trace = xplane.read_bytes(space(plane), "memory")
    assert trace.step_bounds.tolist() == [[1_000, 2_000], [2_000, 3_000], [3_000, 3_800]]
    assert trace.warnings == ["no step marks: 3 step(s) told by calls of the tf.function 'train_step'"]


def test_without_any_sign_the_whole_trace_is_a_step() -> None:
    plane = Plane().add("tf_Compute/1", "a:Mul", 100, 200).add("tf_Compute/1", "ExecutorState::ScheduleReady", 100, 200)
    trace = xplane.read_bytes(space(plane), "memory")
    assert trace.step_bounds.tolist() == [[100, 200]]
    assert trace.warnings == ["no step marks: the whole trace taken as one step"]


def test_a_profile_below_level_3_says_what_is_missing() -> None:
    plane = Plane().add("python", "train", 100, 200, step_num=0).add("tf_Compute/1", "a:Mul", 100, 200)
    plane.add("tf_Compute/1", "ExecutorState::Process", 100, 200)
    trace = xplane.read_bytes(space(plane), "memory")
    assert trace.warnings == ["cheap ops are missing: profile with ProfilerOptions(host_tracer_level=3)"]


def test_clock_marks_put_times_on_the_monotonic_clock() -> None:
    plane = executor_step()
    # Ranges that began 700 and 300 ns after the clock was read: the second is nearer to the truth.
    plane.add("python", xplane.CLOCK_MARK, 900_000, 900_100, monotonic_ns=5_900_000 - 700)
    plane.add("python", xplane.CLOCK_MARK, 1_200_000, 1_200_100, monotonic_ns=6_200_000 - 300)
    trace = xplane.read_bytes(space(plane), "memory")
    assert trace.meta.clock == "monotonic"
    assert trace.step_bounds.tolist() == [[6_000_000 - 300, 6_100_000 - 300]]
    assert ops(trace)[0][2] == 6_000_000 - 300


def test_the_start_of_the_session_where_the_file_tells_it() -> None:
    began = 1_700_000_000_000_000_000
    blob = space(executor_step(), Plane("Task Environment", stats={"profile_start_time": began}))
    trace = xplane.read_bytes(blob, "memory")
    assert (trace.meta.clock, trace.step_bounds.tolist()) == ("trace", [[began + 1_000_000, began + 1_100_000]])


def test_lines_of_devices_are_counted_and_not_read() -> None:
    device = Plane("/device:GPU:0").add("Stream #13(Compute)", "volta_gemm", 10, 20).add("Stream #14", "copy", 10, 20)
    trace = xplane.read_bytes(space(device, executor_step()), "memory")
    assert len(ops(trace)) == 2
    assert trace.warnings == ["2 line(s) of devices not read: only ops on the host are"]


def test_impossible_times_are_counted_and_harmless() -> None:
    plane = executor_step()
    plane.add("tf_Compute/7", "before:Mul", -5_000, 10)
    plane.add("tf_Compute/7", "unfinished:Mul", 1_060_000, 1_059_999)
    plane.add("tf_Compute/7", "days:Mul", 1_060_000, 1_060_000 + 10**14)
    late = Plane(base_ns=1 << 62).add("tf_Compute/8", "late:Mul", 1 << 62, (1 << 62) + 5)
    trace = xplane.read_bytes(space(plane, late), "memory")
    assert "2 event(s) at an absurd time dropped" in trace.warnings
    assert "2 unfinished event(s) (negative or absurd duration) taken as 0 long" in trace.warnings
    assert [row[3] - row[2] for row in ops(trace) if row[0] in ("unfinished", "days")] == [0, 0]


# -- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rank"), [("rank3.xplane.pb", 3), ("worker-12.xplane.pb", 12), ("vm.xplane.pb", -1)])
def test_rank_from_the_file_name(tmp_path: Path, name: str, rank: int) -> None:
    (tmp_path / name).write_bytes(STEP)
    trace = xplane.read(tmp_path / name)
    assert (trace.meta.rank, trace.meta.source) == (rank, str(tmp_path / name))
    assert ops(trace) == ops(xplane.read_bytes(STEP, "memory"))


GRAPH = pb(1, pb(1, "dense/MatMul") + pb(2, "MatMul") + pb(3, "x"))
USELESS = {
    "nothing": (b"", "empty file"),
    "words": (b"this is no protobuf, not at all", "not a TensorFlow profile"),
    "a graph": (GRAPH, "not a TensorFlow profile"),
    "no plane": (pb(4, "host"), "not a TensorFlow profile"),
    "no op": (space(Plane().add("python", "fit", 1, 2)), "no op of TensorFlow's executor in it: profile with Profiler"),
    "zeros": (bytes(1000), "not a TensorFlow profile"),
}


@pytest.mark.parametrize("what", USELESS)
def test_useless_files_give_one_line(tmp_path: Path, what: str) -> None:
    content, reason = USELESS[what]
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        xplane.read(path)
    assert str(caught.value).startswith(f"{path}: {reason}") and "\n" not in str(caught.value)


def test_places_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        xplane.read(tmp_path / "none.xplane.pb")
    with pytest.raises(TraceError, match="directory"):
        xplane.read(tmp_path)


# -- cut and broken ----------------------------------------------------------------------------------


def test_a_file_cut_in_its_second_plane_keeps_the_first() -> None:
    second = TWO.index(pb(2, "tf_Compute/7"), len(STEP))
    trace = xplane.read_bytes(TWO[: second + 40], "memory")
    assert ops(trace) == ops(xplane.read_bytes(STEP, "memory"))
    assert trace.warnings[0] == f"file ends early, at byte {second + 40}: read up to there"


def test_a_file_cut_before_its_names_keeps_the_events() -> None:
    names = STEP.index(pb(4, pb(1, 1) + pb(2, pb(1, 1) + pb(2, "train"))))
    trace = xplane.read_bytes(STEP[:names], "memory")
    whole(trace)
    assert [row[2:] for row in ops(trace) if row[0] == "event 4"] == [(1_000_000, 1_040_000)]
    assert trace.warnings == [
        f"file ends early, at byte {names}: read up to there",
        "6 event(s) whose names were behind the end of the file called by number; some only wrap others",
        "no step marks: the whole trace taken as one step",
    ]


def test_a_broken_event_costs_itself_only() -> None:
    at = STEP.index(pb(1, 5) + pb(2, (1_040_000 - 500) * 1000))  # ExecutorPropagateOutputs
    broken = STEP[:at] + b"\x0f" + STEP[at + 1 :]  # wire type 7
    trace = xplane.read_bytes(broken, "memory")
    assert ops(trace) == ops(xplane.read_bytes(STEP, "memory"))
    assert f"1 corrupt message(s) read in part, the first at byte offset {at}" in trace.warnings


@settings(deadline=None)
@given(st.integers(1, len(TWO) - 1))
def test_a_file_cut_anywhere_is_read_up_to_there(size: int) -> None:
    try:
        trace = xplane.read_bytes(TWO[:size], "memory")
    except TraceError as error:
        assert size <= len(STEP) and "\n" not in str(error)
        return
    whole(trace)
    assert len(trace) >= (3 if size >= len(STEP) else 1)
    boundaries = (len(STEP), len(STEP) + len(space(Plane("/host:metadata"))))
    assert size in boundaries or any("ends early" in line for line in trace.warnings)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_broken_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    blob = bytearray(TWO)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        whole(xplane.read_bytes(bytes(blob), "memory"))
    except TraceError as error:
        assert "\n" not in str(error)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_no_profile(blob: bytes) -> None:
    try:
        whole(xplane.read_bytes(blob, "memory"))
    except TraceError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("length", [1 << 31, 1 << 62, (1 << 64) - 1])
def test_a_length_beyond_all_memory_is_an_early_end(length: int) -> None:
    blob = STEP + varint(1 << 3 | 2) + varint(length) + STEP
    trace = xplane.read_bytes(blob, "memory")
    whole(trace)
    assert any("ends early" in line for line in trace.warnings)


# -- by TensorFlow -----------------------------------------------------------------------------------


def test_a_real_profile_is_read_as_tensorflow_reads_it() -> None:
    folder = real("tensorflow", "tensorflow_job.py")
    told = facts(folder)
    trace = xplane.read(folder / "job.xplane.pb")
    assert not trace.warnings
    shift = int(trace.step_bounds[0, 0]) - told["steps"][0][0]  # the clock mark's
    assert (trace.step_bounds - shift).tolist() == told["steps"]
    expected = sorted((start, end, name) for name, _, _, start, end in told["ops"])
    assert sorted((start - shift, end - shift, name) for name, _, start, end in ops(trace)) == expected
    assert trace.meta.extra["op_types"] == {name: kind for name, kind, *_ in told["ops"]}
    assert {row[1] for row in ops(trace)} == {f"cpu/{line}" for _, _, line, *_ in told["ops"]}
    assert any("Conv2D" in kind for kind in trace.meta.extra["op_types"].values())


def test_a_real_profile_lies_between_the_clocks_that_were_read_around_it() -> None:
    folder = real("tensorflow", "tensorflow_job.py")
    before, after = facts(folder)["monotonic"]
    trace = xplane.read(folder / "job.xplane.pb")
    assert trace.meta.clock == "monotonic"
    assert before <= trace.start.min() and trace.end.max() <= after


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.floats(0, 1))
def test_a_real_profile_cut_anywhere(share: float) -> None:
    blob = (real("tensorflow", "tensorflow_job.py") / "job.xplane.pb").read_bytes()
    try:
        whole(xplane.read_bytes(blob[: int(share * len(blob))], "memory"))
    except TraceError as error:
        assert "\n" not in str(error)
