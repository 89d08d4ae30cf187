"""The global data-flow graph: ops are integers, everything about them is in numpy columns.

Knows structure only, not where the numbers came from. Edits go through an undo journal, so a
search tries thousands of edits on one graph without copying it. networkx is for people
(:meth:`Graph.to_networkx`), never for a hot loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import networkx


class OpKind(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    SEND = 3
    RECV = 4
    COLLECTIVE = 5
    LOCAL = 6  # copies, queueing, launches, contention
    IN = 7  # where a reduced tensor becomes usable
    OUT = 8  # where a gradient becomes ready


#: Runs at once when ready: ops on it never wait for each other.
NO_RESOURCE = -1

_OP_COLUMNS: dict[str, str] = {
    "kind": "u1",
    "resource": "i4",
    "duration": "i8",  # ns
    "gap": "i8",  # ns between being ready and being able to start (launch latency, host gap)
    "priority": "i4",  # smaller first among ops waiting for one resource
    "tensor": "i4",
    "rank": "i4",
    "name": "i4",
    "nbytes": "i8",
    "alive": "?",
}


@dataclass
class Bucket:
    """Tensors that are synchronised together (a DDP bucket, a Horovod group).

    ``ops`` are the graph ops that stand for its synchronisation, all of them, in no order.
    """

    tensors: tuple[int, ...]
    nbytes: int
    ops: tuple[int, ...] = ()


@dataclass
class TensorInfo:
    name: str
    nbytes: int
    dtype: str = ""
    ready: int = -1


@dataclass(frozen=True)
class Changes:
    """What edits did to a graph. ``changed`` ops were there before and are still; op and edge ids that are not below
    ``first_op`` and ``first_edge`` are new (and may be dead again).
    """

    changed: list[int]
    removed: list[int]
    first_op: int
    first_edge: int


@dataclass(frozen=True)
class Arrays:
    """A frozen view for the engine: living ops only, successors in CSR form.

    ``ids[i]`` is the graph's op for row i. ``indices[indptr[i]:indptr[i+1]]`` are the rows that
    depend on row i.
    """

    ids: npt.NDArray[np.int32]
    resource: npt.NDArray[np.int32]
    duration: npt.NDArray[np.int64]
    gap: npt.NDArray[np.int64]
    priority: npt.NDArray[np.int32]
    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    resources: int


class Graph:
    """Ops, edges, and what they synchronise. See the module text.

    A *mark* is a place in the journal; :meth:`undo` takes the graph back to it exactly.
    """

    def __init__(self) -> None:
        self._ops = {key: np.zeros(64, dtype) for key, dtype in _OP_COLUMNS.items()}
        self._edges = {"src": np.zeros(64, "i4"), "dst": np.zeros(64, "i4"), "alive": np.zeros(64, "?")}
        self._op_count = 0
        self._edge_count = 0
        self._journal: list[tuple[Any, ...]] = []
        self._incident: _Incident | None = None
        self._arrays: Arrays | None = None
        self._names: dict[str, int] = {}
        self.name_table: list[str] = []
        self.resource_names: list[str] = []
        self._resource_ids: dict[str, int] = {}
        #: One entry per gradient, the same on every rank.
        self.tensors: list[TensorInfo] = []
        self.buckets: list[Bucket] = []
        #: (rank, tensor) -> op where the gradient is ready / where the reduced one is first needed
        self.out_op: dict[tuple[int, int], int] = {}
        self.in_op: dict[tuple[int, int], int] = {}
        self.ranks: int = 0
        #: what the builder learnt and later floors need (costs, host thread of each rank, …)
        self.info: dict[str, Any] = {}
        self.warnings: list[str] = []

    # -- reading ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of living ops."""
        return int(np.count_nonzero(self._ops["alive"][: self._op_count]))

    def column(self, key: str) -> npt.NDArray[Any]:
        """Read-only column over all op ids ever made (dead ones included: check ``alive``)."""
        view = self._ops[key][: self._op_count]
        view.flags.writeable = False
        return view

    def edges(self) -> npt.NDArray[np.int32]:
        """Living edges, int32 [edges, 2]."""
        n = self._edge_count
        keep = self._edges["alive"][:n]
        return np.stack([self._edges["src"][:n][keep], self._edges["dst"][:n][keep]], axis=1)

    def edges_since(self, first: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(sources, destinations) of the living edges with ids from ``first`` on."""
        keep = first + np.flatnonzero(self._edges["alive"][first : self._edge_count])
        return self._edges["src"][keep], self._edges["dst"][keep]

    def name_of(self, op: int) -> str:
        return self.name_table[int(self._ops["name"][op])]

    # -- editing (journalled) ----------------------------------------------------------------

    def resource(self, name: str) -> int:
        """Id of a named resource, made on first use. Not journalled: an unused one costs nothing."""
        if name not in self._resource_ids:
            self._resource_ids[name] = len(self.resource_names)
            self.resource_names.append(name)
        return self._resource_ids[name]

    def name(self, name: str) -> int:
        """Number of a name in :attr:`name_table`; as :meth:`resource`."""
        if name not in self._names:
            self._names[name] = len(self.name_table)
            self.name_table.append(name)
        return self._names[name]

    def numbers(self, names: Sequence[str]) -> npt.NDArray[np.int32]:
        """:meth:`name` of each."""
        known, table = self._names, self.name_table
        for name in names:
            if name not in known:
                known[name] = len(table)
                table.append(name)
        return np.fromiter((known[name] for name in names), np.int32, len(names))

    def add_op(
        self,
        name: str,
        kind: OpKind,
        *,
        resource: int = NO_RESOURCE,
        duration: int = 0,
        gap: int = 0,
        priority: int = 0,
        tensor: int = -1,
        rank: int = -1,
        nbytes: int = -1,
        after: tuple[int, ...] | list[int] = (),
    ) -> int:
        """Append one op, with edges from every op in ``after``. Returns its id."""
        op = self._op_count
        if op == len(self._ops["kind"]):
            self._ops = {key: np.resize(column, 2 * op) for key, column in self._ops.items()}
        row = (kind, resource, duration, gap, priority, tensor, rank, self.name(name), nbytes, True)
        for column, value in zip(self._ops.values(), row, strict=True):
            column[op] = value
        self._op_count = op + 1
        self._journal.append(("ops", 1))
        self._arrays = None
        for before in after:
            self.add_edge(before, op)
        return op

    def add_edge(self, src: int, dst: int) -> int:
        """``dst`` may start only after ``src`` ended. Returns the edge id.

        Raises:
            ValueError: one of them was removed, or never made.
        """
        for op in (src, dst):
            if not (0 <= op < self._op_count and self._ops["alive"][op]):
                raise ValueError(f"edge {src} -> {dst}: there is no op {op}")
        edge = self._edge_count
        if edge == len(self._edges["src"]):
            self._edges = {key: np.resize(column, 2 * edge) for key, column in self._edges.items()}
        self._edges["src"][edge] = src
        self._edges["dst"][edge] = dst
        self._edges["alive"][edge] = True
        self._edge_count = edge + 1
        self._journal.append(("edges", 1))
        self._arrays = None
        return edge

    def add_ops(
        self,
        name: str | npt.NDArray[np.int32],
        kind: OpKind | npt.NDArray[np.uint8],
        count: int,
        **columns: npt.NDArray[Any] | int,
    ) -> npt.NDArray[np.int64]:
        """:meth:`add_op` for ``count`` ops at once; columns left out are as there. Returns their ids.

        Args:
            name: of all, or of each by its number (:meth:`name`).
        """
        first, last = self._op_count, self._op_count + count
        if last > (room := len(self._ops["kind"])):
            self._ops = {key: np.resize(column, max(2 * room, last)) for key, column in self._ops.items()}
        values: dict[str, Any] = {
            "resource": NO_RESOURCE, "duration": 0, "gap": 0, "priority": 0, "tensor": -1, "rank": -1, "nbytes": -1,
            **columns, "kind": kind, "name": self.name(name) if isinstance(name, str) else name, "alive": True,
        }  # fmt: skip
        for key, column in self._ops.items():
            column[first:last] = values[key]
        self._op_count = last
        self._journal.append(("ops", count))
        self._arrays = None
        return np.arange(first, last)

    def add_edges(self, pairs: npt.NDArray[Any]) -> None:
        """:meth:`add_edge` for every row of ``pairs`` [n, 2].

        Raises:
            ValueError: an op was removed, or never made.
        """
        if len(pairs) and (pairs.min() < 0 or pairs.max() >= self._op_count or not self._ops["alive"][pairs].all()):
            raise ValueError("an edge of an op that is not there")
        first, last = self._edge_count, self._edge_count + len(pairs)
        if last > (room := len(self._edges["src"])):
            self._edges = {key: np.resize(column, max(2 * room, last)) for key, column in self._edges.items()}
        self._edges["src"][first:last], self._edges["dst"][first:last] = pairs[:, 0], pairs[:, 1]
        self._edges["alive"][first:last] = True
        self._edge_count = last
        self._journal.append(("edges", len(pairs)))
        self._arrays = None

    def set(self, op: int, key: str, value: int) -> None:
        """Change one number of one op (``duration``, ``gap``, ``priority``, ``resource``, …)."""
        op = int(op)
        self._journal.append(("set", op, key, self._ops[key][op].item()))
        self._ops[key][op] = value
        self._arrays = None

    def set_many(self, ops: npt.NDArray[Any], key: str, values: npt.NDArray[Any]) -> None:
        """:meth:`set` for many ops at once; ``values`` are rounded to whole numbers."""
        ops = np.array(ops)  # the caller's array may change before the undo
        self._journal.append(("set", ops, key, self._ops[key][ops]))
        self._ops[key][ops] = np.rint(values)
        self._arrays = None

    def scale(self, ops: npt.NDArray[Any], factor: float) -> None:
        """Multiply the durations of many ops."""
        self.set_many(ops, "duration", self._ops["duration"][ops] * factor)

    def remove_ops(self, ops: tuple[int, ...] | list[int]) -> None:
        """Kill ops and every edge that touches them. Ids are never used again."""
        dead = np.asarray(ops, dtype=np.int64)
        edges = self._edges_of(dead)
        living = dead[self._ops["alive"][dead]]
        self._ops["alive"][living] = False
        self._edges["alive"][edges] = False
        self._journal.append(("kill", living, edges))
        self._arrays = None

    def _edges_of(self, ops: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Living edges that touch any of ``ops``. Old ones are looked up, so that one bucket's ops cost little."""
        n = self._edge_count
        gone = np.zeros(self._op_count, "?")
        gone[ops] = True
        if _MANY * len(ops) > n:
            every = self._edges["alive"][:n] & (gone[self._edges["src"][:n]] | gone[self._edges["dst"][:n]])
            return np.flatnonzero(every)
        known = self._incident
        if known is None or n - known.edges > _UNINDEXED + known.edges // 4:
            known = self._incident = _Incident(self._edges["src"][:n], self._edges["dst"][:n], self._op_count)
        src, dst = self._edges["src"][known.edges : n], self._edges["dst"][known.edges : n]
        fresh = known.edges + np.flatnonzero(gone[src] | gone[dst])
        found = np.unique(np.concatenate([known.of(ops), fresh]))
        living: npt.NDArray[np.int64] = found[self._edges["alive"][found]]
        return living

    def set_buckets(self, buckets: list[Bucket]) -> None:
        self._journal.append(("buckets", self.buckets))
        self.buckets = buckets

    def set_tensors(self, tensors: list[TensorInfo]) -> None:
        """The same gradients in another form (fewer bytes); their ids stay what they are."""
        self._journal.append(("tensors", self.tensors))
        self.tensors = tensors

    def mark(self) -> int:
        return len(self._journal)

    def changes(self, mark: int) -> Changes:
        """What the edits since ``mark`` come to."""
        first_op, first_edge = self._op_count, self._edge_count
        changed: list[int] = []
        removed: list[int] = []
        for entry in self._journal[mark:]:
            what = entry[0]
            if what == "ops":
                first_op -= entry[1]
            elif what == "edges":
                first_edge -= entry[1]
            elif what == "set":
                changed += [entry[1]] if isinstance(entry[1], int) else entry[1].tolist()
            elif what == "kill":
                removed += entry[1].tolist()
        gone = {op for op in removed if op < first_op}
        kept = {op for op in changed if op < first_op} - gone
        return Changes(sorted(kept), sorted(gone), first_op, first_edge)

    def undo(self, mark: int) -> None:
        """Take back every edit made since ``mark``, newest first."""
        if len(self._journal) <= mark:
            return
        while len(self._journal) > mark:
            entry = self._journal.pop()
            what = entry[0]
            if what == "ops":
                self._op_count -= entry[1]
            elif what == "edges":
                self._edge_count -= entry[1]
            elif what == "set":
                self._ops[entry[2]][entry[1]] = entry[3]
            elif what == "kill":
                self._ops["alive"][entry[1]] = True
                self._edges["alive"][entry[2]] = True
            elif what == "tensors":
                self.tensors = entry[1]
            else:
                self.buckets = entry[1]
        if self._incident is not None and self._incident.edges > self._edge_count:
            self._incident = None  # it has ids of edges that will be given anew
        self._arrays = None

    # -- copying -----------------------------------------------------------------------------

    def subgraph(self, keep: npt.NDArray[np.bool_]) -> tuple[Graph, npt.NDArray[np.int32]]:
        """A new graph of the living ops in ``keep`` [ops ever made] and the edges among them, in the same order.

        Resources, names and tensors are the same, ``info`` and ``warnings`` copied, the journal is empty. Of
        ``buckets``, ``out_op`` and ``in_op`` it has what points at kept ops only. Also returns, by old op, the
        new one (-1: not kept).
        """
        ids = np.flatnonzero(keep & self.column("alive"))
        new = np.full(self._op_count, -1, dtype=np.int32)
        new[ids] = np.arange(len(ids), dtype=np.int32)
        out = Graph()
        # never empty: an array grows by doubling
        out._ops = {key: np.append(column[ids], column[:1]) for key, column in self._ops.items()}
        pairs = new[self.edges()]
        pairs = pairs[(pairs >= 0).all(axis=1)]
        out._edges = {
            "src": np.append(pairs[:, 0], pairs.dtype.type(0)),
            "dst": np.append(pairs[:, 1], pairs.dtype.type(0)),
            "alive": np.ones(len(pairs) + 1, "?"),
        }
        out._op_count, out._edge_count = len(ids), len(pairs)
        out._names, out.name_table = dict(self._names), list(self.name_table)
        out._resource_ids, out.resource_names = dict(self._resource_ids), list(self.resource_names)
        out.tensors = [replace(tensor) for tensor in self.tensors]
        for bucket in self.buckets:
            ops = tuple(int(new[op]) for op in bucket.ops if new[op] >= 0)
            out.buckets.append(replace(bucket, ops=ops))
        out.out_op = {key: int(new[op]) for key, op in self.out_op.items() if new[op] >= 0}
        out.in_op = {key: int(new[op]) for key, op in self.in_op.items() if new[op] >= 0}
        out.ranks, out.info, out.warnings = self.ranks, dict(self.info), list(self.warnings)
        return out, new

    # -- freezing ----------------------------------------------------------------------------

    def arrays(self) -> Arrays:
        """The engine's view; kept until the next edit."""
        if self._arrays is None:
            n = self._op_count
            alive = self._ops["alive"][:n]
            ids = np.flatnonzero(alive).astype(np.int32)
            row = np.full(n, -1, dtype=np.int32)
            row[ids] = np.arange(len(ids), dtype=np.int32)
            pairs = self.edges()
            src, dst = row[pairs[:, 0]], row[pairs[:, 1]]
            order = np.argsort(src, kind="stable")
            indptr = np.zeros(len(ids) + 1, dtype=np.int64)
            np.cumsum(np.bincount(src, minlength=len(ids)), out=indptr[1:])
            keys = ("resource", "duration", "gap", "priority")
            take = {key: np.ascontiguousarray(self._ops[key][ids]) for key in keys}
            self._arrays = Arrays(
                ids=ids,
                indptr=indptr,
                indices=np.ascontiguousarray(dst[order]),
                resources=len(self.resource_names),
                **take,
            )
        return self._arrays

    def to_networkx(self) -> networkx.DiGraph:
        """A networkx copy for analysis and drawing; node attributes are the columns."""
        import networkx

        out = networkx.DiGraph()
        for op in np.flatnonzero(self.column("alive")).tolist():
            attributes = {key: self._ops[key][op].item() for key in _OP_COLUMNS if key not in ("alive", "name", "kind")}
            out.add_node(op, name=self.name_of(op), kind=OpKind(self._ops["kind"][op]).name, **attributes)
        out.add_edges_from(map(tuple, self.edges().tolist()))
        return out


#: So many edges, and a fourth of all, may be new before all are indexed again.
_UNINDEXED = 4096
#: Of ops that are more than one in so many edges, all edges are looked at.
_MANY = 200


class _Incident:
    """The edges that there were when it was made, by the ops that they touch, dead ones too."""

    def __init__(self, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32], ops: int) -> None:
        self.edges = len(src)
        ends = np.concatenate([src, dst])
        self._order = np.argsort(ends, kind="stable")
        self._first = np.searchsorted(ends[self._order], np.arange(ops + 1))

    def of(self, ops: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        known = ops[ops < len(self._first) - 1]
        found = [self._order[self._first[op] : self._first[op + 1]] for op in known.tolist()]
        return np.concatenate(found) % max(1, self.edges) if found else np.zeros(0, np.int64)
