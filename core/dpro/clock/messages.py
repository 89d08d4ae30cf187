"""Which socket calls moved the same bytes: SEND and RECV rows joined by byte ranges of one directed stream.

The two ends of a TCP stream count its bytes alike, so a SEND and a RECV are the same transaction where their
ranges overlap (dPRO, MLSys 2022, section 4.1, needs transaction ids in forked libraries for that). Knows
nothing of clocks, and trusts nobody: rows without an offset, bytes seen twice and streams of which only one
end was captured are counted and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.trace.model import EventKind, RankTrace

PAYLOAD = "payload"
#: no stream is longer; a higher offset is not one
_MAX_OFFSET = 2**60

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Messages:
    """One row per overlap, int64 columns; by stream, then by offset."""

    send_trace: Rows
    send_row: Rows
    recv_trace: Rows
    recv_row: Rows
    offset: Rows  # first byte of the overlap on its directed stream
    nbytes: Rows
    #: share of the bytes of rows named "payload", and of all rows, that were matched; both ends counted; 1 of none
    payload_share: float
    overall_share: float
    #: streams of which one end only was captured
    one_ended: int
    #: bytes that a second row of the same end claims, and bytes of rows without a usable offset
    repeated_bytes: int
    unplaced_bytes: int

    def __len__(self) -> int:
        return len(self.offset)

    def matched_share(self, payload_only: bool = True) -> float:
        """0 to 1, see ``payload_share`` and ``overall_share``."""
        return self.payload_share if payload_only else self.overall_share


@dataclass(frozen=True)
class _Ends:
    """All usable rows of one kind, sorted by (stream, offset), ranges disjoint within a stream."""

    stream: Rows
    trace: Rows
    row: Rows
    begin: Rows
    end: Rows
    repeated: int


def match_messages(traces: Sequence[RankTrace]) -> Messages:
    """Join the SEND and RECV rows of all ``traces``. Bytes are matched at most once."""
    streams: dict[str, int] = {}
    columns = {kind: _collect(traces, kind, streams) for kind in (EventKind.SEND, EventKind.RECV)}
    sends, recvs = (_disjoint(columns[kind]) for kind in (EventKind.SEND, EventKind.RECV))
    a, b, offset, nbytes = _overlaps(sends, recvs, len(streams))
    matched = (sends.trace[a], sends.row[a]), (recvs.trace[b], recvs.row[b])
    both = np.intersect1d(sends.stream, recvs.stream)
    either = np.union1d(sends.stream, recvs.stream)
    placed = int((sends.end - sends.begin).sum() + (recvs.end - recvs.begin).sum()) + sends.repeated + recvs.repeated
    total = _bytes(traces, payload=False)
    payload_total = _bytes(traces, payload=True)
    payload = sum(int(nbytes[_is_payload(traces, *end)].sum()) for end in matched)
    return Messages(
        *matched[0],
        *matched[1],
        offset,
        nbytes,
        payload_share=payload / payload_total if payload_total else 1.0,
        overall_share=2 * int(nbytes.sum()) / total if total else 1.0,
        one_ended=len(either) - len(both),
        repeated_bytes=sends.repeated + recvs.repeated,
        unplaced_bytes=total - placed,
    )


def _collect(traces: Sequence[RankTrace], kind: EventKind, streams: dict[str, int]) -> npt.NDArray[np.int64]:
    """Usable rows, int64 [rows, 5]: stream, trace, row, first byte, end. ``streams`` gives names their numbers."""
    found = [np.empty((0, 5), dtype=np.int64)]
    for index, trace in enumerate(traces):
        number = np.array([streams.setdefault(name, len(streams)) for name in trace.resources], dtype=np.int64)
        usable = (trace.kind == kind) & (trace.offset >= 0) & (trace.nbytes > 0)
        rows = np.flatnonzero(usable & (trace.offset < _MAX_OFFSET) & (trace.nbytes < _MAX_OFFSET))
        begin = trace.offset[rows].astype(np.int64)
        found.append(
            np.stack(
                [number[trace.resource[rows]], np.full_like(rows, index), rows, begin, begin + trace.nbytes[rows]],
                axis=1,
            )
        )
    return np.concatenate(found)


def _disjoint(rows: npt.NDArray[np.int64]) -> _Ends:
    """Sorted, and every byte left to the first row that has it."""
    stream, trace, row, begin, end = rows[np.lexsort((rows[:, 2], rows[:, 3], rows[:, 0]))].T
    covered = begin.copy()
    for first, last in _groups(stream):
        covered[first + 1 : last] = np.maximum.accumulate(end[first:last])[:-1]
    clipped = np.maximum(begin, covered)
    repeated = int((np.minimum(clipped, end) - begin).sum())
    keep = clipped < end
    return _Ends(stream[keep], trace[keep], row[keep], clipped[keep], end[keep], repeated)


def _overlaps(sends: _Ends, recvs: _Ends, streams: int) -> tuple[Rows, Rows, Rows, Rows]:
    """Index into ``sends`` and ``recvs``, first byte and length of every overlap."""
    of_sends = np.searchsorted(sends.stream, np.arange(streams + 1))
    of_recvs = np.searchsorted(recvs.stream, np.arange(streams + 1))
    left: list[Rows] = [np.empty(0, dtype=np.int64)]
    right: list[Rows] = [np.empty(0, dtype=np.int64)]
    for k in np.intersect1d(sends.stream, recvs.stream).tolist():
        s, r = slice(of_sends[k], of_sends[k + 1]), slice(of_recvs[k], of_recvs[k + 1])
        # Both lists are sorted and disjoint: what a send overlaps is one run of receives.
        first = np.searchsorted(recvs.end[r], sends.begin[s], side="right")
        last = np.searchsorted(recvs.begin[r], sends.end[s], side="left")
        count = np.maximum(last - first, 0)
        left.append(np.repeat(np.arange(s.start, s.stop), count))
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        right.append(r.start + np.repeat(first, count) + within)
    a, b = np.concatenate(left), np.concatenate(right)
    begin = np.maximum(sends.begin[a], recvs.begin[b])
    return a, b, begin, np.minimum(sends.end[a], recvs.end[b]) - begin


def _groups(sorted_keys: Rows) -> list[tuple[int, int]]:
    """First and last + 1 of each run of equal keys."""
    edges = np.flatnonzero(np.diff(sorted_keys)) + 1
    ends = [*edges.tolist(), len(sorted_keys)]
    return list(zip([0, *edges.tolist()], ends, strict=True)) if len(sorted_keys) else []


def _bytes(traces: Sequence[RankTrace], payload: bool) -> int:
    total = 0
    for trace in traces:
        chosen = np.isin(trace.kind, (EventKind.SEND, EventKind.RECV)) & (trace.nbytes > 0)
        if payload:
            chosen &= trace.name == _payload_id(trace)
        total += int(trace.nbytes[chosen].sum())
    return total


def _is_payload(traces: Sequence[RankTrace], trace: Rows, row: Rows) -> npt.NDArray[np.bool_]:
    out = np.zeros(len(row), dtype=bool)
    for index, each in enumerate(traces):
        mine = trace == index
        out[mine] = each.name[row[mine]] == _payload_id(each)
    return out


def _payload_id(trace: RankTrace) -> int:
    return trace.names.index(PAYLOAD) if PAYLOAD in trace.names else -1
