"""What a search looks at in place of the graph.

dPRO's accelerations (section 5.3), each of which can be switched off: a coarsened view, ranks that do the same as one,
partial and delta replay. Knows how to make a graph smaller, not what is searched. A view is there to propose: whatever
comes of it, the whole graph is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro.cost.ps import MODEL
from dpro.cost.sync import SyncModel
from dpro.graph.coarse import coarsen
from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO
from dpro.passes.tensor_partition import captured, told
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
    if speedups.symmetry:
        seen = _few_workers(graph) if INFO in graph.info else _few(collapse(graph).graph)
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


def _few_workers(graph: Graph) -> Graph:
    """A parameter server job with the workers that are waited for, whose messages hold links and servers that all
    workers share for as long as those of all would. Only for who makes all partitions anew.
    """
    ps, model = told(graph)
    ranks, kept = ps.layout.ranks, waited_for(graph)
    if len(kept) == len(ranks) or len(captured(graph)) < len(graph.buckets):
        return graph
    places = [place for place, rank in enumerate(ranks) if rank in kept]
    servers = range(ps.layout.servers)
    links = {(i, s): ps.layout.links[place, s] for i, place in enumerate(places) for s in servers}
    of_all, of_kept = (
        Counter(name for name, _ in {(name, w) for (w, _), pair in some.items() for name in pair})
        for some in (ps.layout.links, links)
    )
    small = _few(graph)
    fewer = replace(ps.layout, ranks=tuple(ranks[place] for place in places), links=links)
    small.info[INFO] = replace(ps, layout=fewer)
    small.info[MODEL] = replace(
        model,
        links={name: _times(model.link(name), of_all[name] / of_kept[name]) for name in of_kept},
        sums=_times(model.sums, len(ranks) / len(places)),
    )
    return small


def _times(line: SyncModel, factor: float) -> SyncModel:
    return replace(line, latency_ns=line.latency_ns * factor, ns_per_byte=line.ns_per_byte * factor)


def _few(graph: Graph) -> Graph:
    """With the ranks that are waited for."""
    rank, kept = graph.column("rank"), waited_for(graph)
    small, _ = graph.subgraph((rank < 0) | np.isin(rank, kept))
    small.info.setdefault("world_size", graph.ranks)
    small.info["main_resource"] = {r: at for r, at in graph.info.get("main_resource", {}).items() if r in kept}
    return small
