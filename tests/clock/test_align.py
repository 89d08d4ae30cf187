"""Whole alignments: truth inside the stated uncertainty, clocks told by identity, traces moved."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.traffic import EPOCH_NS, Link, clock, ring, traffic
from dpro.clock.align import Alignment, align
from dpro.clock.identity import CLOCK_ID, clock_id
from dpro.clock.line import Line
from dpro.clock.messages import match_messages
from dpro.errors import TraceError
from dpro.trace.model import Collective, EventKind, Meta, RankTrace, TraceBuilder
from dpro.trace.store import load

DLRM8 = Path(__file__).resolve().parents[3] / "shared" / "traces" / "dlrm8"
US = 1_000


def errors_ns(found: Alignment, traces: list[RankTrace], clocks: list[Line]) -> list[int]:
    """Worst error of each trace over its steps: what its clock is on that of the first, known and found."""
    first = clocks[0].inverse()
    out = []
    for k, trace in enumerate(traces):
        times = [int(trace.step_bounds.min()), int(trace.step_bounds.mean()), int(trace.step_bounds.max())]
        out.append(max(abs(found.line(k)(t) - first(clocks[k](t))) for t in times))
    return out


clocks_strategy = st.lists(
    st.builds(clock, st.integers(-(10**9), 10**9), st.floats(-50, 50)), min_size=2, max_size=5
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(
    clocks_strategy,
    st.integers(0, 1_000),
    st.floats(0.05, 1.0),
    st.lists(
        st.tuples(st.integers(1_000, 100_000), st.integers(1, 3_000_000), st.floats(0, 1)), min_size=2, max_size=2
    ),
)
def test_truth_is_inside_the_uncertainty_whatever_the_queues(
    clocks: list[Line], seed: int, seconds: float, ways: list[tuple[int, int, float]]
) -> None:
    """Each way round the ring has its own latency and queues, so that estimates are off: never by more than said."""
    links = {
        (i, (i + way) % len(clocks)): Link(i, (i + way) % len(clocks), 100.0, float(least), float(queue), queued)
        for i in range(len(clocks))
        for way, (least, queue, queued) in zip((1, -1), ways, strict=True)
    }
    traces = traffic(clocks, list(links.values()), seconds, seed)
    found = align(traces)
    assert found.warnings == []
    assert set(found.source) <= {"itself", "messages"}
    for error, sure in zip(errors_ns(found, traces, clocks), found.uncertainty_ns, strict=True):
        assert error <= sure + 5  # ns, rounded a few times
    assert found.offset_ns[0] == found.drift_ppm[0] == found.uncertainty_ns[0] == 0


@pytest.mark.parametrize("hosts", [2, 4, 16])
def test_alike_ways_leave_microseconds(hosts: int) -> None:
    clocks = [clock((-1) ** k * k * 50_000_000, (-1) ** k * 20.0 if k else 0.0) for k in range(hosts)]
    traces = traffic(clocks, ring(hosts), seconds=1.0)
    found = align(traces)
    assert max(errors_ns(found, traces, clocks)) < 5 * US  # of 20 us latency and queues of 200
    assert found.drift_ppm == pytest.approx([(c.drift - clocks[0].drift) * 1e6 for c in clocks], abs=6)


def test_one_way_does_not_pin_a_clock_and_says_so() -> None:
    clocks = [clock(0), clock(123_456_789)]
    traces = traffic(clocks, [Link(0, 1)])
    found = align(traces)
    assert found.uncertainty_ns == [0, np.inf]
    assert found.warnings == ["the clock of rank 1 is not pinned: messages in one direction only"]
    assert errors_ns(found, traces, clocks)[1] < 50 * US  # the quickest took 20, the best guess is near
    back = align(traffic(clocks, [Link(1, 0)]))
    assert back.source[1] == "bound" and back.uncertainty_ns[1] == np.inf
    assert abs(back.offset_ns[1] - 123_456_789) < 50 * US


def test_nothing_in_common() -> None:
    found = align(traffic([clock(0), clock(5_000)], []))
    assert (found.offset_ns, found.uncertainty_ns) == ([0, 0], [0, np.inf])
    assert found.warnings == ["the clock of rank 1 is not pinned: nothing in common with the first"]
    with pytest.raises(TraceError):
        align([])


# -- who has which clock -------------------------------------------------------------------------


def named(traces: list[RankTrace], *names: str, key: str = "host") -> list[RankTrace]:
    for trace, name in zip(traces, names, strict=True):
        if key == "host":
            trace.meta.host = name
        else:
            trace.meta.extra[CLOCK_ID] = name
    return traces


def test_one_clock_is_told_by_its_identity_not_by_a_name() -> None:
    clocks = [clock(0), clock(0), clock(7_000_000)]
    traces = named(traffic(clocks, ring(3)), "a", "a", "b", key="clock")
    found = align(traces)
    assert found.offset_ns[1] == 0 and found.uncertainty_ns[1] == 0 and found.source[1] == "itself"
    # containers with one name and two clocks
    traces = named(named(traffic(clocks, ring(3)), "x", "x", "x"), "a", "a", "b", key="clock")
    assert abs(align(traces).offset_ns[2] - 7_000_000) < 20 * US
    # two ranks of the other clock move together
    clocks = [clock(0), clock(7_000_000), clock(7_000_000)]
    found = align(named(traffic(clocks, ring(3)), "a", "b", "b", key="clock"))
    assert found.offset_ns[1] == found.offset_ns[2] and found.reference_ns[1] == found.reference_ns[2]


def test_a_host_name_is_believed_as_far_as_cause_and_effect_let() -> None:
    found = align(named(traffic([clock(0), clock(0)], ring(2)), "a", "a"))
    assert (found.offset_ns, found.warnings) == ([0, 0], [])
    found = align(named(traffic([clock(0), clock(7_000_000)], ring(2)), "a", "a"))
    assert abs(found.offset_ns[1] - 7_000_000) < 20 * US
    assert found.warnings == ["ranks 0 and 1 both say host a, but their clocks differ: taken for two hosts"]


def test_this_process_has_a_clock() -> None:
    assert clock_id() == clock_id()
    if Path("/proc/self/ns/time").exists():
        assert len(clock_id()) > 36  # a boot id and an inode


# -- ends of collectives -------------------------------------------------------------------------


def rank(offset: int, spans: list[tuple[int, int]], name: str = "all_reduce", number: int = 0) -> RankTrace:
    builder = TraceBuilder(Meta(rank=number))
    for start, end in spans:
        builder.add(name, EventKind.COLLECTIVE, "stream/7", start + offset, end + offset, Collective(name))
    return builder.freeze([(offset, 1_000_000 + offset)])


SPANS = [(k * 100_000, k * 100_000 + 60_000) for k in range(8)]


def test_ends_decide_where_there_are_no_messages() -> None:
    late = [
        (start + 20_000, end + wrong) for (start, end), wrong in zip(SPANS, [3, 0, -2, 5, 1, 0, -4, 1], strict=True)
    ]
    found = align([rank(0, SPANS), rank(-5_000_000, late, number=1)])
    # differences 0 - wrong: median of -3 0 2 -5 -1 0 4 -1 is -0.5
    assert abs(found.offset_ns[1] - 5_000_000) <= 1
    assert found.source == ["itself", "ends"] and found.warnings == []
    # as wrong as ends are apart (4.5), and a profiler's microsecond
    assert found.uncertainty_ns[1] == pytest.approx(1_004.5, abs=0.5)
    assert found.residual_ns[1] == pytest.approx(0.5, abs=0.5)


def test_too_few_ends_are_known_only_to_what_collectives_allow() -> None:
    found = align([rank(0, SPANS[:2]), rank(-500, SPANS[:2], number=1)])
    assert found.offset_ns[1] == 500
    # nobody leaves before all arrived: 60 us either way, and what drift adds at the ends of the window
    assert 60_000 <= found.uncertainty_ns[1] <= 62_000
    loose = align([rank(0, SPANS[:2], "broadcast"), rank(-500, SPANS[:2], "broadcast", number=1)])
    assert loose.uncertainty_ns[1] == np.inf and "too little in common" in loose.warnings[0]


def test_drift_of_ends_is_seen_where_it_is_larger_than_their_spread() -> None:
    spans = [(k * 10**8, k * 10**8 + 60_000) for k in range(30)]
    jitter = np.random.default_rng(0).integers(-2_000, 2_000, 30).tolist()
    line = Line(-5_000_000, -20e-6, 0)  # true to that rank's
    other = [(line(start), line(end) + j) for (start, end), j in zip(spans, jitter, strict=True)]
    traces = [rank(0, spans), rank(0, other, number=1)]
    for trace in traces:
        trace.step_bounds = np.array([[trace.start.min(), trace.end.max()]])
    found = align(traces)
    assert found.drift_ppm[1] == pytest.approx(20, abs=2)
    back = line.inverse()
    times = trace.step_bounds[0].tolist()
    assert max(abs(found.line(1)(t) - back(t)) for t in times) <= min(found.uncertainty_ns[1], 4_000)


@pytest.mark.skipif(not DLRM8.exists(), reason="public traces (../shared/traces/dlrm8) are not here")
def test_injected_offsets_of_a_public_trace_are_recovered() -> None:
    injected = [0, 5_000_000, -5_000_000, 500_000_000, -500_000_000, 1, -123_456, 10**12]
    traces = load(DLRM8)
    for trace, offset in zip(traces, injected, strict=True):
        trace.shift(offset)
    found = align(traces)
    for k, offset in enumerate(injected):
        assert abs(found.offset_ns[k] + offset) <= 20 * US
        assert abs(found.offset_ns[k] + offset) <= found.uncertainty_ns[k]


# -- moving traces -------------------------------------------------------------------------------


def test_applied_all_is_on_the_first_clock_and_waiting_is_not_transfer() -> None:
    stream, back = "wire/a>b", "wire/b>a"
    sender, receiver = TraceBuilder(Meta(rank=4)), TraceBuilder(Meta(rank=9))
    ahead = 1_000_000  # of the receiver's clock
    sender.add("payload", EventKind.SEND, stream, 10_000, 10_500, offset=0, nbytes=100)
    sender.add("payload", EventKind.SEND, stream, 20_000, 20_500, offset=100, nbytes=100)
    # posted at 2 us, got the first bytes at 11 and the last at 21; a collective began between
    receiver.add("payload", EventKind.RECV, stream, 2_000 + ahead, 21_000 + ahead, offset=0, nbytes=200)
    receiver.add("all_reduce", EventKind.COLLECTIVE, "x", 5_000 + ahead, 25_000 + ahead, Collective("all_reduce"))
    receiver.add("payload", EventKind.SEND, back, 22_000 + ahead, 22_500 + ahead, offset=0, nbytes=10)
    sender.add("payload", EventKind.RECV, back, 22_900, 23_000, offset=0, nbytes=10)
    traces = [sender.freeze([(0, 30_000)]), receiver.freeze([(ahead, 30_000 + ahead)])]
    before = copy.deepcopy(traces)
    found = align(traces)
    # 20,000 - 21,000 <= d + ahead <= 23,000 - 22,000
    assert found.offset_ns == [0, -ahead] and found.drift_ppm[1] == pytest.approx(0, abs=1)
    first, second = found.apply(traces)
    assert second.step_bounds.tolist() == [[0, 30_000]]
    rows = [(second.names[second.name[r]], int(second.start[r]), int(second.end[r])) for r in range(3)]
    # clipped to the first SEND, so it comes after the collective now, which kept its facts
    assert rows == [("all_reduce", 5_000, 25_000), ("payload", 10_000, 21_000), ("payload", 22_000, 22_500)]
    assert list(second.collectives) == [0]
    assert second.peer.tolist() == [-1, 4, 4] and first.peer.tolist() == [9, 9, 9]
    for trace, old in zip(traces, before, strict=True):  # the traces given are as they were
        assert all((trace.columns[key] == column).all() for key, column in old.columns.items())
        assert trace.meta == old.meta
    assert len(match_messages([first, second])) == 3
    again = align([first, second])
    assert again.offset_ns == [0, 0] and again.uncertainty_ns == [0, 0]


def test_times_since_the_epoch_lose_no_nanosecond() -> None:
    traces = traffic([clock(0), clock(-(10**18), 20.0)], ring(2))
    found = align(traces)
    moved = found.apply(traces)[1]
    at = found.line(1)
    assert moved.step_bounds.ravel().tolist() == [at(t) for t in traces[1].step_bounds.ravel().tolist()]
    assert abs(moved.step_bounds[0, 0] - EPOCH_NS) < 20 * US
