"""The global data-flow graph: ops are integers, everything about them is in numpy columns.

Knows structure only, not where the numbers came from. Edits go through an undo journal, so a
search tries thousands of edits on one graph without copying it. networkx is for people
(:meth:`Graph.to_networkx`), never for a hot loop.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    def name_of(self, op: int) -> str:
        return self.name_table[int(self._ops["name"][op])]

    # -- editing (journalled) ----------------------------------------------------------------

    def resource(self, name: str) -> int:
        """Id of a named resource, made on first use. Not journalled: an unused one costs nothing."""
        if name not in self._resource_ids:
            self._resource_ids[name] = len(self.resource_names)
            self.resource_names.append(name)
        return self._resource_ids[name]

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
        if name not in self._names:
            self._names[name] = len(self.name_table)
            self.name_table.append(name)
        row = (kind, resource, duration, gap, priority, tensor, rank, self._names[name], nbytes, True)
        for column, value in zip(self._ops.values(), row, strict=True):
            column[op] = value
        self._op_count = op + 1
        self._journal.append(("op",))
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
        self._journal.append(("edge",))
        self._arrays = None
        return edge

    def set(self, op: int, key: str, value: int) -> None:
        """Change one number of one op (``duration``, ``gap``, ``priority``, ``resource``, …)."""
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
        n = self._edge_count
        gone = np.zeros(self._op_count, "?")
        gone[dead] = True
        hit = self._edges["alive"][:n] & (gone[self._edges["src"][:n]] | gone[self._edges["dst"][:n]])
        edges = np.flatnonzero(hit)
        living = dead[self._ops["alive"][dead]]
        self._ops["alive"][living] = False
        self._edges["alive"][edges] = False
        self._journal.append(("kill", living, edges))
        self._arrays = None

    def set_buckets(self, buckets: list[Bucket]) -> None:
        self._journal.append(("buckets", self.buckets))
        self.buckets = buckets

    def set_tensors(self, tensors: list[TensorInfo]) -> None:
        """The same gradients in another form (fewer bytes); their ids stay what they are."""
        self._journal.append(("tensors", self.tensors))
        self.tensors = tensors

    def mark(self) -> int:
        return len(self._journal)

    def undo(self, mark: int) -> None:
        """Take back every edit made since ``mark``, newest first."""
        if len(self._journal) <= mark:
            return
        while len(self._journal) > mark:
            entry = self._journal.pop()
            what = entry[0]
            if what == "op":
                self._op_count -= 1
            elif what == "edge":
                self._edge_count -= 1
            elif what == "set":
                self._ops[entry[2]][entry[1]] = entry[3]
            elif what == "kill":
                self._ops["alive"][entry[1]] = True
                self._edges["alive"][entry[2]] = True
            elif what == "tensors":
                self.tensors = entry[1]
            else:
                self.buckets = entry[1]
        self._arrays = None

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
