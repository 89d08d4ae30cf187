"""What a parameter server's own trace adds: when it had a push, and when it began to send a sum.

Both ends of a connection count its bytes alike, and a worker's messages to a server go in order: pushes in the order in
which they were taken up, sums in the order in which they were there. What lies between (headers, questions,
acknowledgements) is small and told by what is left of the bytes. The end of a push is then what the server read, not
when the worker heard of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro.graph.ps_layout import Layout
from dpro.graph.ps_ops import Part
from dpro.trace.byteps import settings
from dpro.trace.model import EventKind, RankTrace

Rows = npt.NDArray[np.int64]

#: Headers of a partition's messages are no larger.
_MOST_HEADERS = 2_000


class _Calls(NamedTuple):
    """Socket calls of one end of a directed stream, by offset of their bytes, and when they began and ended, ns."""

    since: Rows
    until: Rows
    start: Rows
    end: Rows


def with_servers(
    parts: Sequence[Sequence[Part]], workers: Sequence[RankTrace], servers: Sequence[RankTrace], layout: Layout
) -> list[list[Part]]:
    """``parts`` (per worker, of one step) with what the ``servers``' traces say; as they are where those say nothing.

    All traces are on one clock; the workers' have the wire as well.
    """
    nodes = sorted(next((t.server_nodes for t in map(settings, workers) if t.server_nodes), ()), reverse=True)
    out = [list(mine) for mine in parts]
    for server in servers:
        for worker, trace in enumerate(workers):
            stream = _common(trace, server)
            number = _number(stream, nodes, layout)
            mine = [i for i, part in enumerate(out[worker]) if layout.server(*part.key) == number]
            if not stream or not mine:
                continue
            back = _reverse(stream)
            for place, at in _arrivals([out[worker][i] for i in mine], _calls(server, stream, EventKind.RECV)).items():
                part = out[worker][mine[place]]
                begun, known = part.push
                out[worker][mine[place]] = part._replace(push=(begun, min(max(at, begun), known)), acknowledged=known)
            for place, at in _departures([out[worker][i] for i in mine], _calls(server, back, EventKind.SEND)).items():
                out[worker][mine[place]] = out[worker][mine[place]]._replace(sent=at)
    return out


def _common(worker: RankTrace, server: RankTrace) -> str:
    """The directed stream that carried most from the one to the other; "" without one."""
    sent = np.bincount(*_weights(worker, EventKind.SEND), minlength=len(worker.resources))
    received = np.bincount(*_weights(server, EventKind.RECV), minlength=len(server.resources))
    theirs = dict(zip(server.resources, received.tolist(), strict=True))
    both = {name: n for name, n in zip(worker.resources, sent.tolist(), strict=True) if n and theirs.get(name)}
    return max(both, key=both.__getitem__, default="")


def _weights(trace: RankTrace, kind: EventKind) -> tuple[Rows, Rows]:
    rows = np.flatnonzero((trace.kind == kind) & (trace.nbytes > 0))
    return trace.resource[rows], trace.nbytes[rows]


def _number(stream: str, nodes: Sequence[str], layout: Layout) -> int:
    """Of the server that receives the stream; -1 where nobody says."""
    if layout.servers == 1:
        return 0
    address = stream.rpartition(">")[2].rpartition(":")[0]
    return nodes.index(address) if nodes.count(address) == 1 and len(nodes) == layout.servers else -1


def _reverse(stream: str) -> str:
    there, _, back = stream.removeprefix("wire/").partition(">")
    return f"wire/{back}>{there}"


def _calls(trace: RankTrace, stream: str, kind: EventKind) -> _Calls:
    if stream not in trace.resources:
        return _Calls(*(np.empty(0, dtype=np.int64) for _ in range(4)))
    on = trace.resource == trace.resources.index(stream)
    rows = np.flatnonzero(on & (trace.kind == kind) & (trace.offset >= 0))
    rows = rows[np.argsort(trace.offset[rows], kind="stable")]
    until = np.maximum.accumulate(trace.offset[rows] + trace.nbytes[rows])
    return _Calls(trace.offset[rows], until, trace.start[rows], np.maximum.accumulate(trace.end[rows]))


def _arrivals(parts: Sequence[Part], calls: _Calls) -> dict[int, int]:
    """Place in ``parts`` -> when the last byte of its push had been read."""
    order = sorted(range(len(parts)), key=lambda i: (parts[i].push, parts[i].key))
    first, last = parts[order[0]].push[0], max(part.push[1] for part in parts)
    found = _places([parts[i].nbytes for i in order], calls, first, last)
    return {i: int(calls.end[row]) for i, (_, row) in zip(order, found, strict=False)}


def _departures(parts: Sequence[Part], calls: _Calls) -> dict[int, int]:
    """Place in ``parts`` -> when the call began that sent the first byte of its sum."""
    order = sorted(range(len(parts)), key=lambda i: (parts[i].pull[1], parts[i].pull[0], parts[i].key))
    first, last = min(part.push[0] for part in parts), max(part.pull[1] for part in parts)
    found = _places([parts[i].nbytes for i in order], calls, first, last)
    return {i: int(calls.start[row]) for i, (row, _) in zip(order, found, strict=False)}


def _places(sizes: Sequence[int], calls: _Calls, first: int, last: int) -> list[tuple[int, int]]:
    """Rows of the calls with the first and the last byte of each message; [] where the bytes fit no messages.

    Args:
        sizes: of the messages that went between ``first`` and ``last``, ns, in order.
    """
    before = int(np.searchsorted(calls.end, first, side="right"))
    after = int(np.searchsorted(calls.end, last, side="right"))
    if after <= before or min(sizes) <= 0:
        return []
    base = int(calls.until[before - 1]) if before else int(calls.since[0])
    headers = (int(calls.until[after - 1]) - base - sum(sizes)) / len(sizes)
    if not 0 <= headers <= _MOST_HEADERS:
        return []
    # Headers may all come before the messages, or behind: the first byte is looked for where it is one of a message
    # that is larger than them all.
    ends = base + np.cumsum(sizes) + headers * (np.arange(len(sizes)) + 0.5)
    begins = ends - np.array(sizes) + np.minimum(headers * len(sizes), np.array(sizes) - 1)
    last_rows = np.searchsorted(calls.until, ends - 0.5 * headers)
    first_rows = np.searchsorted(calls.until, begins)
    most = len(calls.until) - 1
    return list(zip(np.minimum(first_rows, most).tolist(), np.minimum(last_rows, most).tolist(), strict=True))
