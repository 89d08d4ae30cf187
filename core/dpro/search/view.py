"""What a search looks at in place of the graph.

dPRO's accelerations (section 5.3), each of which can be switched off: a coarsened view, ranks that do the same as one,
partial and delta replay. Knows how to make a graph smaller, not what is searched. A view is there to propose: whatever
comes of it, the whole graph is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.graph.coarse import coarsen
from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO
from dpro.replay.engine import replay
from dpro.replay.symmetry import collapse
from dpro.trace.memory import MEMORY
from dpro.trace.regions import REGIONS, LayerOps

#: Of ranks that differ, so many are looked at: those that the others mostly wait for.
MOST_RANKS = 4


@dataclass(frozen=True)
class Speedups:
    """Which accelerations are used.

    ``coarse``: :func:`~dpro.graph.coarse.coarsen`. ``symmetry``: ranks that do the same are one, and of more than
    :data:`MOST_RANKS` others those that are waited for. ``partial``: what synchronising alone takes is told by a
    timeline, or a replay of one gradient's ops, and only the best of it replayed. ``delta``:
    :class:`~dpro.replay.delta.DeltaReplay`.
    """

    coarse: bool = True
    symmetry: bool = True
    partial: bool = True
    delta: bool = True


ALL = Speedups()


def view(graph: Graph, speedups: Speedups, names: Iterable[str] = ()) -> Graph:
    """A smaller graph with the same tensors and buckets, or ``graph`` itself; ops with such ``names`` stay ops."""
    seen = graph
    if speedups.symmetry and INFO not in graph.info:
        seen = _few(collapse(graph).graph)
    if speedups.coarse:
        seen = coarsen(seen, _shared(seen), _named(seen, frozenset(names)))
    if seen is not graph:
        seen.info.pop(MEMORY, None)  # it points at ops of the whole graph
    return seen


def _shared(graph: Graph) -> set[int]:
    """Host resources on which the threads of collectives take turns."""
    sync = graph.info.get("sync")
    return set(graph.info.get("main_resource", {}).values()) if sync is not None and sync.steal_ns_per_byte else set()


def _named(graph: Graph, names: frozenset[str]) -> npt.NDArray[np.bool_]:
    """Ops that a pass looks for by name: of layers that may be compiled, and ``names``."""
    find = LayerOps(layer for region in graph.info.get(REGIONS, ()) for layer in region.layers)
    told = np.array([name in names or find(name) is not None for name in graph.name_table], dtype="?")
    found: npt.NDArray[np.bool_] = told[graph.column("name")]
    return found


def waited_for(graph: Graph, most: int = MOST_RANKS) -> list[int]:
    """So many ranks at most: those that are last to have their gradients ready, and the one that is last of all."""
    rank = graph.column("rank")
    ranks = np.unique(rank[graph.column("alive") & (rank >= 0)]).tolist()
    if len(ranks) <= most:
        return list(ranks)
    end = np.zeros(len(rank), dtype=np.int64)
    end[graph.arrays().ids] = replay(graph).end
    last: dict[int, tuple[int, int]] = {}
    for (r, tensor), op in graph.out_op.items():
        last[tensor] = max(last.get(tensor, (-1, -1)), (int(end[op]), r))
    times = Counter(r for _, r in last.values())
    slowest = int(rank[np.where(rank >= 0, end, -1).argmax()])
    return sorted(sorted(ranks, key=lambda r: (r != slowest, -times[r], r))[:most])


def _few(graph: Graph) -> Graph:
    """With the ranks that are waited for."""
    rank, kept = graph.column("rank"), waited_for(graph)
    small, _ = graph.subgraph((rank < 0) | np.isin(rank, kept))
    small.info.setdefault("world_size", graph.ranks)
    small.info["main_resource"] = {r: at for r, at in graph.info.get("main_resource", {}).items() if r in kept}
    return small
