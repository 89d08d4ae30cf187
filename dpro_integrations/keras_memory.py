"""What takes a Keras job's memory: TensorFlow's own record of every allocation in a captured step, and where in it the
model's units begin and end.

Knows units and TensorFlow's CPU allocator; what comes of it is in :mod:`dpro.trace.memory`. The allocator tells the
profiler of all that it hands out and takes back once it was told to count. That call is none of TensorFlow's Python
interface; where it is missing, nothing is measured. Marks are put in from the ops that ran: a unit's forward pass
begins with the first of its ops that depends on the batch, its backward pass with the first that depends on the loss.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dpro.trace.memory import AFTER, BACKWARD, FORWARD, MEMORY, Mark, dump, marks_of, profile
from dpro.trace.model import EventKind, RankTrace, TraceBuilder
from dpro.trace.regions import LayerOps
from dpro.trace.xplane import Allocation
from dpro_integrations.keras_graph import nodes_of, traced_functions
from dpro_integrations.keras_units import UnitLayers, units, why_not_again

_ON, _OFF = "_ZN3tsl23EnableCPUAllocatorStatsEv", "_ZN3tsl24DisableCPUAllocatorStatsEv"
_LIBRARY = "libtensorflow_framework.so.2"
#: The node that gives a step its batch.
_BATCH = "IteratorGetNext"
_TAPE = "gradient_tape/"
#: Where batch norm changes its moving averages, which :mod:`~dpro_integrations.keras_recompute` holds still.
_AVERAGES = re.compile("/Assign(MovingAvg|NewValue)")
#: An op -> those that it depends on, or those that depend on it.
_Edges = dict[str, list[str]]


class Meter:
    """From construction to :meth:`detach` TensorFlow records allocations; :meth:`begin` is told when a step begins.

    Raises:
        RuntimeError: this TensorFlow can't, or not for this model.
    """

    def __init__(self, model: Any) -> None:
        self._units = units(model)
        if not self._units:
            raise RuntimeError("memory is told by layer of Keras 2's functional models with one input")
        self._model = model
        self._places: list[set[int]] = []
        self._library = _library()
        #: what the profile had of them, by time
        self.events: list[Allocation] = []
        getattr(self._library, _ON)()

    def begin(self) -> None:
        """A step begins."""
        self._places.append(set(_addresses(self._variables())))

    def detach(self) -> None:
        """Safe to call twice."""
        getattr(self._library, _OFF)()

    def add_to(self, trace: RankTrace) -> RankTrace:
        """``trace`` with marks, and with the profile of the second step (the first, where it is the only one)."""
        dataflow = trace.meta.extra["dataflow"]
        layers = {str(layer.name): number for number, unit in enumerate(self._units) for layer in unit.layers}
        owner = _owners(trace.names, dataflow, layers)
        trace = _with_marks(trace, owner, len(self._units))
        step = min(1, trace.steps - 1)
        begin, end = trace.step_bounds[step].tolist()
        made = _outputs(dataflow, layers, owner)
        marks = [
            Mark(at, label, _found(self.events, at, made.get(int(label.removeprefix(AFTER)), []), dataflow))
            if label.startswith(AFTER)
            else Mark(at, label)
            for at, label in marks_of(trace, begin, end)
        ]
        refused = _refused(self._model, self._units, layers)
        told = [(unit.name, number > 0, refused[number]) for number, unit in enumerate(self._units)]
        signed = list(_signed(self.events))
        base = self._base_bytes(signed, begin, self._places[step])
        found = profile(signed, marks, (begin, end), base, told)
        trace.meta.extra[MEMORY] = dump(replace(found, settles=True))
        return trace

    def _variables(self) -> list[Any]:
        optimizer = getattr(self._model.optimizer, "variables", [])
        mine = [*self._model.variables, *(optimizer() if callable(optimizer) else optimizer)]
        return list({id(variable): variable for variable in mine}.values())

    def _base_bytes(self, events: list[tuple[int, int, int]], begin: int, places: set[int]) -> int:
        """Weights and what belongs to them, and what else was allocated since the capture began and is there still."""
        alive = {}
        for at, address, nbytes in events:
            if at >= begin:
                break
            if nbytes > 0:
                alive[address] = nbytes
            else:
                alive.pop(address, None)
        own = sum(int(variable.dtype.size) * int(np.prod(variable.shape)) for variable in self._variables())
        return own + sum(nbytes for address, nbytes in alive.items() if address not in places)


def _library() -> Any:
    path = Path(tf.__file__).parent / _LIBRARY
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
        getattr(library, _ON), getattr(library, _OFF)
    except (OSError, AttributeError) as error:
        raise RuntimeError("this TensorFlow does not record what its allocator does") from error
    return library


def _addresses(variables: Iterable[Any]) -> Iterator[int]:
    """Where the variables' values are: read they share the variable's buffer, and so does what numpy makes of them."""
    for variable in variables:
        value = tf.convert_to_tensor(variable)
        if hasattr(value, "_numpy_internal"):
            yield int(value._numpy_internal().__array_interface__["data"][0])


def _signed(events: list[Allocation]) -> Iterator[tuple[int, int, int]]:
    """Sizes of what was freed, negative; what was allocated before the capture is 1 byte."""
    alive: dict[int, int] = {}
    for event in events:
        if event.nbytes:
            alive[event.address] = event.nbytes
        yield event.at, event.address, event.nbytes or -alive.pop(event.address, 1)


def _consumers(dataflow: _Edges) -> _Edges:
    out: _Edges = {}
    for name, inputs in dataflow.items():
        for one in inputs:
            out.setdefault(one, []).append(name)
    return out


def _behind(consumers: _Edges, names: Iterable[str]) -> set[str]:
    """What depends on any of ``names``."""
    seen: set[str] = set()
    left = list(names)
    while left:
        for name in consumers.get(left.pop(), ()):
            if name not in seen:
                seen.add(name)
                left.append(name)
    return seen


def _owners(names: Iterable[str], dataflow: _Edges, layers: dict[str, int]) -> dict[str, tuple[int, bool]]:
    """Op -> its unit, and whether it is of the backward pass: ops that depend on the batch, or on the loss.

    What does not runs at any time: weights are read, and shapes told, as soon as a thread has nothing else to do.
    """
    find = LayerOps(layers)
    consumers = _consumers(dataflow)
    found = {name: (layers[place[0]], place[1]) for name in {*names, *dataflow} if (place := find(name))}
    of_batch = _behind(consumers, [name for name in dataflow.keys() | consumers.keys() if name.startswith(_BATCH)])
    forward = {name: own for name, own in found.items() if name in of_batch and not own[1]}
    last = max((number for number, _ in forward.values()), default=0)
    loss = _behind(consumers, [name for name, own in forward.items() if own[0] == last])
    of_loss = _behind(consumers, [name for name in loss if name.startswith(_TAPE) and name not in found])
    return forward | {name: own for name, own in found.items() if own[1] and name in of_loss}


def _with_marks(trace: RankTrace, owner: dict[str, tuple[int, bool]], count: int) -> RankTrace:
    """A unit all of whose ops became part of its neighbour's begins and ends just before that one."""
    more = TraceBuilder(trace.meta)
    rows = np.flatnonzero((trace.kind == EventKind.CPU_OP) & (trace.step >= 0))
    spans: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for row in rows.tolist():
        if own := owner.get(trace.names[trace.name[row]]):
            key = int(trace.step[row]), *own
            begin, end = spans.get(key, (1 << 62, 0))
            spans[key] = min(begin, int(trace.start[row])), max(end, int(trace.end[row]))
    thread = trace.resources[trace.resource[rows[0]]] if len(rows) else "cpu/main"

    def mark(label: str, at: int) -> None:
        more.add(label, EventKind.ANNOTATION, thread, at, at)

    for step in range(trace.steps):
        after = None
        for number in reversed(range(count)):
            span = spans.get((step, number, False)) or (after and (after - 2, after - 1))
            if span:
                after = span[0]
                mark(f"{FORWARD}{number}", span[0])
                mark(f"{AFTER}{number}", span[1])
        before = None
        for number in range(count):
            back = spans.get((step, number, True))
            at = back[0] if back else before and before - 1
            if at:
                before = at
                mark(f"{BACKWARD}{number}", at)
    return trace.joined(more.freeze([]))


