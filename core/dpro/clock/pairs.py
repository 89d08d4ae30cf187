"""Offset and drift of one clock against another, with what they can be wrong by.

Messages in both directions decide where there are any: a call that read bytes returned after the call that wrote
them began, so each bounds the difference from one side (:mod:`dpro.clock.band`). The quickest messages take about
as long in one direction as in the other, so the middle of the band is the estimate, and the uncertainty the distance
to the farthest line that cause and effect allow. Else the ends of collectives: ranks leave one together, and no rank
before all arrived.

dPRO's term (:mod:`dpro.clock.scan`) chooses where messages go one way only. Inside a band it would do worse: it is
least where waiting receives take as long as receives that found their bytes, and so puts the quickest messages'
time down to the clocks. On hosts with known clocks it was off by 8 to 12 us, the middle by 0.2 to 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpro.clock.band import MAX_DRIFT, Band, band
from dpro.clock.line import Line
from dpro.clock.messages import Messages
from dpro.clock.scan import Receives, scan
from dpro.trace.model import RankTrace

Rows = npt.NDArray[np.int64]
Window = tuple[int, int]

#: fewer common ends than this say nothing about how far ends are apart
_ENOUGH_ENDS = 5
#: of more ends than this the outermost 5 % on each side are taken for accidents
_MANY_ENDS = 20
#: profilers round to microseconds
_RESOLUTION_NS = 1_000.0
#: collectives that nobody leaves before everybody arrived
_JOINING = ("allreduce", "allgather", "alltoall", "reducescatter", "barrier")
_NONE = np.empty((0, 2), dtype=np.int64)


@dataclass
class Evidence:
    """What two clocks saw of each other; int64 ns. A difference is what to add to the second clock's time."""

    #: [n, 2] time on the second clock, difference that is not less (high: not more) than this
    low: Rows = field(default_factory=lambda: _NONE)
    high: Rows = field(default_factory=lambda: _NONE)
    #: [n, 5] family, sign (+1 received on the second clock), time on the second, turn, took: see ``scan.Receives``
    receives: Rows = field(default_factory=lambda: np.empty((0, 5), dtype=np.int64))
    #: [n, 2] end on the second clock, difference of the ends of one collective
    ends: Rows = field(default_factory=lambda: _NONE)
    #: bounds as `low` and `high`, from collectives
    ends_low: Rows = field(default_factory=lambda: _NONE)
    ends_high: Rows = field(default_factory=lambda: _NONE)

    @property
    def both_ways(self) -> bool:
        return bool(len(self.low) and len(self.high))


@dataclass(frozen=True)
class Pair:
    """The second clock read on the first."""

    first: int
    second: int
    line: Line
    #: no more than this wrong anywhere in the window; inf: not known
    uncertainty_ns: float
    source: str  # messages | ends | bound
    #: corners of what cause and effect allow, [n, 2] as ``Evidence.low`` and ``high``
    low: Rows
    high: Rows
    #: ns by which cause and effect contradict each other on any line
    slack_ns: float = 0.0


def from_messages(
    traces: Sequence[RankTrace], messages: Messages, clock_of: Sequence[int]
) -> dict[tuple[int, int], Evidence]:
    """Evidence by (first, second) clock, first < second; ``clock_of`` gives each trace's clock."""
    starts, ends = _gathered(traces, messages)
    clocks = np.asarray(clock_of, dtype=np.int64)
    sender, receiver = clocks[messages.send_trace], clocks[messages.recv_trace]
    # The first overlap of a receive holds the first bytes it read (rows are by stream and offset).
    receive = np.stack([messages.recv_trace, messages.recv_row], axis=1)
    is_first: npt.NDArray[np.bool_] = np.ones(len(messages), dtype=bool)
    is_first[1:] = (receive[1:] != receive[:-1]).any(axis=1)
    size = np.frexp(messages.nbytes.astype(np.float64))[1].astype(np.int64)  # sizes alike up to a factor of two
    found: dict[tuple[int, int], Evidence] = {}
    key = np.minimum(sender, receiver) * len(traces) + np.maximum(sender, receiver)
    order = np.argsort(key, kind="stable")
    order = order[sender[order] != receiver[order]]
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else []:
        first, second = divmod(int(key[rows[0]]), len(traces))
        there, back = rows[receiver[rows] == second], rows[receiver[rows] == first]
        found[first, second] = Evidence(
            low=np.stack([ends[1][there], starts[0][there] - ends[1][there]], axis=1),
            high=np.stack([starts[0][back], ends[1][back] - starts[0][back]], axis=1),
            receives=np.concatenate(
                [
                    _receives(starts, ends, there[is_first[there]], size, +1),
                    _receives(starts, ends, back[is_first[back]], size, -1),
                ]
            ),
        )
    return found


def _gathered(traces: Sequence[RankTrace], messages: Messages) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
    """(send start, recv start) and (send end, recv end) per overlap."""
    out = []
    for column in ("start", "end"):
        flat = np.concatenate([t.columns[column] for t in traces])
        base = np.cumsum([0, *(len(t) for t in traces)])
        out.append(
            (
                flat[base[messages.send_trace] + messages.send_row],
                flat[base[messages.recv_trace] + messages.recv_row],
            )
        )
    return out[0], out[1]


def _receives(
    starts: tuple[Rows, Rows], ends: tuple[Rows, Rows], rows: Rows, size: Rows, sign: int
) -> npt.NDArray[np.int64]:
    sent, read = starts[0][rows], starts[1][rows]
    turn = sent - read if sign > 0 else read - sent
    family = size[rows] + (64 if sign > 0 else 0)
    second = read if sign > 0 else sent
    return np.stack([family, np.full_like(rows, sign), second, turn, ends[1][rows] - read], axis=1)


