"""A symmetric job at another size: one representative worker is replayed for all N of them.

Knows graphs whose gradients go through all-reduces of known size, and networks (:mod:`dpro.graph.topology`); not where
their figures come from. Every worker is taken to do what the captured ones did, none slower. What it refuses: other
collectives (but broadcasts, which stay as measured, as in ``whatif``), and all-reduces already cut into pieces.

:func:`at_size` is the small graph, :func:`whole_job` the same job with all its workers and all their messages, which
is what tests and benchmarks hold the small one against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro.graph.graph import NO_RESOURCE, Arrays, Graph, OpKind
from dpro.graph.topology import Messages, Network, messages
from dpro.replay.engine import replay, replay_arrays
from dpro.replay.symmetry import collapse
from dpro.replay.whatif import MAX_TOTAL_NS, WhatIfError, ring_model, stretch, total_ns


@dataclass(frozen=True)
class Point:
    """One point of a curve. ``efficiency``: the step without any transfer over this one; 1 is the best there is."""

    workers: int
    predicted_ns: int
    efficiency: float


def curve(graph: Graph, networks: Sequence[Network]) -> list[Point]:
    """The step on each of ``networks``; errors as :func:`at_size`."""
    small = collapse(graph).graph
    alone = compute_only_ns(small)
    steps = [replay(_sized(small, network)).makespan_ns for network in networks]
    return [Point(net.workers, ns, alone / ns if ns else 1.0) for net, ns in zip(networks, steps, strict=True)]


def compute_only_ns(graph: Graph) -> int:
    """The step if no transfer took any time: workers still wait for each other."""
    mark = graph.mark()
    ops = _collectives(graph)
    for key in ("duration", "gap"):
        graph.set_many(ops, key, np.zeros(len(ops)))
    alone = replay(graph).makespan_ns
    graph.undo(mark)
    return alone


def collective_ns(network: Network, nbytes: int) -> int:
    """How long an all-reduce takes when all workers begin it together: its messages, replayed alone."""
    made = messages(network, nbytes, whole=False)
    order = np.argsort(made.edges[:, 0], kind="stable")
    indptr = np.zeros(len(made) + 1, np.int64)
    np.cumsum(np.bincount(made.edges[:, 0], minlength=len(made)), out=indptr[1:])
    arrays = Arrays(
        ids=np.arange(len(made), dtype=np.int32),
        resource=made.link.astype(np.int32),
        duration=made.duration,
        gap=made.gap,
        priority=made.priority.astype(np.int32),
        indptr=indptr,
        indices=made.edges[order, 1].astype(np.int32),
        resources=len(made.links),
    )
    return replay_arrays(arrays).makespan_ns


def at_size(graph: Graph, network: Network) -> Graph:
    """The job among ``network.workers`` workers, one of each kind of rank standing for all of its kind.

    Ranks that do the same are collapsed (:func:`~dpro.replay.symmetry.collapse`). Where all-reduces go one after the
    other each stays one op, of the time that its messages take; a parameter server's are the messages of one worker.
    ``info["sync"]`` is gone, since it was the captured network's: :func:`dpro.cost.sync.fit_network` has that of the
    new one. ``graph`` stays as it is. Where all ranks do the same the replay equals that of :func:`whole_job`.

    Raises:
        WhatIfError: no all-reduce, one of unknown size or cut into pieces, or another collective than a broadcast.
        SymmetryError: a graph that has parameter servers already.
    """
    return _sized(collapse(graph).graph, network)


def _sized(small: Graph, network: Network) -> Graph:
    ops = _all_reduces(small)
    out, new = small.subgraph(small.column("alive"))
    nbytes = small.column("nbytes")[ops]
    if not network.in_turn:
        _expand(out, new[ops].astype(np.int64), network, whole=False)
    else:
        took = {size: collective_ns(network, size) for size in set(nbytes.tolist())}
        stretch(out, new[ops].astype(np.int64), np.array([took[size] for size in nbytes.tolist()], dtype=np.float64))
    out.info["world_size"] = network.workers
    out.info.pop("sync", None)
    return out


def whole_job(graph: Graph, network: Network) -> Graph:
    """The job with every worker and every message; worker i does what rank i modulo the captured ones does.

    Errors as :func:`at_size`. Slow on purpose: for a few dozen workers.

    Raises:
        WhatIfError: fewer workers than captured ranks, besides the reasons of :func:`at_size`.
    """
    _all_reduces(graph)
    if network.workers < graph.ranks:
        raise WhatIfError(f"{network.workers} workers: the capture has {graph.ranks}")
    out = _repeated(graph, network.workers)
    _expand(out, _all_reduces(out), network, whole=True)
    out.info["world_size"] = network.workers
    return out


def _collectives(graph: Graph) -> npt.NDArray[np.int64]:
    return np.flatnonzero(graph.column("alive") & (graph.column("kind") == OpKind.COLLECTIVE))


def _all_reduces(graph: Graph) -> npt.NDArray[np.int64]:
    """All collectives of the graph but broadcasts, if they are all-reduces that a network can be put under."""
    names = {op: graph.name_of(op) for op in _collectives(graph).tolist()}
    ops = np.array([op for op, name in names.items() if ring_model(name) != "broadcast"], dtype=np.int64)
    if not len(ops):
        raise WhatIfError("no all-reduce in this trace: nothing that more workers would share")
    if any(len(bucket.ops) > 1 for bucket in graph.buckets):
        raise WhatIfError("an all-reduce of several ops: ask before it is cut into pieces")
    for op in ops.tolist():
        if ring_model(names[op]) != "allreduce":
            raise WhatIfError(f"{names[op]!r}: only all-reduces can be put on another topology")
        if graph.column("nbytes")[op] <= 0:
            raise WhatIfError(f"{names[op]!r} is of unknown size: no telling what it would take")
    return ops


def _repeated(graph: Graph, workers: int) -> Graph:
    """A graph of as many ranks: rank i has the ops of rank i modulo those there are."""
    rank = graph.column("rank")
    ranks = np.unique(rank[graph.column("alive") & (rank >= 0)]).tolist()
    if ranks != list(range(len(ranks))):
        raise WhatIfError(f"ranks {ranks} of more: which worker would do what is not known")
    out, _ = graph.subgraph(graph.column("alive"))
    pairs, names = out.edges(), list(out.resource_names)
    keys = ("kind", "name", "duration", "gap", "priority", "tensor", "nbytes")
    columns = {key: out.column(key).copy() for key in keys}
    rank, resource = out.column("rank").copy(), out.column("resource").copy()
    main = dict(out.info.get("main_resource", {}))
    for worker in range(len(ranks), workers):
        like = ranks[worker % len(ranks)]
        mine = np.flatnonzero(rank == like)
        places = {r: out.resource(f"worker{worker}/{names[r]}") for r in np.unique(resource[mine]).tolist() if r >= 0}
        copy = np.arange(len(rank))  # shared ops are themselves
        copy[mine] = out.add_ops("copy", OpKind.LOCAL, len(mine), rank=worker)
        for key in keys:
            out.set_many(copy[mine], key, columns[key][mine])
        out.set_many(copy[mine], "resource", np.array([places.get(r, NO_RESOURCE) for r in resource[mine].tolist()]))
        touching = pairs[(rank[pairs] == like).any(axis=1)]
        out.add_edges(copy[touching])
        for table in (out.out_op, out.in_op):
            table.update({(worker, t): int(copy[op]) for (r, t), op in list(table.items()) if r == like})
        if like in main:
            main[worker] = places.get(main[like], NO_RESOURCE)
    out.ranks = workers
    if main:
        out.info["main_resource"] = main
    return out


def _expand(graph: Graph, ops: npt.NDArray[np.int64], network: Network, whole: bool) -> None:
    """Put the messages of each all-reduce in its place; those that follow each other keep the order of the replay."""
    made: dict[int, Messages] = {}
    arrays, played = graph.arrays(), replay(graph)
    start = dict(zip(arrays.ids.tolist(), played.start.tolist(), strict=True))
    links: dict[str, int] = {}
    ends: dict[int, int] = {}
    body: dict[int, tuple[int, ...]] = {}
    for op in sorted(ops.tolist(), key=lambda op: (start[op], op)):
        nbytes = int(graph.column("nbytes")[op])
        if nbytes not in made:
            made[nbytes] = messages(network, nbytes, whole)
        channel = int(graph.column("resource")[op]) if network.in_turn else NO_RESOURCE
        body[op] = _put(graph, op, made[nbytes], links, ends.get(channel))
        if channel != NO_RESOURCE:
            ends[channel] = body[op][-1]
    graph.set_buckets(
        [replace(b, ops=tuple(new for op in b.ops for new in body.get(op, (op,)))) for b in graph.buckets]
    )
    if not total_ns(graph) < MAX_TOTAL_NS:
        raise WhatIfError("a step would last for years: ask for less")


def _put(graph: Graph, op: int, made: Messages, links: dict[str, int], after: int | None) -> tuple[int, ...]:
    """Replace one collective; ``after``: what its channel had before it. Returns its ops, the one at its end last."""
    pairs, rank = graph.edges(), graph.column("rank")
    before, behind = pairs[pairs[:, 1] == op, 0], pairs[pairs[:, 0] == op, 1]
    name, gap, nbytes = graph.name_of(op), int(graph.column("gap")[op]), int(graph.column("nbytes")[op])
    tensor = int(graph.column("tensor")[op])
    of_rank = rank[before]
    graph.remove_ops([op])
    agreed: list[int] = []
    if gap:  # agreed on by all before anybody sends
        agreed = [graph.add_op("agreed", OpKind.LOCAL, gap=gap, after=before.tolist())]
        before, of_rank = np.array(agreed), np.array([-1])
    for link in made.links:
        links.setdefault(link, graph.resource(link))
    resource = np.array([links[link] for link in made.links] + [NO_RESOURCE])[made.link]
    sent = graph.add_ops(
        f"send {name}", OpKind.SEND, len(made), resource=resource, duration=made.duration, gap=made.gap,
        priority=made.priority,
    )  # fmt: skip
    graph.add_edges(sent[made.edges])
    worker, first = made.arrivals[:, 0], sent[made.arrivals[:, 1]]
    if len(np.unique(worker)) == 1:  # it stands for all
        graph.add_edges(_every(before, first))
    else:
        joint = before[of_rank < 0]
        graph.add_edges(_every(joint, first))
        own = np.argsort(of_rank, kind="stable")
        lower, upper = (np.searchsorted(of_rank[own], worker, side=side) for side in ("left", "right"))
        many = upper - lower
        at = np.repeat(lower, many) + np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        graph.add_edges(np.stack([before[own[at]], np.repeat(first, many)], axis=1))
    if after is not None:
        graph.add_edges(_every(np.array([after]), np.unique(first)))
    last = np.setdiff1d(np.arange(len(made)), made.edges[:, 0])
    end = graph.add_op(name, OpKind.COLLECTIVE, tensor=tensor, nbytes=nbytes)
    graph.add_edges(_every(sent[last], np.array([end])))
    graph.add_edges(_every(np.array([end]), behind))
    return (*agreed, *sent.tolist(), end)


def _every(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.stack([np.repeat(before, len(after)), np.tile(after, len(before))], axis=1)
