"""All traces on the clock of the first: offset, drift and uncertainty per trace, and the traces moved.

Clocks are told by identity (:mod:`dpro.clock.identity`; the host's name where an older or foreign capture has
none): traces of one clock have offset 0 to each other, exactly. Clocks are compared in pairs, by messages where
two hosts sent to each other in both directions (or to a parameter server), else by collectives; then all pairs are
reconciled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro.clock.identity import CLOCK_ID
from dpro.clock.line import Line
from dpro.clock.match import match_collectives
from dpro.clock.messages import Messages, match_messages
from dpro.clock.pairs import Evidence, Pair, Window, add_ends, estimate, from_messages
from dpro.clock.reconcile import reconcile
from dpro.clock.relay import relayed
from dpro.errors import TraceError
from dpro.trace.model import RankTrace

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Alignment:
    """Per trace, relative to the first: ``t`` becomes ``t + offset_ns + drift · (t - reference_ns)``."""

    offset_ns: list[int]
    drift_ppm: list[float]
    reference_ns: list[int]
    #: the aligned times are wrong by no more than this anywhere in the capture; inf: nothing pins this clock
    uncertainty_ns: list[float]
    #: median distance of this trace's ends of collectives from the median end of all who took part; nan: none
    residual_ns: list[float]
    #: what each was aligned by: "itself" (the first's clock), "messages", "ends", "bound" or "nothing"
    source: list[str]
    messages: Messages
    warnings: list[str]

    def line(self, index: int) -> Line:
        return Line(self.offset_ns[index], self.drift_ppm[index] / 1e6, self.reference_ns[index])

    def apply(self, traces: Sequence[RankTrace]) -> list[RankTrace]:
        """The same traces on the first one's clock, as new objects (columns that don't change are shared).

        A RECV that was posted before its SEND began starts with that SEND: what lies before is waiting, not
        transfer. The ``peer`` of every message that was matched is the rank at its other end. Rows are sorted
        again, so rows of ``messages`` don't apply any more: match again where they are needed.
        """
        moved = [self._moved(trace, index) for index, trace in enumerate(traces)]
        _know_peers(moved, self.messages)
        _clip_receives(moved, self.messages)
        for trace in moved:
            trace.sort()
        return moved

    def _moved(self, trace: RankTrace, index: int) -> RankTrace:
        line, columns = self.line(index), dict(trace.columns)
        columns.update({key: line.apply(trace.columns[key]) for key in ("start", "end")})
        columns["peer"] = trace.columns["peer"].copy()
        return replace(
            trace,
            meta=replace(trace.meta, extra={**trace.meta.extra, CLOCK_ID: "aligned"}),
            columns=columns,
            step_bounds=line.apply(trace.step_bounds),
        )


def align(traces: Sequence[RankTrace]) -> Alignment:
    """Find every trace's offset and drift to the first one's clock; what is strange in them ends in ``warnings``.

    Raises:
        TraceError: there are no traces.
    """
    if not traces:
        raise TraceError("traces", "none given")
    messages, shared = match_messages(traces), match_collectives(traces)
    clock_of, warnings = _clocks(traces, messages, shared)
    count = max(clock_of) + 1
    windows = [_window([t for t, c in zip(traces, clock_of, strict=True) if c == k]) for k in range(count)]
    pairs = _pairs(traces, messages, shared, clock_of, windows)
    clocks = reconcile(pairs, windows)
    sources = ["itself", *("nothing" for _ in range(count - 1))]
    for pair in pairs:
        for k in (pair.first, pair.second):
            sources[k] = sources[k] if sources[k] in ("itself", "messages") else pair.source
        if pair.slack_ns > 1_000:
            who = " and ".join(_who(traces, clock_of, k) for k in (pair.first, pair.second))
            warnings.append(f"{who} contradict each other by {pair.slack_ns / 1e3:.1f} us: a clock was set meanwhile?")
    for k in range(count):
        if not np.isfinite(clocks.uncertainty_ns[k]):
            why = {"nothing": "nothing in common with the first", "bound": "messages in one direction only"}
            reason = why.get(sources[k], "too little in common with the first")
            warnings.append(f"the clock of {_who(traces, clock_of, k)} is not pinned: {reason}")
    lines = [clocks.lines[k] for k in clock_of]
    return Alignment(
        offset_ns=[line.offset_ns for line in lines],
        drift_ppm=[line.drift * 1e6 for line in lines],
        reference_ns=[line.reference_ns for line in lines],
        uncertainty_ns=[float(clocks.uncertainty_ns[k]) for k in clock_of],
        residual_ns=_residuals(traces, shared, lines),
        source=[sources[k] for k in clock_of],
        messages=messages,
        warnings=warnings + clocks.warnings,
    )


# -- which clocks there are --------------------------------------------------------------------


def _clocks(traces: Sequence[RankTrace], messages: Messages, shared: Rows) -> tuple[list[int], list[str]]:
    """The clock of every trace, numbered in order of appearance, and remarks."""
    keys: list[tuple[str, str]] = []
    warnings: list[str] = []
    named: dict[str, int] = {}  # host name -> its first trace
    for index, trace in enumerate(traces):
        told, host = trace.meta.extra.get(CLOCK_ID), trace.meta.host
        key = ("trace", str(index))
        if isinstance(told, str) and told:
            key = ("clock", told)
        elif host:
            key = ("host", host)
            if named.setdefault(host, index) != index and not _may_be_one(traces, messages, shared, named[host], index):
                warnings.append(
                    f"ranks {traces[named[host]].meta.rank} and {trace.meta.rank} both say host {host}, "
                    "but their clocks differ: taken for two hosts"
                )
                key = ("trace", str(index))
        keys.append(key)
    number: dict[tuple[str, str], int] = {}
    return [number.setdefault(key, len(number)) for key in keys], warnings


def _may_be_one(traces: Sequence[RankTrace], messages: Messages, shared: Rows, a: int, b: int) -> bool:
    """Whether cause and effect let two traces have one clock."""
    clock_of = [2] * len(traces)
    clock_of[a], clock_of[b] = 0, 1
    seen = from_messages(traces, messages, clock_of).get((0, 1), Evidence())
    _add_collectives(seen, traces, shared, [a], [b])
    low, high = (np.concatenate(p)[:, 1] for p in ((seen.low, seen.ends_low), (seen.high, seen.ends_high)))
    return bool((low <= 0).all() and (high >= 0).all())


def _who(traces: Sequence[RankTrace], clock_of: Sequence[int], clock: int) -> str:
    ranks = [t.meta.rank if t.meta.rank >= 0 else i for i, t in enumerate(traces) if clock_of[i] == clock]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _window(traces: Sequence[RankTrace]) -> Window:
    """First and last time of the steps captured on one clock, or of all events where there are no steps."""
    spans = [t.step_bounds for t in traces if t.steps] or [np.stack([t.start, t.end], axis=1) for t in traces if len(t)]
    if not spans:
        return 0, 0
    return min(int(s[:, 0].min()) for s in spans), max(int(s[:, 1].max()) for s in spans)


# -- what they saw of each other ---------------------------------------------------------------


def _pairs(
    traces: Sequence[RankTrace], messages: Messages, shared: Rows, clock_of: Sequence[int], windows: Sequence[Window]
) -> list[Pair]:
    """All pairs with messages both ways, and as few others as it takes to reach every clock that can be."""
    seen = from_messages(traces, messages, clock_of)
    for clocks, evidence in relayed(traces, clock_of).items():
        if clocks not in seen or not seen[clocks].both_ways:
            seen[clocks] = evidence
    found = [estimate(a, b, evidence, windows[b]) for (a, b), evidence in seen.items() if evidence.both_ways]
    pairs = [pair for pair in found if pair is not None]
    joined = list(range(len(windows)))  # clocks with the same number are joined
    for pair in pairs:
        _join(joined, pair.first, pair.second)
    members: list[list[int]] = [[i for i, c in enumerate(clock_of) if c == k] for k in range(len(windows))]
    has = np.stack([(shared[:, m] >= 0).any(axis=1) for m in members], axis=1)
    common = has.T.astype(np.int64) @ has.astype(np.int64)
    candidates = [
        (int(common[a, b]), len(seen.get((a, b), Evidence()).low) + len(seen.get((a, b), Evidence()).high), a, b)
        for a in range(len(windows))
        for b in range(a + 1, len(windows))
    ]
    # most in common first; of equals those that are nearest to the first clock
    for ends, one_way, a, b in sorted(candidates, key=lambda c: (-c[0], -c[1], c[2], c[3])):
        if joined[a] != joined[b] and (ends or one_way):
            evidence = seen.get((a, b), Evidence())
            _add_collectives(evidence, traces, shared, members[a], members[b])
            more = estimate(a, b, evidence, windows[b])
            if more is not None:
                pairs.append(more)
                _join(joined, a, b)
    return pairs


def _join(joined: list[int], a: int, b: int) -> None:
    old, new = joined[b], joined[a]
    joined[:] = [new if x == old else x for x in joined]


def _add_collectives(
    evidence: Evidence, traces: Sequence[RankTrace], shared: Rows, firsts: Sequence[int], seconds: Sequence[int]
) -> None:
    """Of the two traces, one on each clock, that have most collectives in common."""
    common = [(int(((shared[:, a] >= 0) & (shared[:, b] >= 0)).sum()), -a, -b) for a in firsts for b in seconds]
    most, a, b = max(common)
    if most:
        both = shared[(shared[:, -a] >= 0) & (shared[:, -b] >= 0)]
        add_ends(evidence, traces[-a], traces[-b], both[:, [-a, -b]])


def _residuals(traces: Sequence[RankTrace], shared: Rows, lines: Sequence[Line]) -> list[float]:
    if not len(shared):
        return [float("nan")] * len(traces)
    ends = np.full(shared.shape, np.nan)
    origin = 0
    for k, (trace, line) in enumerate(zip(traces, lines, strict=True)):
        has = shared[:, k] >= 0
        times = line.apply(trace.end[shared[has, k]])
        origin = origin or (int(times[0]) if len(times) else 0)  # floats hold what is left
        ends[has, k] = times - origin
    apart = np.abs(ends - np.nanmedian(ends, axis=1, keepdims=True))
    return [float(np.nanmedian(column)) if np.isfinite(column).any() else float("nan") for column in apart.T]


# -- moving traces -----------------------------------------------------------------------------


def _know_peers(traces: Sequence[RankTrace], messages: Messages) -> None:
    ranks = np.array([t.meta.rank if t.meta.rank >= 0 else i for i, t in enumerate(traces)], dtype=np.int32)
    ends = (messages.send_trace, messages.send_row), (messages.recv_trace, messages.recv_row)
    for (mine, rows), (theirs, _) in (ends, ends[::-1]):
        for index, trace in enumerate(traces):
            trace.columns["peer"][rows[mine == index]] = ranks[theirs[mine == index]]


def _clip_receives(traces: Sequence[RankTrace], messages: Messages) -> None:
    """Start each RECV with the SEND of the first bytes it read, if that is later; never after its own end."""
    # rows are by stream and offset: written backwards, the first overlap of a receive stays
    sent = [np.full(len(trace), np.iinfo(np.int64).min) for trace in traces]
    for s, trace in enumerate(traces):
        from_here = messages.send_trace == s
        times = trace.start[messages.send_row[from_here]]
        to, rows = messages.recv_trace[from_here], messages.recv_row[from_here]
        for r in np.unique(to).tolist():
            mine = to == r
            sent[r][rows[mine][::-1]] = times[mine][::-1]
    for trace, when in zip(traces, sent, strict=True):
        trace.columns["start"] = np.maximum(trace.start, np.minimum(when, trace.end))
