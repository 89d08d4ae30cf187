"""Reader of MXNet's profiler files (``mx.profiler.dump``, 1.2 to 1.9).

Knows how ``src/profiler/profiler.h`` writes: a Chrome event list in which an op of the engine is a B and an E whose
pid is the number of its device and whose tid a hash of the thread, written one after the other when the op is over;
the same once more as b and e in the domain ``operator``, C API calls in ``MXNET_C_API``, counters, and a user's own
Task, Frame and Event. Ops are called by their operator (``Convolution``, ``_backward_Convolution``), not by their
node; :func:`named` finds that. Times are whole µs of ``std::chrono::high_resolution_clock``, which is CLOCK_REALTIME
with libstdc++ (seen with 1.9.1: between two readings of that clock around the capture).

An op that ends while its thread is already at the next one ran elsewhere (Horovod's and BytePS's ops end when the
communication does): it gets a lane of its own, so that the ops of a thread do not overlap. Ops are hidden in bulks
unless the profiler counts as well (``aggregate_stats=True``: with it 1.9.1 hands ops to its engine one by one);
``MXNET_EXEC_BULK_EXEC_TRAIN=0`` does nothing for a hybridised network.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dpro.errors import TraceError
from dpro.trace import dataflow
from dpro.trace.jsonstream import TraceFile, text
from dpro.trace.kineto import rank_in_name, to_ns
from dpro.trace.model import EventKind, Meta, RankTrace, TraceBuilder
from dpro.trace.steps import infer_steps

FRAMEWORK = "mxnet"
_DEVICE = re.compile(r"(?:cpu|gpu)/\d+|cpu pinned/|cpu shared/")
#: A profile shows what it is within its first records.
_SNIFFED_RECORDS = 20
_OPERATOR = "operator"
_INTERNAL = frozenset({_OPERATOR, "MXNET_C_API", "Device Storage"})
#: Ranges of a user's own that mark steps (``mx.profiler.Frame``, ``Task``).
_STEP_MARK = re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?|batch)\b", re.IGNORECASE)
_BEGINNINGS = ("B", "b", "(")
_RANGES = (*_BEGINNINGS, "E", "e", ")", "X")  # a Frame is in parentheses
_UPDATE = re.compile(r"(?:^|_)update(?:_|$)")
_BACKWARD = "_backward_"
_BULKS = frozenset({"ImperativeBulk", "SegmentOp", "BulkOp"})
_MAX_TIME_NS = 1 << 62
#: Choices of a step that are made anew before its ops keep their operators' names.
_MAX_RETRIES = 1_000
_MAX_DURATION_NS = 24 * 3600 * 10**9


def is_profile(path: Path) -> bool:
    """Whether the file is MXNet's, by its first records; a file that can't be read is none."""
    try:
        return any(_is_mxnet(record) for record in islice(TraceFile(path).records(), _SNIFFED_RECORDS))
    except TraceError:
        return False


def _is_mxnet(record: dict[str, Any]) -> bool:
    args = record.get("args")
    if record.get("ph") == "M":
        return isinstance(args, dict) and bool(_DEVICE.fullmatch(str(args.get("name", ""))))
    category = record.get("cat")
    return category == "MXNET_C_API" or (category == _OPERATOR and record.get("ph") in ("B", "E", "b", "e"))


def read(path: Path) -> RankTrace:
    """Read one rank's profile as far as it goes.

    ``meta.rank`` is -1 where the file name does not tell it.

    Raises:
        TraceError: the file cannot be read, is no JSON trace, or no op of MXNet's engine ran in it to its end.
    """
    file, reader = TraceFile(path), _Reader(path)
    for record in file.records():
        reader.take(record)
    return reader.finish(file.losses.warnings())


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self.ops: list[tuple[int, int, str, Any]] = []  # start, end, operator, tid
        self.ranges: list[tuple[int, int, str, Any]] = []  # a user's own
        #: pid, tid, name, how it is written -> times of beginnings without an end, and of ends that came first
        self._open: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        self._early: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)

    def take(self, record: dict[str, Any]) -> None:
        phase, category = str(record.get("ph")), str(record.get("cat", _OPERATOR))
        is_op = category == _OPERATOR and phase in ("B", "E", "X")
        if not is_op and (category in _INTERNAL or phase not in _RANGES):
            return
        at = to_ns(record.get("ts"))
        if at is None or not 0 <= at < _MAX_TIME_NS:
            self.counts["event(s) without a usable time dropped"] += 1
            return
        name, tid = text(str(record.get("name", ""))), str(record.get("tid"))
        rows = self.ops if is_op else self.ranges
        if phase == "X":
            duration = to_ns(record.get("dur", 0))
            rows.append((*self._span(at, at + (-1 if duration is None else duration)), name, tid))
            return
        key = (str(record.get("pid")), tid, name, category, str(record.get("id")))
        if phase in _BEGINNINGS:
            early = self._early[key]
            if early and early[-1] >= at:
                rows.append((*self._span(at, early.pop()), name, tid))
            else:
                self._open[key].append(at)
        elif self._open[key]:
            rows.append((*self._span(self._open[key].pop(), at), name, tid))
        else:
            self._early[key].append(at)

    def _span(self, start: int, end: int) -> tuple[int, int]:
        if not 0 <= end - start <= _MAX_DURATION_NS:
            self.counts["unfinished event(s) (negative or absurd duration) taken as 0 long"] += 1
            end = start
        return start, end

    def finish(self, lost: list[str]) -> RankTrace:
        for what, left in (("without an end", self._open), ("without a beginning", self._early)):
            if number := sum(map(len, left.values())):
                self.counts[f"event(s) {what} dropped"] += number
        warnings = [*lost, *(f"{count} {what}" for what, count in sorted(self.counts.items()))]
        if not self.ops:
            why = "no op of MXNet's engine in it: profile with profile_imperative or profile_all"
            raise TraceError(self.path, "; ".join([why, *warnings]))
        meta = Meta(rank=rank_in_name(self.path), source=str(self.path), clock="trace", framework=FRAMEWORK)
        meta.extra["dataflow"] = {}
        builder = TraceBuilder(meta)
        builder.warnings = warnings
        self.ops.sort(key=lambda op: (op[0], op[1]))
        for start, end, name, resource in _in_lanes(self.ops):
            builder.add(name, EventKind.CPU_OP, resource, start, end)
        for start, end, name, tid in self.ranges:
            builder.add(name, EventKind.ANNOTATION, f"cpu/{tid}", start, end)
        bulks = sum(name in _BULKS for _, _, name, _ in self.ops)
        if bulks:
            builder.warnings.append(f"{bulks} bulk(s) hide their ops: profile with aggregate_stats=True")
        return self._in_steps(builder)

    def _in_steps(self, builder: TraceBuilder) -> RankTrace:
        marks: list[tuple[int, int]] = []
        for start, end, name, _ in sorted(self.ranges):
            if _STEP_MARK.match(name) and end > start and (not marks or start >= marks[-1][1]):
                marks.append((start, end))
        edges = [] if marks else _step_edges(self.ops)
        if edges:
            last = max(end for _, end, _, _ in self.ops)
            marks = list(zip(edges, [*edges[1:], last], strict=True))
            builder.warnings.append(f"no step marks: {len(edges)} step(s) told by the optimizer's updates")
        trace = builder.freeze(marks)
        if not trace.steps:
            trace.step_bounds, how = infer_steps(trace)
            trace.warnings.append(f"no step marks: {how}")
            trace.assign_steps()
        return trace


def _in_lanes(ops: list[tuple[int, int, str, Any]]) -> list[tuple[int, int, str, str]]:
    """``ops`` (sorted by start) with a resource each: their thread, or a lane beside it where they outlast its next."""
    following: dict[Any, int] = {}
    outlasts = [False] * len(ops)
    for i in range(len(ops) - 1, -1, -1):
        start, end, _, tid = ops[i]
        outlasts[i] = tid in following and following[tid] < end
        following[tid] = start
    out = []
    busy: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)  # tid -> (busy until, lane)
    for (start, end, name, tid), aside in zip(ops, outlasts, strict=True):
        if not aside:
            out.append((start, end, name, f"cpu/{tid}"))
            continue
        lanes = busy[tid]
        lane = heapq.heappop(lanes)[1] if lanes and lanes[0][0] <= start else len(lanes)
        heapq.heappush(lanes, (end, lane))
        out.append((start, end, name, f"cpu/{tid}/aside{lane}"))
    return out


def _step_edges(ops: list[tuple[int, int, str, Any]]) -> list[int]:
    """Starts of the steps: of the first op after a backward pass and an update that has a gradient itself.

    What runs late (a reduction, a sum of gradients, an update of the step before) has none.
    """
    forward = {name.removeprefix(_BACKWARD) for _, _, name, _ in ops if name.startswith(_BACKWARD)}
    edges: list[int] = []
    backward = updated = False
    for start, _, name, _ in ops:
        if name.startswith(_BACKWARD):
            backward = True
        elif _UPDATE.search(name):
            updated = updated or backward
        elif name in forward and (updated or not edges):
            edges.append(start)
            backward = updated = False
    return edges if updated or len(edges) > 1 else []


# -- names -------------------------------------------------------------------------------------


def named(trace: RankTrace, symbol: str | bytes, source: object = "symbol") -> RankTrace:
    """``trace`` with its ops called by the nodes of ``symbol`` (JSON) that they ran, gradients ``<node>_backward``.

    An op of the trace ran a node of its operator of which all inputs were there. Where that leaves one, it is that;
    where several, it is the one whose inputs were there first, as the engine's queue for a CPU is first in, first out
    (ThreadedEnginePerDevice; one worker unless ``MXNET_CPU_WORKER_NTHREADS`` says otherwise). Yet a node that was
    overtaken by one that had to wait longer waits for something else (memory that another op still uses, or Python,
    which had not handed it in): it is taken when no other is left. Where a choice turns out wrong, as no node is left
    for an op behind it, the last one is made anew. A warning counts what was chosen among several, and says what keeps
    its operator's name: operators that ran more or less often than the symbol has nodes of them, and all from the first
    choice on where no choices fit. ``meta.extra`` gets ``dataflow`` and ``op_types``.

    Raises:
        TraceError: ``symbol`` is none.
    """
    nodes = dataflow.with_backward(dataflow.symbol_nodes(symbol, source))
    graph = _Nodes(nodes)
    operators = trace.names
    names = dict.fromkeys(operators)
    ids = {name: i for i, name in enumerate(names)}
    column = trace.name.copy()
    doubts, notes = 0, Counter[str]()
    is_op = trace.kind == EventKind.CPU_OP
    for step in range(trace.steps):
        rows = np.flatnonzero(is_op & (trace.step == step))
        runs = [
            (operators[name], start, end)
            for name, start, end in zip(
                trace.name[rows].tolist(), trace.start[rows].tolist(), trace.end[rows].tolist(), strict=True
            )
        ]
        found, doubtful, odd = graph.match(runs)
        doubts += doubtful
        notes.update(odd)
        for row, name in zip(rows.tolist(), found, strict=True):
            if name:
                column[row] = ids.setdefault(name, len(ids))
    warnings = list(trace.warnings)
    if doubts:
        warnings.append(f"{doubts} op(s) of {len(column)} called by the order of the engine's queue: several could run")
    warnings += [f"{what}, in {count} step(s)" for what, count in sorted(notes.items())]
    extra = {
        **trace.meta.extra,
        "dataflow": dataflow.inputs_of(nodes),
        "op_types": {node.name: node.op for node in nodes if node.op != "null"},
    }
    meta = replace(trace.meta, extra=extra)
    columns = {**trace.columns, "name": column}
    return replace(trace, meta=meta, columns=columns, names=list(ids), warnings=warnings)


@dataclass
class _State:
    """How far a step has come."""

    waits: list[int]  # inputs that are not there yet
    since: list[int]  # when the last one so far was
    ready: dict[str, list[int]] = field(default_factory=dict)  # operator -> nodes that could run
    latest: int = 0  # of the nodes that ran, how late one could

    def copy(self) -> _State:
        return _State(self.waits[:], self.since[:], {op: nodes[:] for op, nodes in self.ready.items()}, self.latest)

    def could(self, operator: str, start: int) -> list[int]:
        """The nodes that an op may be, likeliest first."""
        nodes = [i for i in self.ready.get(operator, []) if self.since[i] <= start]
        # overtaken ones last, and by their place; the others by how long they have waited
        return sorted(nodes, key=lambda i: (True, 0, i) if self.since[i] < self.latest else (False, self.since[i], i))


class _Nodes:
    """A symbol's nodes with what waits for each."""

    def __init__(self, nodes: list[dataflow.Node]) -> None:
        self.nodes = nodes
        place = {node.name: i for i, node in enumerate(nodes)}
        self.next: list[list[int]] = [[] for _ in nodes]
        for i, node in enumerate(nodes):
            for name in node.inputs:
                self.next[place[name]].append(i)
        self.per_operator = Counter(node.op for node in nodes)

    def match(self, runs: list[tuple[str, int, int]]) -> tuple[list[str], int, list[str]]:
        """Node names for one step's ops (operator, start, end; sorted by start), "" where none is sure enough.

        With the number of choices among several, and remarks.
        """
        ran = Counter(operator for operator, _, _ in runs)
        odd = {op: self.per_operator[op] for op, n in ran.items() if self.per_operator[op] not in (0, n)}
        notes = [f"{op} not called by nodes: it ran {ran[op]} times, the symbol has {n}" for op, n in odd.items()]
        known = {op for op in ran if op in self.per_operator} - set(odd)
        state = _State([len(node.inputs) for node in self.nodes], [0] * len(self.nodes))
        self._free(state, [i for i, number in enumerate(state.waits) if not number], known)
        found = [-1] * len(runs)
        doubts: list[int] = []  # ops that could have been several nodes
        untried: list[tuple[int, _State, list[int]]] = []  # where another choice is left
        retries, k = 0, 0
        while k < len(runs):
            operator, start, _ = runs[k]
            if operator not in known:
                k += 1
                continue
            could = state.could(operator, start)
            if len(could) > 1:
                doubts.append(k)
            elif not could and untried and retries < _MAX_RETRIES:
                retries += 1
                k, state, could = untried.pop()
                del doubts[bisect_right(doubts, k) :]
            elif not could:
                found[doubts[0] if doubts else k :] = []
                notes.append("ops run in an order that the symbol does not allow: the rest of them not called by nodes")
                doubts = []
                break
            if len(could) > 1:
                untried.append((k, state.copy(), could[1:]))
            found[k] = could[0]
            self._run(state, could[0], runs[k][2], known)
            k += 1
        names = [self.nodes[i].name if i >= 0 else "" for i in found]
        return names + [""] * (len(runs) - len(names)), len(doubts), notes

    def _run(self, state: _State, i: int, end: int, known: set[str]) -> None:
        """Node ``i`` runs until ``end``."""
        state.ready[self.nodes[i].op].remove(i)
        state.latest = max(state.latest, state.since[i])
        self._free(state, self._done(state, i, end), known)

    def _free(self, state: _State, nodes: list[int], known: set[str]) -> None:
        """What these wait for is there; those without an op of their own are over as soon."""
        while nodes:
            i = nodes.pop()
            if self.nodes[i].op in known:
                state.ready.setdefault(self.nodes[i].op, []).append(i)
            else:
                nodes += self._done(state, i, state.since[i])

    def _done(self, state: _State, i: int, when: int) -> list[int]:
        """The nodes that have nothing left to wait for when node ``i`` is over."""
        free = []
        for j in self.next[i]:
            state.waits[j] -= 1
            state.since[j] = max(state.since[j], when)
            if not state.waits[j]:
                free.append(j)
        return free
