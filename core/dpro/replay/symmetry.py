"""Ranks that do the same are replayed as one.

Knows what the replay rule looks at: ops, their times, their resources, the edges among them and to what ranks
share (ops of rank -1: collectives, pieces of buckets). Not what the ops mean, nor why ranks should be alike: it
compares them. In a symmetric job every copy of a rank ends each op when the others do, so a shared op waits for
one of them as it would for all, and one representative is enough. (dPRO replays every worker; that identical ones
collapse is what lets one replay stand for a thousand.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.errors import DproError
from dpro.graph.graph import NO_RESOURCE, Arrays, Graph
from dpro.graph.ps_ops import INFO as PARAMETER_SERVERS
from dpro.replay.engine import replay

Ints = npt.NDArray[np.int64]


class SymmetryError(DproError):
    """A graph whose ranks cannot be looked at one by one; the text says why."""


@dataclass(frozen=True)
class Collapsed:
    """``graph`` stands for the one that was collapsed, see :func:`collapse`."""

    graph: Graph
    #: By rank that is left, all ranks that it stands for (itself included).
    members: dict[int, tuple[int, ...]]
    #: [ops ever made] for every op of the full graph the op of ``graph`` that stands for it; -1: it was dead.
    onto: npt.NDArray[np.int32]
    #: What was taken to be the same, in a line.
    assumption: str


def collapse(graph: Graph, tolerance: float = 0.0) -> Collapsed:
    """A new graph in which one rank stands for all that do the same; ``graph`` stays as it is.

    Two ranks do the same if their ops, in the order of their ids, agree one by one: name, kind, place among the
    rank's resources, priority, tensor, bytes, bucket, OUT and IN; if they have the same edges among themselves and
    with shared ops; and if durations and gaps are equal, or apart by at most ``tolerance`` times the larger one
    (each rank compared with the first of its class). A rank with an op on a resource that others use as well, or an
    edge to another rank's op, stays as it is. The first rank of a class is left and keeps its number;
    ``info["world_size"]`` keeps the number of all.

    With ``tolerance`` 0 the replay of the new graph is that of the old one, op by op. (The replay rule breaks ties by
    the numbers of resources. Those decide nothing between ranks as long as every shared op takes time: its duration
    or its gap is not 0. Of two choices at the same ns it may otherwise be the other one.)

    With more, the representative does each op when the last of its class does in the replay of ``graph``: it is
    eligible when the last one is, and starts and ends so. What ranks wait because each is late in turn stays, which a
    mean would lose, and as long as all ranks do their ops in one order the replay is still that of the old graph. What
    an edit then changes is approximate: the work of the representative is that of whoever was late just then.

    Raises:
        SymmetryError: a job with parameter servers, whose queues every worker shares; or no tolerance in [0, 1].
        CycleError: ops that wait for themselves, where there is a tolerance.
    """
    if not 0 <= tolerance <= 1:
        raise SymmetryError(f"tolerance {tolerance}: give a share between 0 and 1")
    if PARAMETER_SERVERS in graph.info:
        raise SymmetryError("parameter servers: all workers queue for the same threads and links, none is like another")
    rows = _Rows(graph)
    classes = [part for group in rows.alike() for part in rows.same_times(group, tolerance)]
    classes.sort()
    left = np.array([part[0] for part in classes], dtype=np.int64)
    keep = graph.column("rank") < 0
    for i in left.tolist():
        keep[rows.ops(i)] = True
    small, onto = graph.subgraph(keep)
    if tolerance:
        _take_the_latest(graph, small, keep, [[rows.ops(i) for i in part] for part in classes if len(part) > 1])
    for first, *others in classes:
        for i in others:
            onto[rows.ops(i)] = onto[rows.ops(first)]
    # What ended a bucket still ends it: the last op comes last, also where it was another rank's.
    for bucket, full in zip(small.buckets, graph.buckets, strict=True):
        bucket.ops = tuple(dict.fromkeys(onto[list(full.ops)].tolist()[::-1]))[::-1]
    members = {int(rows.ranks[part[0]]): tuple(rows.ranks[part].tolist()) for part in classes}
    dropped = {rank for first, *others in members.values() for rank in others}
    small.ranks = graph.ranks - len(dropped)
    small.info.setdefault("world_size", graph.ranks)
    if "main_resource" in small.info:
        small.info["main_resource"] = {r: at for r, at in graph.info["main_resource"].items() if r not in dropped}
    return Collapsed(small, members, onto, _assumption(members, tolerance))


def _take_the_latest(graph: Graph, small: Graph, keep: npt.NDArray[np.bool_], classes: list[list[Ints]]) -> None:
    """Give the first rank of each class (its ops, rank by rank) times such that it replays as the last ones do."""
    arrays, played = graph.arrays(), replay(graph)
    eligible, start, end = np.zeros((3, len(keep)), np.int64)
    eligible[arrays.ids] = _ready(arrays, played.end) + arrays.gap
    start[arrays.ids], end[arrays.ids] = played.start, played.end
    merged = np.zeros(len(keep), "?")
    for first, *others in classes:
        merged[first] = True
        for time in (eligible, start, end):
            time[first] = np.max([time[ops] for ops in (first, *others)], axis=0)
    kept = np.flatnonzero(keep & graph.column("alive"))  # in the order of the new ids
    eligible, start, end, ids = eligible[kept], start[kept], end[kept], np.flatnonzero(merged[kept])
    gap = eligible - _ready(small.arrays(), end)
    small.set_many(ids, "duration", (end - start)[ids])
    small.set_many(ids, "gap", gap[ids])


def _ready(arrays: Arrays, end: Ints) -> Ints:
    """By row, when its last predecessor ends."""
    ready = np.zeros(len(arrays.ids), np.int64)
    np.maximum.at(ready, arrays.indices, np.repeat(end, np.diff(arrays.indptr)))
    return ready


def _assumption(members: dict[int, tuple[int, ...]], tolerance: float) -> str:
    count = sum(map(len, members.values()))
    if len(members) == count:
        return f"no two of the {count} ranks do the same: each is replayed"
    alike = ", ".join(f"{len(ranks)} like rank {first}" for first, ranks in members.items() if len(ranks) > 1)
    said = f"{count} ranks are replayed as {len(members)}: {alike}"
    return (
        f"{said}, whose times differ by up to {100 * tolerance:g} %: the latest of each moment stands for all"
        if tolerance
        else said
    )


class _Rows:
    """The ops of each rank as rows that can be compared: rank ``ranks[i]`` has :meth:`ops` (i), in order."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        rank = graph.column("rank")
        mine = np.flatnonzero(graph.column("alive") & (rank >= 0))
        self._order = mine[np.argsort(rank[mine], kind="stable")]
        self.ranks, first = np.unique(rank[self._order], return_index=True)
        self._bounds = np.append(first, len(self._order))
        #: by op, its place among its rank's
        self._place = np.full(len(rank), -1, dtype=np.int64)
        self._place[self._order] = np.arange(len(self._order)) - np.repeat(first, np.diff(self._bounds))
        #: ranks that hang together with others in ways of their own
        self._apart: set[int] = set()

    def ops(self, i: int) -> Ints:
        return self._order[self._bounds[i] : self._bounds[i + 1]]

    def alike(self) -> list[list[int]]:
        """Ranks (as indices of :attr:`ranks`) that agree in all but times."""
        columns, sides = self._columns()
        edges = self._edges()
        ends = [self._by_rank(table) for table in (self._graph.out_op, self._graph.in_op)]
        groups: dict[tuple[bytes, ...], list[int]] = {}
        for i, rank in enumerate(self.ranks.tolist()):
            bounds = slice(self._bounds[i], self._bounds[i + 1])
            key = (columns[bounds].tobytes(), sides[i].tobytes(), *(rows[i].tobytes() for rows in (edges, *ends)))
            groups.setdefault((b"%d" % rank,) if rank in self._apart else key, []).append(i)
        return list(groups.values())

    def same_times(self, group: list[int], tolerance: float) -> list[list[int]]:
        """``group`` parted such that each is within ``tolerance`` of the first of its part."""
        if len(group) == 1:
            return [group]
        times = np.stack(
            [np.concatenate([self._graph.column(key)[self.ops(i)] for key in ("duration", "gap")]) for i in group]
        )
        parts, left = [], np.arange(len(group))
        while len(left):
            first = times[left[0]]
            near = (np.abs(times[left] - first) <= tolerance * np.maximum(times[left], first)).all(axis=1)
            parts.append([group[n] for n in left[near].tolist()])
            left = left[~near]
        return parts

    def _columns(self) -> tuple[Ints, list[Ints]]:
        """All but the times of the ops, in order; and for each rank where its resources stand among the shared ones."""
        graph, order = self._graph, self._order
        codes, sides = self._resources()
        resource = graph.column("resource")[order]
        bucket = np.full(len(graph.column("rank")), -1, dtype=np.int64)
        for n, b in enumerate(graph.buckets):
            bucket[list(b.ops)] = n
        plain = [graph.column(key)[order] for key in ("name", "kind", "priority", "tensor", "nbytes")]
        # one more code, for no resource: the last, where index -1 finds it
        columns = [*plain, np.append(codes, NO_RESOURCE)[resource], bucket[order]]
        self._apart.update(graph.column("rank")[order[columns[-2] < NO_RESOURCE]].tolist())
        return np.stack(columns, axis=1).astype(np.int64), sides

    def _resources(self) -> tuple[Ints, list[Ints]]:
        """By resource: its place among those of its rank; below -1 where it has no single rank. And the sides."""
        graph, rank, resource = self._graph, self._graph.column("rank"), self._graph.column("resource")
        main = graph.info.get("main_resource", {})
        used = np.flatnonzero(graph.column("alive") & (resource >= 0))
        users = np.concatenate([rank[used], np.array(list(main), dtype=np.int64)]) + 1
        base = int(users.max(initial=0)) + 1
        keys = np.unique(np.concatenate([resource[used], np.array(list(main.values()), dtype=np.int64)]) * base + users)
        pairs = np.stack([keys // base, keys % base - 1], axis=1)
        one = np.bincount(pairs[:, 0], minlength=len(graph.resource_names))[pairs[:, 0]] == 1
        owned = pairs[one & (pairs[:, 1] >= 0)]
        owned = owned[np.argsort(owned[:, 1], kind="stable")]
        codes = np.full(len(graph.resource_names), NO_RESOURCE - 1, dtype=np.int64)
        shared = np.setdiff1d(pairs[:, 0], owned[:, 0])
        bounds = np.append(np.searchsorted(owned[:, 1], self.ranks), len(owned))
        sides = []
        for i, r in enumerate(self.ranks.tolist()):
            own = owned[bounds[i] : bounds[i + 1], 0]
            codes[own] = np.arange(len(own))
            at = main.get(r)
            sides.append(np.append(np.searchsorted(shared, own), -1 if at is None else codes[at]))
        return codes, sides

    def _edges(self) -> list[Ints]:
        """By rank, its edges: places for its own ops, -1 - id for shared ones."""
        pairs = self._graph.edges()
        rank = self._graph.column("rank")[pairs]
        across = (rank >= 0).all(axis=1) & (rank[:, 0] != rank[:, 1])
        self._apart.update(rank[across].ravel().tolist())
        owner = rank.max(axis=1)
        pairs, rank, owner = pairs[owner >= 0], rank[owner >= 0], owner[owner >= 0]
        coded = np.where(rank >= 0, self._place[pairs], -1 - pairs)
        return self._slices(coded, owner)

    def _by_rank(self, table: dict[tuple[int, int], int]) -> list[Ints]:
        """By rank, (tensor, op) of an OUT or IN table, ops coded as edges are."""
        rows = np.array([(r, t, op) for (r, t), op in table.items()], dtype=np.int64).reshape(-1, 3)
        own = self._graph.column("rank")[rows[:, 2]] == rows[:, 0]
        coded = np.where(own, self._place[rows[:, 2]], -1 - rows[:, 2])
        return self._slices(np.stack([rows[:, 1], coded], axis=1), rows[:, 0])

    def _slices(self, rows: Ints, owner: Ints) -> list[Ints]:
        """``rows`` [n, 2] sorted, by rank of their owner."""
        order = np.lexsort((rows[:, 1], rows[:, 0], owner))
        rows, owner = rows[order], owner[order]
        starts, ends = (np.searchsorted(owner, self.ranks, side=side) for side in ("left", "right"))
        return [rows[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
