"""How fast a parameter server job's links and threads are, from when single messages and copies were over.

The end of a single message says little: acknowledgements come in batches, some wait for what goes the other way, and
the messages of two connections share a link. Between the ends of two messages of a stretch in which each queued behind
the one before, the link carried what lies between, and nothing else is in that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: The pace of single copies and messages is that of the quicker ones among the large.
QUICK = 0.25
#: So many messages that queued tell a link's pace; they are looked at in no more stretches than this.
ENOUGH_QUEUED = 8
_STRETCHES = 40


class Message(NamedTuple):
    """Over a link: when that was free, when the message was over, when it could have gone (ns), and its bytes."""

    free: int
    end: int
    ready: int
    nbytes: int


class Pace(NamedTuple):
    """A link's, ns per byte. ``spread``: median relative deviation of ``stretches``; ``sizes`` of messages in them."""

    ns_per_byte: float
    spread: float
    stretches: int
    sizes: int


def link_pace(messages: Sequence[Message]) -> Pace | None:
    """The median, by bytes, over stretches of ``messages`` (by their ends) that queued; None where few did.

    A stretch has the bytes of the largest message at least, and a share of all: acknowledgements of a batch fall into
    one, and one that was late for another reason into few.
    """
    queued = [m for m in messages if m.nbytes > 0 and m.free > m.ready]
    if len(queued) < ENOUGH_QUEUED:
        return None
    least = max(max(m.nbytes for m in queued), sum(m.nbytes for m in queued) / _STRETCHES)
    found: list[tuple[int, int]] = []
    nbytes = ns = 0
    for m in messages:
        if m.nbytes <= 0 or m.free <= m.ready:
            nbytes = ns = 0
            continue
        nbytes, ns = nbytes + m.nbytes, ns + m.end - m.free
        if nbytes >= least:
            found.append((nbytes, ns))
            nbytes = ns = 0
    table = np.array([pair for pair in found if pair[1] > 0], dtype=np.float64).reshape(-1, 2)
    if not len(table):
        return None
    table = table[np.argsort(table[:, 1] / table[:, 0])]
    middle = int(np.searchsorted(np.cumsum(table[:, 0]), table[:, 0].sum() / 2))
    per_byte = float(table[middle, 1] / table[middle, 0])
    spread = float(np.median(np.abs(table[:, 1] / (per_byte * table[:, 0]) - 1)))
    return Pace(per_byte, spread, len(table), len({m.nbytes for m in queued}))


def pace(took: Sequence[tuple[int, int]]) -> float:
    """ns per byte of the quicker ones of ``took`` (bytes, ns) among those at least half as large as the largest."""
    table = np.array(took, dtype=np.float64)
    large = table[2 * table[:, 0] >= table[:, 0].max()]
    return float(np.quantile(large[:, 1] / large[:, 0], QUICK))
