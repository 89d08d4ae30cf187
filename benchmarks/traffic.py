"""Made-up traffic between hosts whose clocks are known: traces as the wire tracer would have captured them.

For what no testbed gives: exact truth, asymmetric queues, any number of hosts. Knows nothing of how clocks are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro.clock.line import Line
from dpro.trace.model import EventKind, Meta, RankTrace, TraceBuilder

EPOCH_NS = 10**15
_CALL_NS = 4_000


@dataclass(frozen=True)
class Link:
    """One direction between two hosts: how many messages a second, and how long they are on the way, ns."""

    sender: int
    receiver: int
    per_second: float = 500.0
    least_ns: float = 20_000.0
    #: mean of the queueing (exponential) that ``queued`` of the messages meet
    queue_ns: float = 200_000.0
    queued: float = 0.7
    #: share of the receives that were posted long before their message came
    posted: float = 0.3


def ring(hosts: int, **of_link: float) -> list[Link]:
    """Neighbours on a ring, both ways."""
    pairs = {(i, (i + way) % hosts) for i in range(hosts) for way in (1, -1)}
    return [Link(i, j, **of_link) for i, j in sorted(pairs)]


def traffic(clocks: Sequence[Line], links: Sequence[Link], seconds: float = 1.0, seed: int = 0) -> list[RankTrace]:
    """One trace per host, one step long. ``clocks[k]`` turns the time of host k into true time."""
    rng = np.random.default_rng(seed)
    read = [clock.inverse() for clock in clocks]
    builders = [TraceBuilder(Meta(rank=k, world_size=len(clocks), host=f"host{k}")) for k in range(len(clocks))]
    for link in links:
        stream, offset = f"wire/10.0.0.{link.sender}:1>10.0.0.{link.receiver}:1", 0
        count = max(1, int(link.per_second * seconds))
        sent = EPOCH_NS + np.sort(rng.uniform(0, seconds * 1e9, count)).astype(np.int64)
        waits = rng.exponential(link.queue_ns, count) * (rng.random(count) < link.queued)
        ends = sent + (link.least_ns + rng.exponential(link.least_ns / 10, count) + waits).astype(np.int64)
        ends = np.maximum.accumulate(ends)  # a stream delivers in order
        starts = np.where(rng.random(count) < link.posted, sent - 50_000, ends - _CALL_NS)
        sizes = rng.integers(64, 4_096, count)
        here, there = read[link.sender], read[link.receiver]
        for t, start, end, size in zip(sent.tolist(), starts.tolist(), ends.tolist(), sizes.tolist(), strict=True):
            builders[link.sender].add(
                "payload", EventKind.SEND, stream, here(t), here(t + _CALL_NS), offset=offset, nbytes=size
            )
            builders[link.receiver].add(
                "payload", EventKind.RECV, stream, there(start), there(end), offset=offset, nbytes=size
            )
            offset += size
    return [
        builder.freeze([(back(EPOCH_NS), back(EPOCH_NS + int(seconds * 1e9)))])
        for builder, back in zip(builders, read, strict=True)
    ]


def clock(offset_ns: int, drift_ppm: float = 0.0) -> Line:
    """A host's clock that is ``offset_ns`` behind true time at :data:`EPOCH_NS`, and slower by ``drift_ppm``."""
    return Line(offset_ns, drift_ppm / 1e6, EPOCH_NS - offset_ns)
