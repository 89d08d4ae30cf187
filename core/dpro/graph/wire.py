"""Which messages served which collective, and what they did on their link.

Payload is attributed by its tag on the wire (gloo's slot) where every byte so tagged falls into the run of
one collective, else by the run it falls into. Inside a collective the socket calls between two ranks are cut
into the pieces of a ring: step and part, told by what each rank had received before it sent. Knows no graph
and no framework; all times are of one clock (:func:`dpro.graph.spans.one_clock`).

Source: dPRO (MLSys 2022) section 4.1 (transactions of a ring: chunk and step). Ring: Patarasuk and Yuan 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpro.clock.messages import PAYLOAD, Messages, match_messages
from dpro.trace.model import EventKind, RankTrace

Rows = npt.NDArray[np.int64]

#: Socket calls of a run may begin and end this much outside it: profiler and tracer take their own times.
_SLACK_NS = 200_000
#: A tag belongs to one collective if at least this share of its bytes falls into that one's run.
_TAG_SHARE = 0.9
#: Links of a ring carry the same bytes, but for headers and the last part's missing elements.
_ALIKE = 0.02
_MAX_PARTS = 64
_NEVER = -(2**60)
_TURN = ("sender", "receiver", "nbytes", "called", "began", "received")
#: What was received is known to the sender at once, but for the order in which two threads read the clock.
_CAUSAL_NS = 20_000


class Piece(NamedTuple):
    """One part of one ring step on one link direction. Times in ns; ``sender``/``receiver`` index the traces."""

    sender: int
    receiver: int
    step: int
    part: int
    nbytes: int
    #: the SEND call with its first byte began
    called: int
    #: it was its turn on the link: ``called``, or the end of the piece before it
    began: int
    #: the RECV call with its last byte returned
    received: int


@dataclass(frozen=True)
class Exchange:
    """A collective as pieces: ``steps`` ring steps of ``parts`` each, on every link direction of the ring.

    ``table`` is int64 [pieces, fields of :class:`Piece`]: captures have a hundred thousand, and few become ops.
    """

    steps: int
    parts: int
    table: Rows

    @cached_property
    def pieces(self) -> list[Piece]:
        return [Piece(*row) for row in self.table.tolist()]


@dataclass
class LinkUse:
    """What one link direction did in the captured steps; ns are sums over its messages (payload socket calls)."""

    sender: int
    receiver: int
    messages: int
    nbytes: int
    #: behind bytes sent earlier: in the socket buffer, or in a SEND call that blocked
    queue_ns: int
    #: from the first byte's turn to the last byte received
    transmit_ns: int
    #: from when the receiver was in the collective to the sender's first call for it: the sender arrived later
    wait_ns: int = 0
    #: (bytes, ns on the link) of ring pieces, for :func:`dpro.cost.links.fit_links`
    pieces: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Wire:
    """All messages of a capture. ``collective`` has, per message, the row of ``shared`` it served, -1 unknown."""

    messages: Messages
    collective: Rows
    #: of the payload bytes sent inside the steps, those that were attributed; 0 to 1
    share: float
    #: by row of ``shared``: those of which every message is known
    exchanges: dict[int, Exchange]
    links: list[LinkUse]

    def facts(self, ranks: Sequence[int], span_ns: int) -> dict[str, Any]:
        """For reports, over all captured steps, which lasted ``span_ns``. ``ranks``: by trace."""
        return {
            "attributed_share": self.share,
            "matched_share": self.messages.matched_share(),
            "collectives_with_all_messages": len(self.exchanges),
            "span_ns": span_ns,
            "links": [
                {**vars(link), "sender": ranks[link.sender], "receiver": ranks[link.receiver]} for link in self.links
            ],
        }


def read_wire(traces: Sequence[RankTrace], shared: Rows) -> Wire | None:
    """None where no message was seen. ``shared``: :func:`dpro.clock.match.match_collectives`."""
    if not any((trace.kind == EventKind.SEND).any() for trace in traces):
        return None
    found = match_messages(traces)
    columns = _Columns(traces, found)
    collective = _attribute(traces, shared, columns)
    inside = columns.payload & columns.inside
    total = int(found.nbytes[inside].sum())
    share = int(found.nbytes[inside & (collective >= 0)].sum()) / total if total else 0.0
    links = _link_use(found, columns)
    _arrival_waits(traces, shared, columns, collective, links)
    exchanges = _exchanges(traces, shared, columns, collective)
    _take_turns(exchanges, links)
    return Wire(found, collective, share, exchanges, links)


class _Columns:
    """What the rows of both ends say of every message, in arrays as long as ``messages``."""

    def __init__(self, traces: Sequence[RankTrace], found: Messages) -> None:
        def gather(column: str, index: Rows, row: Rows) -> Rows:
            out = np.zeros(len(row), dtype=np.int64)
            for i, trace in enumerate(traces):
                out[index == i] = trace.columns[column][row[index == i]]
            return out

        sent, received = (found.send_trace, found.send_row), (found.recv_trace, found.recv_row)
        self.sender, self.receiver = found.send_trace, found.recv_trace
        self.send_row, self.nbytes = found.send_row, found.nbytes
        self.send_start = gather("start", *sent)
        self.recv_end = gather("end", *received)
        self.stream = gather("resource", *sent)
        tags = gather("flow", *sent), gather("flow", *received)
        self.tag = np.where(tags[0] >= 0, tags[0], tags[1])
        self.inside = gather("step", *sent) >= 0
        payload = [t.names.index(PAYLOAD) if PAYLOAD in t.names else -1 for t in traces]
        names = gather("name", *sent), gather("name", *received)
        number = np.array(payload, dtype=np.int64)
        self.payload = (names[0] == number[self.sender]) | (names[1] == number[self.receiver])


def _attribute(traces: Sequence[RankTrace], shared: Rows, columns: _Columns) -> Rows:
    """Row of ``shared`` per message, -1 where none fits."""
    out = np.full(len(columns.nbytes), -1, dtype=np.int64)
    runs = [_Runs(trace, shared[:, i]) for i, trace in enumerate(traces)]
    payload = np.flatnonzero(columns.payload)
    tagged = payload[columns.tag[payload] >= 0]
    # A tag is the same on all ranks, so all have a say; process groups count theirs apart, each on streams of its own.
    for keys in ((columns.tag,), (columns.tag, columns.stream, columns.sender)):
        rest = tagged[out[tagged] < 0]
        alike = _alike(rest, [key[rest] for key in keys])
        for rows, served in zip(alike, _of_tags(runs, columns, alike), strict=True):
            out[rows] = served
    for times, rank in ((columns.send_start, columns.sender), (columns.recv_end, columns.receiver)):
        for i, run in enumerate(runs):
            rest = payload[(rank[payload] == i) & (out[payload] < 0)]
            out[rest] = run.at(times[rest])
            out[rest] = np.where(_within(runs, columns, rest, out[rest]), out[rest], -1)
    return out


def _within(runs: list[_Runs], columns: _Columns, rows: Rows, collective: Rows) -> npt.NDArray[np.bool_]:
    """Whether each was sent and received in the runs of its collective: Horovod votes over the same streams."""
    begin, end = np.stack([run.start for run in runs]), np.stack([run.end for run in runs])
    sender, receiver = columns.sender[rows], columns.receiver[rows]
    return np.asarray(
        (columns.send_start[rows] >= begin[sender, collective] - _SLACK_NS)
        & (columns.recv_end[rows] <= end[receiver, collective] + _SLACK_NS)
        & (begin[receiver, collective] != _NEVER)
        & (collective >= 0)
    )


def _alike(rows: Rows, keys: list[Rows]) -> list[Rows]:
    """``rows`` in groups of equal keys."""
    if not len(rows):
        return []
    _, group = np.unique(np.stack(keys), axis=1, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(group.ravel()[order])) + 1)


def _of_tags(runs: list[_Runs], columns: _Columns, alike: list[Rows]) -> list[int]:
    """The collective that each tag's messages served, -1 none: one in whose runs (nearly) all were sent and received.

    Threads of a library run several at once, so that a message may lie in the runs of many: but a process group hands
    out tags in the order in which its collectives begin, and each serves one. ``alike``: rows by ascending tag.
    """
    out = [-1] * len(alike)
    # a group's tags go over the same connections; without its number, those tell it
    groups: dict[tuple[int, ...], list[int]] = {}
    for tag, rows in enumerate(alike):
        senders = np.unique(columns.sender[rows])
        one_way = int(senders[0]) if len(senders) == 1 else -1
        groups.setdefault((int(columns.stream[rows].min()), one_way), []).append(tag)
    begin = np.stack([np.where(run.start == _NEVER, np.iinfo(np.int64).max, run.start) for run in runs]).min(axis=0)
    order = np.argsort(begin, kind="stable")
    for tags in groups.values():
        away = np.stack([_away(runs, columns, alike[tag])[order] for tag in tags])
        possible = np.flatnonzero(np.isfinite(away).any(axis=0))
        for at, served in _in_order(away[:, possible]):
            out[tags[at]] = int(order[possible[served]])
    return out


def _away(runs: list[_Runs], columns: _Columns, rows: Rows) -> npt.NDArray[np.float64]:
    """How far the first and the last of these messages are from begin and end of each collective, ns, over all ranks.

    Infinite where not (nearly) all were sent and received in its runs.
    """
    inside, away = np.zeros(len(runs[0].start)), np.zeros(len(runs[0].start))
    for times, rank in ((columns.send_start, columns.sender), (columns.recv_end, columns.receiver)):
        for i in np.unique(rank[rows]).tolist():
            mine = rows[rank[rows] == i]
            inside += runs[i].bytes_within(times[mine], columns.nbytes[mine])
            away += np.abs(runs[i].start - times[mine].min()) + np.abs(runs[i].end - times[mine].max())
    whole = 2 * int(columns.nbytes[rows].sum())
    most = inside.max(initial=0)
    return np.where(inside >= max(_TAG_SHARE * whole, most - (1 - _TAG_SHARE) * whole), away, np.inf)


def _in_order(cost: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pairs (row, column), both ascending: as many as can be, of those the cheapest. Infinite: no pair."""
    finite = cost[np.isfinite(cost)]
    gain = 1.0 + 2.0 * float(finite.sum()) if finite.size else 0.0  # one more pair outweighs any cost
    best = np.zeros(cost.shape[1] + 1)
    took, stayed = np.zeros(cost.shape, dtype=np.bool_), np.zeros(cost.shape, dtype=np.bool_)
    for row in range(len(cost)):
        paired = best[:-1] + cost[row] - gain
        took[row] = paired < best[1:]
        here = np.minimum(paired, best[1:])
        lowest = np.minimum.accumulate(np.concatenate([best[:1], here]))
        stayed[row] = lowest[:-1] <= here  # as good without this column
        best = lowest
    pairs, row, column = [], len(cost) - 1, cost.shape[1] - 1
    while row >= 0 and column >= 0:
        if stayed[row, column]:
            column -= 1
        elif took[row, column]:
            pairs.append((row, column))
            row, column = row - 1, column - 1
        else:
            row -= 1
    return pairs[::-1]