def add_ends(evidence: Evidence, first: RankTrace, second: RankTrace, rows: Rows) -> None:
    """Add the collectives of ``rows`` (int64 [n, 2]: event row of either trace)."""
    a, b = rows[:, 0], rows[:, 1]
    evidence.ends = np.stack([second.end[b], first.end[a] - second.end[b]], axis=1)
    names = (first.collectives[row].name.replace("_", "") for row in a.tolist())
    joining = np.array([any(word in name for word in _JOINING) for name in names], dtype=bool)
    a, b = a[joining], b[joining]
    evidence.ends_low = np.stack([second.end[b], first.start[a] - second.end[b]], axis=1)
    evidence.ends_high = np.stack([second.start[b], first.end[a] - second.start[b]], axis=1)


def estimate(first: int, second: int, evidence: Evidence, window: Window) -> Pair | None:
    """The pair's line, None where the two have nothing in common. ``window``: first and last time on the second."""
    reference = (window[0] + window[1]) // 2
    low, high, source = evidence.low, evidence.high, "messages"
    if not evidence.both_ways:
        low, high = np.concatenate([low, evidence.ends_low]), np.concatenate([high, evidence.ends_high])
        source = "ends" if len(evidence.ends) else "bound"
    if not (len(low) or len(high) or len(evidence.ends)):
        return None
    known = [int(extreme(side[:, 1])) for side, extreme in ((low, np.max), (high, np.min)) if len(side)]
    known = known or [int(np.median(evidence.ends[:, 1]))]
    zero = np.array([reference, sum(known) // len(known)], dtype=np.int64)
    times = [float(t - reference) for t in window]

    allowed: Band | None = None
    if len(low) and len(high):
        allowed = band((low - zero).astype(np.float64), (high - zero).astype(np.float64))
        drift, offset = allowed.middle()
    else:
        drift = offset = 0.0
    uncertainty = np.inf
    if source == "ends":
        drift, offset, uncertainty = _from_ends((evidence.ends - zero).astype(np.float64), times)
        if allowed is not None:
            floor, ceiling = allowed.offsets(drift)
            offset = min(max(offset, floor), ceiling)
        elif len(low) or len(high):
            offset = _clip_to_points(drift, offset, low - zero, high - zero)
    elif allowed is None:
        offset = _from_one_way(_relative(evidence.receives, zero, drift), from_below=bool(len(low)))
    if allowed is not None:
        uncertainty = min(uncertainty, allowed.farthest(drift, offset, times))
        low, high = (np.rint(side).astype(np.int64) + zero for side in (allowed.low, allowed.high))
    line = Line(int(zero[1]) + round(offset), drift, reference)
    slack = allowed.slack if allowed is not None else 0.0
    return Pair(first, second, line, uncertainty, source, low, high, slack)


def _relative(receives: Rows, zero: Rows, drift: float) -> Receives:
    family, sign, second, turn, took = receives.T
    moved = (turn - zero[1]).astype(np.float64) - drift * (second - zero[0])
    return Receives(family, sign, moved, took.astype(np.float64))


def _from_one_way(receives: Receives, from_below: bool) -> float:
    """dPRO's estimate from the bound, which is 0 here, to where no receive would have waited: beyond, all is alike."""
    if from_below:
        return scan(receives, 0.0, max(0.0, float(receives.turn.max())))
    return scan(receives, min(0.0, float(receives.turn.min())), 0.0)


def _clip_to_points(drift: float, offset: float, low: Rows, high: Rows) -> float:
    """Bounds on one side only (messages in one direction, collectives that join nobody)."""
    if len(low):
        offset = max(offset, float((low[:, 1] - drift * low[:, 0]).max()))
    if len(high):
        offset = min(offset, float((high[:, 1] - drift * high[:, 0]).min()))
    return offset


def _from_ends(ends: npt.NDArray[np.float64], times: Sequence[float]) -> tuple[float, float, float]:
    """Drift, offset and uncertainty from differences of ends: robust, and as wrong as ends are apart.

    The drift is the median slope over all pairs of ends half the capture apart (Theil and Sen), kept only where it
    moves the clock farther than the ends spread.
    """
    at, value = ends[np.argsort(ends[:, 0])].T
    half = len(at) // 2
    drift = 0.0
    if len(at) >= 2 * _ENOUGH_ENDS:
        apart = at[half : 2 * half] - at[:half]
        slopes = (value[half : 2 * half] - value[:half])[apart > 0] / apart[apart > 0]
        slope = float(np.clip(np.median(slopes), -MAX_DRIFT, MAX_DRIFT)) if len(slopes) else 0.0
        if abs(slope) * (at[-1] - at[0]) > 2 * _spread(value - slope * at):
            drift = slope
    rest = value - drift * at
    offset = float(np.median(rest))
    if len(at) < _ENOUGH_ENDS:
        return drift, offset, np.inf
    outside = max(0.0, at[0] - min(times), max(times) - at[-1]) if drift else 0.0
    spread = _spread(rest)
    return drift, offset, spread + _RESOLUTION_NS + outside * 2 * spread / max(at[-1] - at[0], 1.0)


def _spread(rest: npt.NDArray[np.float64]) -> float:
    """Farthest from the median that the ends lie, accidents apart."""
    tail = 0.05 if len(rest) > _MANY_ENDS else 0.0
    return float(np.abs(np.quantile(rest, [tail, 1 - tail]) - np.median(rest)).max())
