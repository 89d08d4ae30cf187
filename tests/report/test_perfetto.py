"""The Perfetto export: its format by a strict reader, its content against a step drawn by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpro.graph.assemble import assemble
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.replay.engine import replay
from dpro.replay.path import critical_path
from dpro.report import perfetto
from dpro.trace.model import EventKind, Meta, TraceBuilder
from tests.graph import ring_traces
from tests.graph.ring_traces import job
from tests.report import perfetto_check
from tests.report.hand_graph import MS, two_ranks


def export(graph: Graph, path: Path, **more: Any) -> list[dict[str, Any]]:
    result = replay(graph)
    count = perfetto.export(graph, result, path, critical=critical_path(graph, result), **more)
    events = perfetto_check.load(path)
    assert count == sum(event["ph"] != "M" for event in events)
    return events


def bars(events: list[dict[str, Any]], pid: int, thread: str) -> list[tuple[str, float, float]]:
    tid = next(
        e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == pid and e["args"]["name"] == thread
    )
    return [
        (e["name"], e["ts"] / 1e3, e["dur"] / 1e3)
        for e in events
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)
    ]


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_replayed_schedule_is_the_one_worked_out_by_hand(tmp_path: Path, name: str) -> None:
    events = export(two_ranks(), tmp_path / name)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "rank 0", 2: "rank 1"}
    assert bars(events, 1, "replayed · cpu/1") == [
        ("linear", 1, 10),
        ("LinearBackward", 11, 20),
        ("Adam", 43, 2),
    ]
    assert bars(events, 2, "replayed · cpu/1") == [
        ("linear", 1, 14),
        ("LinearBackward", 15, 20),
        ("Adam", 43, 2),
    ]
    for pid in (1, 2):  # one op of the graph, one bar in each rank that takes part
        assert bars(events, pid, "replayed · group/default") == [("all_reduce", 35, 8)]


def test_flow_runs_from_the_last_to_arrive(tmp_path: Path) -> None:
    events = export(two_ranks(), tmp_path / "out.json")
    flows = {e["ph"]: (e["pid"], e["ts"]) for e in events if e.get("cat") == "collective"}
    assert flows == {"s": (2, 35_000), "f": (1, 35_000)}  # rank 1 was late


def test_critical_path_is_marked_and_on_a_track_of_its_own(tmp_path: Path) -> None:
    events = export(two_ranks(), tmp_path / "out.json")
    path = bars(events, 2, "critical path")
    assert path[:3] == [("linear", 1, 14), ("LinearBackward", 15, 20), ("all_reduce", 35, 8)]
    marked = {(e["name"], e["pid"]) for e in events if e["ph"] == "X" and e["args"].get("critical")}
    assert {("linear", 2), ("LinearBackward", 2), ("all_reduce", 1), ("all_reduce", 2)} <= marked
    assert ("linear", 1) not in marked  # rank 0's forward had time to spare


def test_measured_events_start_near_zero_and_cross_ones_get_a_lane(tmp_path: Path) -> None:
    boot = 1_700_000_000_000_000_000
    traces = []
    for rank in range(2):
        builder = TraceBuilder(Meta(rank=rank))
        builder.add("outer", EventKind.CPU_OP, "cpu/1", boot + 5, boot + 1_005)
        builder.add("inner", EventKind.CPU_OP, "cpu/1", boot + 5, boot + 305)
        builder.add("crossing", EventKind.CPU_OP, "cpu/1", boot + 905, boot + 1_705)
        builder.add("range", EventKind.ANNOTATION, "cpu/1", boot, boot + 2_000)
        builder.add("before", EventKind.CPU_OP, "cpu/1", boot - 500, boot - 100)
        traces.append(builder.freeze([(boot, boot + 2_000)]))
    events = export(two_ranks(), tmp_path / "out.json", measured=traces)
    assert bars(events, 1, "measured · steps") == [("step 0", 0, 0.002)]
    got = bars(events, 2, "measured · cpu/1")
    assert got == [
        ("outer", pytest.approx(5e-6), pytest.approx(1e-3)),
        ("inner", pytest.approx(5e-6), pytest.approx(3e-4)),
    ]
    assert [name for name, _, _ in bars(events, 2, "measured · cpu/1 (2)")] == ["crossing"]
    names = {e["name"] for e in events}
    assert "before" not in names and "range" not in names


def test_ranks_on_clocks_of_their_own_all_start_at_zero(tmp_path: Path) -> None:
    traces = []
    for rank, origin in enumerate((0, 3_600 * 1000 * MS)):
        builder = TraceBuilder(Meta(rank=rank))
        builder.add("op", EventKind.CPU_OP, "cpu/1", origin + MS, origin + 2 * MS)
        traces.append(builder.freeze([(origin, origin + 3 * MS)]))
    events = export(two_ranks(), tmp_path / "out.json", measured=traces)
    for pid in (1, 2):
        assert bars(events, pid, "measured · cpu/1") == [("op", 1, 1)]


def test_hostile_names_and_overlap_without_a_resource(tmp_path: Path) -> None:
    graph = Graph()
    graph.ranks = 1
    name = 'evil "\x00\x1b[31m\n\ud800 </script> é'
    for gap, duration in ((0, 10), (5, 10), (0, 0), (15, 0)):
        graph.add_op(name, OpKind.LOCAL, resource=NO_RESOURCE, duration=duration, gap=gap, rank=0)
    events = export(graph, tmp_path / "out.json")
    assert {e["name"] for e in events if e["ph"] == "X" and e["cat"].startswith("replayed")} == {name}
    assert len(bars(events, 1, "replayed · other")) == 3
    assert bars(events, 1, "replayed · other (2)") == [(name, 0.000005, 0.00001)]


def test_messages_have_tracks_and_arrows(tmp_path: Path) -> None:
    traces = job(ring_traces.two_ranks(), used=[325, 318], end=400)
    events = export(assemble(traces, messages=True), tmp_path / "out.json", measured=traces)
    name = "gloo:all_reduce step"
    assert bars(events, 1, "replayed · link/0>1") == [
        (f"send {name} 0 part 0", 0.170, pytest.approx(0.050)),
        (f"send {name} 1 part 0", 0.240, pytest.approx(0.060)),
    ]
    assert [bar[:2] for bar in bars(events, 2, "replayed · received")[:2]] == [
        (f"recv {name} 0 part 0", 0.220),
        (f"recv {name} 1 part 0", 0.300),
    ]
    assert [bar[0] for bar in bars(events, 2, "measured · wire/10.0.0.1:7>10.0.0.0:9")] == ["payload"] * 2
    arrows: dict[int, dict[str, tuple[int, float]]] = {}
    for event in events:
        if event.get("cat") == "message":
            arrows.setdefault(event["id"], {})[event["ph"]] = (event["pid"], event["ts"])
    # four messages, replayed and measured (from the start of the SEND call to that of the RECV call, 2 µs long)
    assert sorted((a["s"], a["f"]) for a in arrows.values()) == sorted(
        [
            ((1, 170), (2, 220)), ((2, 165), (1, 225)), ((1, 240), (2, 300)), ((2, 230), (1, 310)),
            ((1, 170), (2, 218)), ((2, 165), (1, 223)), ((1, 240), (2, 298)), ((2, 230), (1, 308)),
        ]
    )  # fmt: skip