class _Runs:
    """When one rank was in which collective: a row for each of ``shared``, out of all time where it was not."""

    def __init__(self, trace: RankTrace, rows: Rows) -> None:
        self.part = np.flatnonzero(rows >= 0)
        self.start = np.where(rows >= 0, trace.start[rows], _NEVER)
        self.end = np.where(rows >= 0, trace.end[rows], _NEVER)

    def bytes_within(self, times: Rows, nbytes: Rows) -> Rows:
        """Of messages at ``times``, by collective."""
        order = np.argsort(times)
        until = np.concatenate([[0], np.cumsum(nbytes[order])])
        first, last = (np.searchsorted(times[order], self.start), np.searchsorted(times[order], self.end, side="right"))
        return np.asarray(until[np.maximum(first, last)] - until[first], dtype=np.int64)

    def at(self, times: Rows) -> Rows:
        """The collective that ran at each time (of several the one that began first), -1 none."""
        out = np.full(len(times), -1, dtype=np.int64)
        order = np.argsort(times, kind="stable")
        for slack in (_SLACK_NS, 0):  # runs that only nearly hold a message are overwritten by those that do
            for c in self.part[np.argsort(-self.start[self.part], kind="stable")].tolist():
                span = np.searchsorted(times[order], [self.start[c] - slack, self.end[c] + slack])
                out[order[span[0] : span[1]]] = c
        return out


