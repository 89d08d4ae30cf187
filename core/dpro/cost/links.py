"""What a link direction can carry, learnt from the messages on it.

Knows sizes and times of the pieces of ring collectives (``graph.info["messages"]``), which exclude everything
but the link: arrival waits, reducing and handshakes lie between pieces. Fitted as collectives are
(:func:`dpro.cost.sync.fit`: least absolute relative deviation), so a stalled piece says nothing of the others.
"""

from __future__ import annotations

import numpy as np

from dpro.cost.sync import SyncModel, fit
from dpro.graph.graph import Graph, OpKind
from dpro.graph.wire import ring_steps


def fit_links(graph: Graph) -> dict[tuple[int, int], SyncModel]:
    """Per (sender, receiver), ranks: the time of one message on an idle link; links without a usable piece lack."""
    out: dict[tuple[int, int], SyncModel] = {}
    for link in graph.info.get("messages", {}).get("links", ()):
        pieces = np.array(link["pieces"], dtype=np.float64).reshape(-1, 2)
        try:
            out[link["sender"], link["receiver"]] = fit(pieces[:, 0], pieces[:, 1])
        except ValueError:
            continue
    return out


def fit_all_reduce(graph: Graph) -> SyncModel | None:
    """The cost of an all-reduce as its links tell it; None without messages.

    The bytes go at the pace of the slowest link, 2 (n-1)/n of them (Patarasuk and Yuan, 2009); the latency is
    what the median captured all-reduce took beyond that.
    """
    links = fit_links(graph)
    members = len({rank for pair in links for rank in pair})
    kind, nbytes = graph.column("kind"), graph.column("nbytes")
    ops = np.flatnonzero(graph.column("alive") & (kind == OpKind.COLLECTIVE) & (nbytes > 0)).tolist()
    ops = [op for op in ops if ring_steps(graph.name_of(op), members) == 2 * (members - 1)]
    if not links or not ops:
        return None
    per_byte = max(link.ns_per_byte for link in links.values()) * 2 * (members - 1) / members
    size, time = nbytes[ops], graph.column("duration")[ops]
    latency = max(0.0, float(np.median(time - per_byte * size)))
    off = np.abs(time - latency - per_byte * size) / np.maximum(1.0, latency + per_byte * size)
    return SyncModel(
        latency_ns=latency,
        ns_per_byte=per_byte,
        spread=float(np.median(off)),
        observations=len(ops),
        distinct_sizes=len(np.unique(size)),
    )