def _outputs(dataflow: _Edges, layers: dict[str, int], owner: dict[str, tuple[int, bool]]) -> dict[int, list[str]]:
    """Unit -> those of its forward ops whose results go to other units, or to the loss."""
    out: dict[int, list[str]] = {}
    find = LayerOps(layers)
    for user, inputs in dataflow.items():
        if user.startswith(_TAPE) or user.endswith("IdentityN"):
            continue
        place = find(user)
        for name in inputs:
            own = owner.get(name)
            if own and not own[1] and (place is None or layers[place[0]] != own[0]):
                out.setdefault(own[0], []).append(name)
    return out


def _found(events: list[Allocation], until: int, names: list[str], dataflow: _Edges) -> tuple[int, ...]:
    """Addresses of what these ops gave: what they allocated and is there, or else was handed on by an input."""
    alive: dict[int, Allocation] = {}
    for event in events:
        if event.at > until:
            break
        if event.nbytes:
            alive[event.address] = event
        else:
            alive.pop(event.address, None)
    largest: dict[str, Allocation] = {}
    for one in alive.values():
        if one.op not in largest or one.nbytes > largest[one.op].nbytes:
            largest[one.op] = one
    found = []
    for name in names:
        seen, left, handed = {name}, [name], []
        while left:
            at = left.pop()
            if at in largest:
                handed.append(largest[at])
            else:
                left += [one for one in dataflow.get(at, ()) if one not in seen]
                seen.update(left)
        if handed:  # of a sum's two the one that was made last: the other is held by somebody else as well
            found.append(max(handed, key=lambda one: (one.nbytes, one.at)).address)
    return tuple(dict.fromkeys(found))


def _refused(model: Any, known: list[UnitLayers], layers: dict[str, int]) -> list[str]:
    """Why each unit must not run twice, its ops in the traced step looked at too; "" it may."""
    find = LayerOps(layers)
    ops: list[list[str]] = [[] for _ in known]
    for concrete in traced_functions(model.train_function):
        for node in nodes_of(concrete.graph.as_graph_def()):
            place = find(node.name)
            if place and not place[1] and not _AVERAGES.search(node.name):
                ops[layers[place[0]]].append(node.op)
    return [unit.refused or why_not_again(made) for unit, made in zip(known, ops, strict=True)]
