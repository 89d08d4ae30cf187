"""The coarsened view of a graph: host ops that only follow one another become one (dPRO section 5.3).

Knows chains of ops on one resource, and which ops a search needs by name: gradients' OUT and IN ops, collectives and
messages, ops of layers that may be fused. What lies between is one op that takes as long as all of it.

dPRO joins every op to the nearest one that makes a tensor. Here an op with a user besides the next in its chain stays
an op, so that on a resource which nothing else uses each op that is left ends when it ended before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro.graph.graph import NO_RESOURCE, Graph, OpKind

#: Where others take turns on the resource (contention: a collective's threads on the host's core), what is joined takes
#: no longer than this: they wait for an op to end.
GRAIN_NS = 250_000
_PLAIN = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.LOCAL)


def coarsen(
    graph: Graph, shared: set[int], kept: npt.NDArray[np.bool_] | None = None, grain_ns: int = GRAIN_NS
) -> Graph:
    """A new graph with fewer ops; ``graph`` stays as it is, tensors and buckets are the same.

    Args:
        shared: resources on which others may take turns: there no joined op is longer than ``grain_ns``.
        kept: [ops ever made] ops that are not joined to others.
    """
    joined = _joined(graph, kept)
    if not len(joined):
        return graph.subgraph(graph.column("alive").copy())[0]
    duration, gap, resource = (graph.column(key) for key in ("duration", "gap", "resource"))
    before, after = joined[:, 0], joined[:, 1]
    #: op -> the one that follows it in its run
    following = np.full(len(duration), -1, dtype=np.int64)
    following[before] = after
    keep = graph.column("alive").copy()
    last_of: dict[int, int] = {}
    times: list[tuple[int, int, int]] = []  # the run's last op, its duration and gap
    bounded = np.isin(resource, list(shared))
    follows = np.zeros(len(duration), "?")
    follows[after] = True
    for first in before[~follows[before]].tolist():
        op, total, limit = first, int(duration[first]), grain_ns if bounded[first] else None
        head = first
        while (then := int(following[op])) >= 0:
            more = int(gap[then]) + int(duration[then])
            if limit is not None and total + more > limit:
                if op != head:
                    last_of[head] = op
                    times.append((op, total, int(gap[head])))
                head, total = then, int(duration[then])
            else:
                keep[op] = False
                total += more
            op = then
        if op != head:
            last_of[head] = op
            times.append((op, total, int(gap[head])))
    small, new = graph.subgraph(keep)
    ops = new[[op for op, _, _ in times]]
    small.set_many(ops, "duration", np.array([ns for _, ns, _ in times]))
    small.set_many(ops, "gap", np.array([ns for _, _, ns in times]))
    pairs = graph.edges()
    heads = np.full(len(duration), -1, dtype=np.int64)
    heads[list(last_of)] = list(last_of.values())
    for src, dst in pairs[(heads[pairs[:, 1]] >= 0)].tolist():
        small.add_edge(int(new[src]), int(new[heads[dst]]))
    return small


def _joined(graph: Graph, kept: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int32]:
    """Edges [n, 2] over which an op can be joined to the next one of its resource."""
    kind, resource, priority = (graph.column(key) for key in ("kind", "resource", "priority"))
    pairs = graph.edges()
    count = len(kind)
    into, out = np.bincount(pairs[:, 1], minlength=count), np.bincount(pairs[:, 0], minlength=count)
    own = np.ones(count, "?")
    own[[op for bucket in graph.buckets for op in bucket.ops]] = False
    plain = own & np.isin(kind, [int(k) for k in _PLAIN]) & (resource != NO_RESOURCE) & _in_chains(graph, own)
    if kept is not None:
        plain &= ~kept
    plain[list(graph.in_op.values())] = False
    ends = plain | (own & (kind == OpKind.OUT))  # a gradient is ready when its op ends, so it may be the last of a run
    plain[list(graph.out_op.values())] = False
    src, dst = pairs[:, 0], pairs[:, 1]
    good = plain[src] & ends[dst] & (out[src] == 1) & (into[dst] == 1) & (resource[src] == resource[dst])
    good &= (priority[src] == priority[dst]) & ((kind[src] == kind[dst]) | (kind[dst] == OpKind.OUT))
    joined: npt.NDArray[np.int32] = pairs[good]
    return joined


def _in_chains(graph: Graph, own: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Ops of resources on which each op (of ``own``) has an edge to the next one by id: nothing comes between."""
    resource = graph.column("resource")
    ops = np.flatnonzero(own & graph.column("alive") & (resource != NO_RESOURCE))
    order = ops[np.argsort(resource[ops], kind="stable")]
    same = resource[order[:-1]] == resource[order[1:]]
    count = len(resource)
    pairs = graph.edges().astype(np.int64)
    there = np.isin(order[:-1].astype(np.int64) * count + order[1:], pairs[:, 0] * count + pairs[:, 1])
    broken = np.zeros(len(graph.resource_names), "?")
    broken[resource[order[:-1]][same & ~there]] = True
    found: npt.NDArray[np.bool_] = (resource != NO_RESOURCE) & ~broken[resource]
    return found