def _link_use(found: Messages, columns: _Columns) -> list[LinkUse]:
    out: list[LinkUse] = []
    chosen = columns.payload & columns.inside
    for sender, receiver in _pairs(columns, chosen):
        rows = np.flatnonzero(chosen & (columns.sender == sender) & (columns.receiver == receiver))
        rows = rows[np.argsort(columns.recv_end[rows], kind="stable")]
        sent, done = columns.send_start[rows], columns.recv_end[rows]
        began = _turns(sent, done)  # one link, whatever the streams
        calls = np.unique(columns.send_row[rows], return_index=True)[1]  # the first that was received of each
        out.append(
            LinkUse(
                sender,
                receiver,
                messages=len(calls),
                nbytes=int(columns.nbytes[rows].sum()),
                queue_ns=int((began - sent)[calls].sum()),
                transmit_ns=int(np.maximum(0, done - began).sum()),
            )
        )
    return out


def _pairs(columns: _Columns, rows: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """(sender, receiver) of some messages, each once."""
    both = np.unique(np.stack([columns.sender[rows], columns.receiver[rows]]), axis=1)
    return [(i, j) for i, j in both.T.tolist()]


def _arrival_waits(
    traces: Sequence[RankTrace], shared: Rows, columns: _Columns, collective: Rows, links: list[LinkUse]
) -> None:
    """Fill ``wait_ns``: per collective and link direction, how much later than the receiver its sender came."""
    for link in links:
        mine = np.flatnonzero((columns.sender == link.sender) & (columns.receiver == link.receiver) & (collective >= 0))
        mine = mine[np.argsort(columns.send_start[mine], kind="stable")]
        which, first = np.unique(collective[mine], return_index=True)
        joined = shared[which, link.receiver]
        known = joined >= 0
        late = columns.send_start[mine[first]][known] - traces[link.receiver].start[joined[known]]
        link.wait_ns = int(np.maximum(0, late).sum())


# -- rings -----------------------------------------------------------------------------------------


def ring_steps(name: str, members: int) -> int:
    """Steps of a ring collective among ``members`` ranks; 0 for what is no ring."""
    plain = "".join(c for c in name.lower() if c.isalpha())
    if "allreduce" in plain:
        return 2 * (members - 1)
    return members - 1 if "allgather" in plain or "reducescatter" in plain else 0


def _exchanges(traces: Sequence[RankTrace], shared: Rows, columns: _Columns, collective: Rows) -> dict[int, Exchange]:
    order = np.argsort(collective, kind="stable")
    order = order[columns.payload[order]]
    edges = np.searchsorted(collective[order], np.arange(len(shared) + 1))
    out: dict[int, Exchange] = {}
    for c, rows in enumerate(shared.tolist()):
        mine = order[edges[c] : edges[c + 1]]
        members = [i for i, row in enumerate(rows) if row >= 0]
        row = rows[members[0]]
        steps = ring_steps(traces[members[0]].collectives[row].name, len(members))
        links = _ring(columns, mine, members)
        if steps and links:
            payload = max(int(traces[i].nbytes[rows[i]]) for i in members)
            if all(link.total * len(members) >= (1 - _ALIKE) * steps * payload for link in links.values()):
                exchange = _cut(links, steps)
                if exchange is not None:
                    out[c] = exchange
    return out


class _Link:
    """The messages of one collective on one link direction, in the order of their bytes."""

    def __init__(self, columns: _Columns, rows: Rows) -> None:
        if len(np.unique(columns.stream[rows])) > 1:  # several connections: only time can order them
            rows = rows[np.argsort(columns.send_start[rows], kind="stable")]
        self.sender, self.receiver = int(columns.sender[rows[0]]), int(columns.receiver[rows[0]])
        self.send_start, self.recv_end = columns.send_start[rows], columns.recv_end[rows]
        self.until = np.cumsum(columns.nbytes[rows])  # bytes up to and with each message
        self.total = int(self.until[-1])
        fresh = np.flatnonzero(np.diff(columns.send_row[rows]) != 0)
        #: where a SEND call begins, in bytes from the first
        self.calls = np.concatenate([[0], self.until[fresh]])

    def bounds(self, count: int) -> tuple[Rows, bool]:
        """``count`` equal shares, cut where calls begin; and whether calls do begin there."""
        ideal = np.arange(count + 1) * self.total / count
        edges = np.append(self.calls, self.total)
        at = np.clip(np.searchsorted(edges, ideal), 1, len(edges) - 1)
        before, after = edges[at - 1], edges[at]
        nearest = np.where(ideal - before < after - ideal, before, after)
        nearest[0], nearest[-1] = 0, self.total
        fits = np.abs(nearest - ideal) <= max(64, _ALIKE * self.total / count)
        return np.where(fits, nearest, ideal).astype(np.int64), bool(fits.all())


def _ring(columns: _Columns, rows: Rows, members: list[int]) -> dict[int, _Link]:
    """Links of the ring by sender; empty where the messages do not go round all members, or not all are known."""
    links: dict[int, _Link] = {}
    for i in members:
        mine = rows[columns.sender[rows] == i]
        if not len(mine) or len(np.unique(columns.receiver[mine])) > 1:
            return {}
        links[i] = _Link(columns, mine)
    seen, at = [members[0]], links[members[0]].receiver
    while at != members[0] and at in links and at not in seen:
        seen.append(at)
        at = links[at].receiver
    totals = [link.total for link in links.values()]
    whole = at == members[0] and len(seen) == len(members)
    return links if whole and min(totals) >= (1 - _ALIKE) * max(totals) else {}


def _cut(links: dict[int, _Link], steps: int) -> Exchange | None:
    """The finest cut into steps and parts that SEND calls and causality bear out; None if it is no ring.

    What a rank sends as (step, part) is what it received as (step - 1, part).
    """
    most = min(len(link.calls) for link in links.values()) // steps
    for parts in range(min(_MAX_PARTS, max(1, most)), 0, -1):
        bounds: dict[int, Rows] = {}
        for i, link in links.items():
            bounds[i], fits = link.bounds(steps * parts)
            if parts > 1 and not fits:
                break
        else:
            table = _pieces(links, bounds, parts)
            if table is not None:
                return Exchange(steps, parts, table)
    return None


def _pieces(links: dict[int, _Link], bounds: dict[int, Rows], parts: int) -> Rows | None:
    """The pieces of a cut; None where a rank would have sent on what it had not received."""
    times = {i: _times(link, bounds[i]) for i, link in links.items()}
    before = {link.receiver: i for i, link in links.items()}
    late = [np.min(times[i][0][parts:] - times[before[i]][1][:-parts], initial=0) for i in links]
    if min(late) < -_CAUSAL_NS:
        return None
    tables = []
    for i, link in links.items():
        called, received = times[i]
        k = np.arange(len(called))
        same = np.ones_like(k)
        columns = (i * same, link.receiver * same, k // parts, k % parts, np.diff(bounds[i]), called, called, received)
        tables.append(np.stack(columns, axis=1).astype(np.int64))
    return np.concatenate(tables)


def _times(link: _Link, bounds: Rows) -> tuple[Rows, Rows]:
    """Begin of the SEND call with the first, end of the RECV call with the last byte of each piece."""
    first = np.searchsorted(link.until, bounds[:-1], side="right")
    last = np.searchsorted(link.until, bounds[1:], side="left")
    return link.send_start[np.minimum(first, len(link.until) - 1)], link.recv_end[last]


def _take_turns(exchanges: dict[int, Exchange], links: list[LinkUse]) -> None:
    """Fill ``began`` of all pieces: a link direction serves one at a time, in the order they arrived."""
    if not exchanges:
        return
    sender, receiver, nbytes, called, began, received = map(Piece._fields.index, _TURN)
    table = np.concatenate([exchange.table for exchange in exchanges.values()])
    for link in links:
        rows = np.flatnonzero((table[:, sender] == link.sender) & (table[:, receiver] == link.receiver))
        rows = rows[np.lexsort((table[rows, called], table[rows, received]))]
        table[rows, began] = _turns(table[rows, called], table[rows, received])
        busy = np.maximum(0, table[rows, received] - table[rows, began])
        link.pieces = [(size, ns) for size, ns in np.stack([table[rows, nbytes], busy], axis=1).tolist()]
    edges = np.cumsum([len(exchange.table) for exchange in exchanges.values()])
    for exchange, part in zip(exchanges.values(), np.split(table, edges[:-1]), strict=True):
        exchange.table[:] = part


def _turns(called: Rows, received: Rows) -> Rows:
    """When it was each one's turn on a link: at its call, or when all before were through; by ``received``."""
    before = np.concatenate([[_NEVER], np.maximum.accumulate(received)[:-1]])
    return np.asarray(np.minimum(np.maximum(called, before), np.maximum(called, received)), dtype=np.int64)
