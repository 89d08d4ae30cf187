"""From a profile of MXNet's engine with dpro's marks in it to the rows that the graph is built from.

Imports no framework: what the profiler wrote and what Python noted meanwhile is all it needs.

The engine's ops have the names of their operators; which gradient an ``allreduce`` is of, or an update, the profile
does not say. A mark that reads the gradient runs right before its ``allreduce`` begins, and another when it is over:
they know the gradient, the op knows the time. Update ops are told by when they could run: the engine's queue is first
in, first out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dpro.errors import TraceError
from dpro.trace import dataflow, mxnet
from dpro.trace.horovod import SUBMIT, WAIT
from dpro.trace.model import EventKind, RankTrace, TraceBuilder

MARK = "dpro/"
STEP_MARK = "dpro/step"
HANDED_MARK = "dpro/handed/"
REDUCED_MARK = "dpro/reduced/"
#: Ops of the engine's own that are no part of the model.
_HOUSEKEEPING = frozenset({"DeleteVariable", "WaitForVar", "DeleteOperator"})
_GRAPH = "the model's graph"
_ASIDE = re.compile(r"/aside\d+$")
_UPDATE = re.compile(r"(?:^|_)update(?:_|$)")
#: Reads all gradients at once before anything is updated (loss scaling).
_LOOKS_AT_ALL = re.compile(r"^(?:multi_)?all_finite$")
#: The profiler's times are whole µs.
_TICK_NS = 1_000


@dataclass
class Log:
    """What Python handed to the engine in the captured steps, in its order. Gradients by number."""

    #: when the first step began: the engine had nothing to do; ns on the trace's clock
    begin: int = 0
    #: of each call of the library, by the number in its mark; () for what is no gradient
    handed: list[tuple[int, ...]] = field(default_factory=list)
    #: of each update, by step
    updates: list[list[tuple[int, ...]]] = field(default_factory=list)


@dataclass
class _Reduction:
    """One op of the library: handed in from ``start`` to ``handed``, through at ``end``; ns."""

    numbers: tuple[int, ...]
    resource: str
    start: int
    handed: int
    end: int


def rows(
    raw: RankTrace, log: Log, names: Sequence[str], operators: Iterable[str], symbol: str
) -> tuple[RankTrace, list[int]]:
    """The trace of the captured steps, and the gradients in the order in which they were ready in the last of them.

    Args:
        raw: what :func:`dpro.trace.mxnet.read` read, on whichever clock the trace is to have.
        names: of the gradients, by number: those of their parameters.
        operators: ops of the library's that end when the communication does.
        symbol: JSON of the model's graph, "" where it has none.

    Raises:
        RuntimeError: the marks are not in it.
    """
    library = set(operators)
    by_name = _rows_by_name(raw)
    bounds = _bounds(raw, by_name, log.begin)
    if len(bounds) < 2:
        raise RuntimeError("the profile has no step in it")
    reductions = _reductions(raw, log, by_name, [row for name in library for row in by_name.get(name, [])])
    aside = [row for name, found in by_name.items() if _is_aside(name, library) for row in found]
    keep = np.ones(len(raw), dtype=bool)
    keep[aside] = False
    trace = replace(
        raw,
        columns={key: column[keep] for key, column in raw.columns.items()},
        step_bounds=np.array(list(pairwise(bounds)), dtype=np.int64).reshape(-1, 2),
        warnings=[line for line in raw.warnings if not line.startswith("no step marks")],
    )
    trace = _on_their_threads(trace)
    trace.sort()
    trace.assign_steps()
    operator_of = np.array(trace.names, dtype=object)[trace.name]
    if symbol:
        try:
            told = replace(trace, columns=trace.columns | {"step": _passes(trace, operator_of, symbol)})
            trace = mxnet.named(told, symbol, _GRAPH)
        except TraceError as error:
            trace.warnings.append(f"ops keep their operators' names: {error}")
        trace.assign_steps()
    return _with_gradients(trace, operator_of, reductions, log, names, sorted(library)[0] if library else "reduce")


def _bounds(raw: RankTrace, by_name: dict[str, list[int]], begin: int) -> list[int]:
    """Where steps begin and end: with the last update.

    A mark runs some time after it, while the worker goes on; but no update of the next step can, for it would write
    what the mark reads.
    """
    updates = np.sort(raw.end[[row for name, found in by_name.items() if _UPDATE.search(name) for row in found]])
    bounds = [begin]
    for mark in np.sort(raw.start[by_name.get(STEP_MARK, [])]).tolist():
        before = updates[: np.searchsorted(updates, mark + _TICK_NS, side="right")]
        over = int(before[-1]) if len(before) else mark
        bounds.append(over if over > bounds[-1] else mark)
    return bounds


def _passes(trace: RankTrace, operator_of: npt.NDArray[np.object_], symbol: str) -> npt.NDArray[np.int32]:
    """The step whose pass through the graph an op is of: the next forward pass may begin before the last update."""
    nodes = dataflow.symbol_nodes(symbol, _GRAPH)
    forward = {node.op for node in nodes}
    backward = {node.op for node in dataflow.with_backward(nodes)} - forward
    is_forward, is_backward = np.isin(operator_of, list(forward)), np.isin(operator_of, list(backward))
    steps: npt.NDArray[np.int32] = trace.step.astype(np.int32)
    for step in range(trace.steps):
        mine = trace.step == step
        over = trace.end[mine & is_backward].max(initial=0)
        if over:
            steps[mine & is_forward & (trace.start >= over)] += 1
    steps[steps == trace.steps] = -1
    return steps


def _on_their_threads(trace: RankTrace) -> RankTrace:
    """Ops that were set aside from their thread because housekeeping ran inside of them, back on it."""
    home = [_ASIDE.sub("", name) for name in trace.resources]
    places = {name: i for i, name in enumerate(dict.fromkeys([*trace.resources, *home]))}
    moved = np.array([places[name] for name in home], dtype=np.int64)
    column = moved[trace.resource].astype(trace.resource.dtype)
    order = np.lexsort((trace.start, column))
    same = column[order][1:] == column[order][:-1]
    over = order[:-1][same & (trace.end[order][:-1] > trace.start[order][1:])]
    column[over] = trace.resource[over]  # what outlasts the next one all the same stays where it is
    return replace(trace, columns={**trace.columns, "resource": column}, resources=list(places))


def _is_aside(name: str, library: set[str]) -> bool:
    return name.startswith(MARK) or name in library or name in _HOUSEKEEPING


def _rows_by_name(trace: RankTrace) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row, name in enumerate(trace.name.tolist()):
        if trace.kind[row] == EventKind.CPU_OP:
            found.setdefault(trace.names[name], []).append(row)
    return found


def _reductions(raw: RankTrace, log: Log, by_name: dict[str, list[int]], ran: list[int]) -> list[_Reduction]:
    """Every call that was handed in and came to its end."""
    handed, reduced = _numbered(by_name, HANDED_MARK), _numbered(by_name, REDUCED_MARK)
    calls = sorted(
        (int(raw.start[reduced[number]]), number) for number in handed if number in reduced and number < len(log.handed)
    )
    # ops end in the order in which what reads their results can run
    ops = sorted((int(raw.end[row]), int(raw.start[row])) for row in ran)
    if len(ops) != len(calls) or any(end > at + _TICK_NS for (end, _), (at, _) in zip(ops, calls, strict=True)):
        ops = [(at, at) for at, _ in calls]
    out = []
    for (end, began), (_, number) in zip(ops, calls, strict=True):
        row = handed[number]
        start, over = int(raw.start[row]), int(raw.end[row])
        if not over - _TICK_NS <= began < end:  # the time of another, which ended when this one did
            began = over
        if log.handed[number]:
            resource = raw.resources[raw.resource[row]]
            out.append(_Reduction(log.handed[number], resource, start, max(began, start), max(end, began)))
    return out


def _numbered(by_name: dict[str, list[int]], prefix: str) -> dict[int, int]:
    """Rows of marks called ``prefix`` and a number, by number."""
    found = {}
    for name, rows_ in by_name.items():
        digits = name.removeprefix(prefix)
        if digits != name and digits.isdecimal():
            found[int(digits)] = rows_[0]
    return found


def _with_gradients(
    trace: RankTrace,
    operator_of: npt.NDArray[np.object_],
    reductions: list[_Reduction],
    log: Log,
    names: Sequence[str],
    operator: str,
) -> tuple[RankTrace, list[int]]:
    """``trace`` with an op for each hand-in, updates by their parameters, SUBMIT and WAIT rows; the ready order."""
    flow: dict[str, list[str]] = dict(trace.meta.extra.get("dataflow", {}))
    producers, readers = _producers(flow, names), _readers(flow, names)
    place = {name: i for i, name in enumerate(trace.names)}
    column = trace.name.copy()
    more = TraceBuilder(trace.meta)
    ready: list[int] = []
    for step, (begin, end) in enumerate(trace.step_bounds.tolist()):
        mine = [r for r in reductions if begin <= r.start < end]
        in_step = np.flatnonzero((trace.step == step) & (trace.kind == EventKind.CPU_OP))
        gradients = np.array([str(operator).startswith("_backward_") for operator in operator_of[in_step]], dtype=bool)
        users = _users(trace, operator_of, in_step, mine, log.updates[step] if step < len(log.updates) else [])
        carriers: dict[int, str] = {}
        there: dict[int, int] = {}  # gradient -> when what computed it ended
        _clip(mine)
        for r in mine:
            name = f"{operator}/{names[r.numbers[0]]}" + (f"+{len(r.numbers) - 1}" if len(r.numbers) > 1 else "")
            more.add(name, EventKind.CPU_OP, r.resource, r.start, r.handed)
            before = dict.fromkeys(p for number in r.numbers for p in producers.get(number, ()))
            row = _just_before(trace, in_step, r.start, set(before))
            if row is None:
                row = _just_before(trace, in_step[gradients], r.start)
            elapsed = r.start if row is None else int(trace.end[row])
            flow[name] = list(before) or ([] if row is None else [trace.names[trace.name[row]]])
            carriers.update(dict.fromkeys(r.numbers, name))
            there.update(dict.fromkeys(r.numbers, elapsed))
        ready = _ready_order(there, producers, flow)
        for row, numbers, update in users:
            if update:
                name = f"{names[numbers[0]]}_{operator_of[row]}"
                column[row] = place.setdefault(name, len(place))
                flow[name] = list(dict.fromkeys(carriers[n] for n in numbers if n in carriers))
                for node in dict.fromkeys(node for n in numbers for node in readers.get(n, ())):
                    if name not in flow[node]:  # in the next pass: what is still to be written is read by nobody
                        flow[node] = [*flow[node], name]
        for r in mine:
            for number in r.numbers:
                more.add(SUBMIT, EventKind.ANNOTATION, r.resource, r.start, r.handed, tensor=number)
                used = [(int(trace.start[row]), update) for row, numbers, update in users if number in numbers]
                if used and min(used)[0] >= r.handed:
                    first, update = min(used)
                    # an update is tied to the hand-in by its name, and may have waited for its turn since
                    there_at = min(first, r.end) if update else first
                    more.add(WAIT, EventKind.ANNOTATION, r.resource, r.handed, there_at, tensor=number)
    trace.meta.extra["dataflow"] = flow
    trace = replace(trace, columns={**trace.columns, "name": column}, names=list(place))
    return trace.joined(more.freeze([])), ready


def _clip(reductions: list[_Reduction]) -> None:
    """A thread is free again when its next hand-in begins."""
    last: dict[str, _Reduction] = {}
    for r in sorted(reductions, key=lambda r: r.start):
        if r.resource in last:
            before = last[r.resource]
            before.handed = max(before.start, min(before.handed, r.start))
        last[r.resource] = r


def _producers(flow: dict[str, list[str]], names: Sequence[str]) -> dict[int, list[str]]:
    """Gradient -> the nodes that compute it: gradients of the nodes that read its parameter."""
    number = {name: i for i, name in enumerate(names)}
    found: dict[int, list[str]] = {}
    for node, inputs in flow.items():
        for name in inputs:
            if name in number and f"{node}_backward" in flow:
                found.setdefault(number[name], []).append(f"{node}_backward")
    return found


def _readers(flow: dict[str, list[str]], names: Sequence[str]) -> dict[int, list[str]]:
    """Gradient -> the nodes that read its parameter."""
    number = {name: i for i, name in enumerate(names)}
    found: dict[int, list[str]] = {}
    for node, inputs in flow.items():
        for name in inputs:
            if name in number:
                found.setdefault(number[name], []).append(node)
    return found


def _ready_order(there: dict[int, int], producers: dict[int, list[str]], flow: dict[str, list[str]]) -> list[int]:
    """Gradients by when they were there; those that Python handed in late, all at once, by the graph.

    What one op computes is there together.
    """
    place = {name: i for i, name in enumerate(flow)}  # a graph's nodes come in an order in which they can run
    of_graph = {n: max((place[name] for name in producers.get(n, ())), default=-1) for n in there}
    first: dict[int, int] = {}
    for number, elapsed in there.items():
        key = of_graph[number] if of_graph[number] >= 0 else -2 - number
        first[key] = min(elapsed, first.get(key, elapsed))

    def order(number: int) -> tuple[int, int, int]:
        key = of_graph[number]
        return first[key if key >= 0 else -2 - number], key, number

    return sorted(there, key=order)


def _just_before(
    trace: RankTrace, in_step: npt.NDArray[np.int64], start: int, called: set[str] | None = None
) -> int | None:
    """The op whose end let a mark run, by the clock; of those ``called`` so, if given."""
    ended = in_step[trace.end[in_step] <= start + _TICK_NS]
    if called is not None:
        wanted = [i for i, name in enumerate(trace.names) if name in called]
        ended = ended[np.isin(trace.name[ended], wanted)]
    return int(ended[np.argmax(trace.end[ended])]) if len(ended) else None


def _users(
    trace: RankTrace,
    operator_of: npt.NDArray[np.object_],
    in_step: npt.NDArray[np.int64],
    reductions: list[_Reduction],
    updates: list[tuple[int, ...]],
) -> list[tuple[int, tuple[int, ...], bool]]:
    """Ops that use reduced gradients: (row, gradients, whether it is one update, of those)."""
    reduced = {number: r.end for r in reductions for number in r.numbers}
    everything = tuple(reduced)
    found: list[tuple[int, tuple[int, ...], bool]] = []
    ran = []
    for row in in_step.tolist():
        operator = str(operator_of[row])
        if _UPDATE.search(operator):
            ran.append(row)
        elif _LOOKS_AT_ALL.match(operator):
            found.append((row, everything, False))
    # in the order in which they could run: when the last of their gradients was there, else as they were pushed
    ready = sorted((max((reduced.get(n, 0) for n in u), default=0), place, u) for place, u in enumerate(updates) if u)
    starts = [int(trace.start[row]) for row in ran]
    # a mark may come late, on a busy core, but nothing is used before it was handed in
    handed = {number: r.handed for r in reductions for number in r.numbers}
    fits = all(
        start >= max((handed.get(n, 0) for n in u), default=0) - _TICK_NS
        for start, (_, _, u) in zip(starts, ready, strict=False)
    )
    if len(ran) == len(ready) and fits:
        return [*found, *((row, u, True) for row, (_, _, u) in zip(ran, ready, strict=True))]
    # an optimizer of several ops, or one that MXNet has no op for: the first that could have been it
    for number, when in reduced.items():
        row = next((row for row, start in zip(ran, starts, strict=True) if start >= when - _TICK_NS), None)
        if row is not None:
            found.append((row, (number,), False))
    return found
