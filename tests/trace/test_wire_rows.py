"""Socket calls as rows of a trace, and what a job is left with where there are none."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from dpro.trace import wire
from dpro.trace.model import COLUMNS, Collective, EventKind, Meta, RankTrace, TraceBuilder
from tests.trace import wire_library
from tests.trace.wire_ends import buffer, connected, stream_name


@pytest.mark.skipif(bool(wire.supported()), reason=wire.supported() or "-")
def test_rows_are_merged_into_a_trace(tmp_path: Path) -> None:
    library, ends = wire_library.build(tmp_path, "relro", "libwirerows.so"), connected()
    frame = np.array([148, 1, 5, 0, 100, 0], dtype=np.uint64).tobytes() + bytes(100)
    with wire.capture(["libwirerows.so"]) as seen:
        library.x_write(ends[0].fileno(), ctypes.create_string_buffer(frame), 148)
        library.x_read(ends[1].fileno(), buffer(48), 48)
        library.x_read(ends[1].fileno(), buffer(100), 100)
        library.x_write(ends[1].fileno(), buffer(99), 99)
    start, end = seen.events.start, seen.events.end
    builder = TraceBuilder(Meta(rank=0))
    builder.add("late", EventKind.COLLECTIVE, "thread/1", int(end[3]), int(end[3]) + 5, Collective("all_reduce"))
    builder.add("early", EventKind.CPU_OP, "thread/1", int(start[0]) - 10, int(start[0]) - 5)
    trace = builder.freeze([(int(start[0]) - 20, int(start[1]))])
    merged = wire.append(trace, seen.events)
    assert [merged.names[k] for k in merged.name] == ["early", "payload", "control", "payload", "message", "late"]
    assert merged.kind.tolist() == [0, 7, 8, 8, 7, 4]
    there, back = stream_name(ends[0]), stream_name(ends[1])
    assert [merged.resources[k] for k in merged.resource] == ["thread/1", there, there, there, back, "thread/1"]
    assert merged.flow.tolist() == [-1, 5, 5, 5, -1, -1]
    assert merged.offset.tolist() == [-1, 0, 0, 48, 0, -1]
    assert merged.nbytes.tolist() == [-1, 148, 48, 100, 99, -1]
    assert merged.step.tolist() == [0, 0, -1, -1, -1, -1]
    assert merged.collectives == {5: Collective("all_reduce")}
    assert {key: column.dtype.str[1:] for key, column in merged.columns.items()} == COLUMNS
    assert len(trace) == 2 and trace.resources == ["thread/1"]
    for end in ends:
        end.close()


def test_a_tap_that_fails_costs_the_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning that says why, and the trace as it was."""

    def broken(_: object) -> int:
        raise OSError("no such thing")

    builder = TraceBuilder(Meta(rank=0))
    builder.add("op", EventKind.CPU_OP, "thread/1", 0, 5)
    trace = builder.freeze([])
    monkeypatch.setattr("dpro._native.wire_unsupported", lambda: "")
    monkeypatch.setattr("dpro._native.wire_attach", broken)
    tap = wire.Tap()
    tap.stop()
    tap.stop()
    assert tap.add_to(trace) is trace
    assert trace.warnings == ["messages on the wire not recorded: OSError: no such thing"]
    assert len(trace) == 1


def test_a_tap_whose_ring_ran_over_adds_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpro._native.wire_unsupported", lambda: "")
    monkeypatch.setattr("dpro._native.wire_attach", lambda _: 9)
    monkeypatch.setattr("dpro._native.wire_detach", lambda: {**wire._NOTHING, "dropped": 3})
    tap = wire.Tap()
    tap.stop()
    trace = tap.add_to(TraceBuilder(Meta(rank=0)).freeze([]))
    assert trace.warnings == ["messages on the wire not recorded: 3 more than there is room for"]


def test_a_platform_that_cannot_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpro._native.wire_unsupported", lambda: "not here")
    with wire.capture() as seen:
        pass
    assert (wire.supported(), seen.why, len(seen.events)) == ("not here", "not here", 0)


def test_no_rows_to_merge(tmp_path: Path) -> None:
    builder = TraceBuilder(Meta(rank=0))
    builder.add("op", EventKind.CPU_OP, "thread/1", 0, 5)
    merged = wire.append(builder.freeze([]), wire.Seen().events)
    merged.save(tmp_path / "trace.npz")
    assert len(RankTrace.load(tmp_path / "trace.npz")) == 1
