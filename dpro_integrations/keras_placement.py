"""Layers of a Keras model on the devices that a plan gives them, and the order of those that share one.

A layer's ``call`` runs under ``tf.device``. What a gradient tape makes of it does not: the tape calls gradient
functions one by one and tells them of the forward op's name scope only, so ops of a backward pass have no device and
TensorFlow puts them on its first one. So while the train step is traced a function of the graph's says where ops of a
scope ``gradient_tape/<scope of a placed layer>`` go, and gradient functions that are the layer's own
(``tf.custom_gradient``, a ``tf.function``), which the tape calls without a scope, get the layer's device around them.

Variables stay where they were made; TensorFlow keeps what reads and updates them there.

The order is one of control dependencies, put in when the step's graph is complete: layers are called in Keras' order,
whatever the plan's, so that sums of gradients have the operands that they had.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import record

from dpro.errors import PlanError
from dpro.plan import Plan
from dpro_integrations.base import put_on
from dpro_integrations.keras_regions import layers_of
from dpro_integrations.keras_version import in_training

#: ``GPU:1``, ``/gpu:1``, ``/device:GPU:1``, and TensorFlow's full name of a device of this process.
_DEVICE = re.compile(r"(?:/job:localhost/replica:0/task:0)?/?(?:device:)?([A-Za-z]+):(\d+)")
_TAPE = "gradient_tape/"


class Placed(NamedTuple):
    """What a plan says: ``devices`` are (layer, device), ``order`` layers of which those of one device run so."""

    devices: tuple[tuple[str, str], ...] = ()
    order: tuple[str, ...] = ()


def devices_here() -> list[str]:
    """Names of the logical devices of the kind that this process computes on, such as ``/device:GPU:0``."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [str(device.name) for device in found]


def placed_by(plan: Plan) -> Placed:
    """What ``plan`` has for :class:`Placement`, with names of devices as TensorFlow has them.

    Raises:
        PlanError: this process has no such device, or but one that it computes on, or soft placement is off; a layer
            is ordered twice, or is compiled or recomputed as well.
    """
    placement, order = plan.placement or {}, tuple(plan.order or ())
    if placement and len(here := devices_here()) < 2:
        raise PlanError(f"this process computes on one device, {here[0]}")
    if twice := next((name for at, name in enumerate(order) if name in order[:at]), ""):
        raise PlanError(f"layer {twice!r} is ordered twice")
    if (placement or order) and plan.recompute:
        raise PlanError("layers are placed and ordered, or recomputed, not both in one plan")
    for compiled in plan.compile_regions or ():
        for name in (*placement, *order):
            if f"{name}/".startswith(f"{compiled}/") or compiled.startswith(f"{name}/"):
                done = "placed" if name in placement else "ordered"
                raise PlanError(f"layer {name!r} is {done}, and compiled by XLA with {compiled!r}: one of the two")
    devices = tuple((name, _device(placement[name])) for name in sorted(placement))
    if not tf.config.get_soft_device_placement() and any("CPU" not in device for _, device in devices):
        raise PlanError("soft device placement is off: an op without a kernel for its device would end the job")
    return Placed(devices, order)


def _device(given: str) -> str:
    known = [str(device.name) for device in tf.config.list_logical_devices()]
    match = _DEVICE.fullmatch(given)
    name = f"/device:{match[1].upper()}:{int(match[2])}" if match else ""
    if name not in known:
        raise PlanError(f"this process has no device {given!r}, but {', '.join(known)}")
    return name


class Placement:
    """The placed and ordered layers of one model; none at first."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._calls: list[_Call] = []
        self._graph: Any = None  # of the step that was traced last, or is
        self._scopes: dict[str, str] = {}  # in it, of placed layers: device
        #: what holds when the step is traced
        self.placed = Placed()

    def set(self, placed: Placed) -> None:
        """Place and order these layers, and no others, when the step is traced next.

        Raises:
            PlanError: the model has no such layer; nothing was changed.
        """
        if placed == self.placed:
            return
        known, devices = layers_of(self._model), dict(placed.devices)
        names = dict.fromkeys([*devices, *placed.order])
        for name in names:
            if name not in known:
                raise PlanError(f"the model has no layer {name!r}")
        for undo in self._undo:
            undo()
        self._calls, self._scopes, self._graph, self.placed = [], {}, None, placed
        self._undo = [self._look_after(known[name], name, devices.get(name, "")) for name in names]
        if names:
            self._undo.append(_put_around(self._model, "train_step", self._step))

    def check(self) -> None:
        """To be called after the step was traced.

        Raises:
            PlanError: a layer is not called in training, or not by the step itself.
        """
        for name in dict.fromkeys([*dict(self.placed.devices), *self.placed.order]):
            graphs = [call.graph for call in self._calls if call.name == name]
            if not graphs:
                raise PlanError(f"layer {name!r} is not called on its own in training")
            if any(graph is not self._graph for graph in graphs):
                raise PlanError(f"layer {name!r} is called in a loop or function: name the layer around it")

    # -- parts ---------------------------------------------------------------------------------

    def _look_after(self, layer: Any, name: str, device: str) -> Callable[[], None]:
        @contextlib.contextmanager
        def around() -> Iterator[Callable[[Any], Any]]:
            if not in_training() or not tf.inside_function():
                yield _as_it_is
                return
            call = _Call(name, device, tf.compat.v1.get_default_graph(), tf.get_current_name_scope())
            self._calls.append(call)
            if device and call.graph is self._graph:
                self._scopes[call.scope] = device
            with _on(device, call.graph) if device else contextlib.nullcontext():
                yield call.ended

        return _put_around(layer, "call", around)

    @contextlib.contextmanager
    def _step(self) -> Iterator[Callable[[Any], Any]]:
        if not tf.inside_function():
            yield _as_it_is
            return
        self._calls, self._scopes, self._graph = [], {}, tf.compat.v1.get_default_graph()
        with self._graph.device(self._where):
            yield _as_it_is
        self._put_in_order()

    def _where(self, op: Any) -> str:
        """The device of an op of a backward pass, unless it has one; of others their own."""
        if op.device or not op.name.startswith(_TAPE):
            return str(op.device)
        path = op.name.removeprefix(_TAPE).split("/")
        around = ("/".join(path[:end]) for end in range(len(path) - 1, 0, -1))
        return next((self._scopes[scope] for scope in around if scope in self._scopes), "")

    def _put_in_order(self) -> None:
        """Have each layer wait for the one before it on its device, where neither waits for the other anyway."""
        ends = {
            name: _Ends(call for call in self._calls if call.name == name and call.graph is self._graph)
            for name in self.placed.order
        }
        flow = _Flow(self._graph, {name: both for name, both in ends.items() if both.entries})
        devices, first = dict(self.placed.devices), devices_here()[0]
        latest: dict[str, str] = {}
        for name in flow.sorted():
            device = devices.get(name, first)
            if device in latest:
                flow.order(latest[device], name)
            latest[device] = name


def _as_it_is(out: Any) -> Any:
    return out


def _put_around(
    owner: Any, name: str, around: Callable[[], contextlib.AbstractContextManager[Callable[[Any], Any]]]
) -> Callable[[], None]:
    """Have ``owner``'s method run in the context, and what it returns go through what that gives. Returns the undo.

    AutoGraph goes through it to the method, which may be the user's own: what is ours is kept from it.
    """
    original = getattr(owner, name)
    entered = tf.autograph.experimental.do_not_convert(around)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with entered() as through:
            return through(original(*args, **kwargs))

    return put_on(owner, name, wrapper)


@contextlib.contextmanager
def _on(device: str, graph: Any) -> Iterator[None]:
    """Ops that are made in ``graph`` are on ``device``, and what gradient functions that are named now will make."""
    recorded = record.record_operation

    # called with names, too: TensorFlow's
    def record_operation(
        op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any, forward_function: Any = None
    ) -> Any:
        def there(*args: Any) -> Any:
            with tf.device(device):
                return backward_function(*args)

        ours = tf.compat.v1.get_default_graph() is graph  # else another thread's
        backward = there if ours else backward_function
        return recorded(op_type, output_tensors, input_tensors, backward, forward_function)

    undo = put_on(record, "record_operation", record_operation)
    try:
        with tf.device(device):
            yield
    finally:
        undo()


class _Call:
    """A call of a layer while a step is traced; ``device`` "": where TensorFlow has it."""

    def __init__(self, name: str, device: str, graph: Any, scope: str) -> None:
        self.name, self.device, self.graph, self.scope = name, device, graph, scope
        self._first = len(graph.get_operations())
        self.ops: list[Any] = []
        #: ops that make what it returns
        self.exits: list[Any] = []

    def ended(self, out: Any) -> Any:
        self.ops = self.graph.get_operations()[self._first :]
        self.exits = [value.op for value in tf.nest.flatten(out, expand_composites=True) if tf.is_tensor(value)]
        return out


class _Ends:
    """Names of ops at which a layer's calls begin to compute on what they are given, and at which they end."""

    def __init__(self, calls: Iterable[_Call]) -> None:
        self.entries: dict[str, Any] = {}
        self.exits: dict[str, Any] = {}
        #: variables and other state
        self.resources: set[str] = set()
        for call in calls:
            own = {op.name for op in call.ops}
            for op in call.ops:
                self.resources.update(value.name for value in op.inputs if value.dtype == tf.resource)
                if any(value.dtype != tf.resource and value.op.name not in own for value in op.inputs):
                    self.entries[op.name] = op
            self.exits.update((op.name, op) for op in call.exits)


class _Flow:
    """What ops of a graph wait for, and so layers, of which ``ends`` are in the plan's order."""

    def __init__(self, graph: Any, ends: dict[str, _Ends]) -> None:
        self._ends = ends
        self._before: dict[str, list[str]] = {}
        place = {name: at for at, name in enumerate(ends)}
        given_by = {op: 1 << place[name] for name, both in ends.items() for op in both.exits}
        after: dict[str, int] = {}  # of each op, layers whose results it waits for, as bits
        for op in graph.get_operations() if ends else ():  # as they were made: what an op waits for is before it
            before = [*(value.op.name for value in op.inputs), *(other.name for other in op.control_inputs)]
            self._before[op.name] = before
            after[op.name] = given_by.get(op.name, 0)
            for name in before:
                after[op.name] |= after.get(name, 0)
        self._after: dict[str, set[str]] = {}
        for name, both in ends.items():
            bits = 0
            for exit_ in both.exits:
                bits |= after[exit_]
            self._after[name] = {other for other in ends if other != name and bits >> place[other] & 1}

    def sorted(self) -> list[str]:
        """The layers in the plan's order, as far as the data allow it."""
        left, found = list(self._ends), []
        while left:
            # layers that wait for each other (one in the other) as the plan has them
            name = next((name for name in left if self._after[name].isdisjoint(left)), left[0])
            left.remove(name)
            found.append(name)
        return found

    def order(self, first: str, then: str) -> None:
        """Have ``then`` wait for ``first``, unless it does, or ``first`` for it, or both have the same state, which
        TensorFlow orders as layers were called, when the graph is complete."""
        one, other = self._ends[first], self._ends[then]
        if first in self._after[then] or one.resources & other.resources or self._leads(other.entries, one.exits):
            return
        for name, op in other.entries.items():
            op._add_control_inputs(list(one.exits.values()))
            self._before[name] += one.exits

    def _leads(self, from_: Iterable[str], to: Iterable[str]) -> bool:
        """Whether an op of ``to`` waits for one of ``from_``, or is one of them."""
        goal, seen, left = set(from_), set(to), list(to)
        while left:
            name = left.pop()
            if name in goal:
                return True
            new = [before for before in self._before[name] if before not in seen]
            seen.update(new)
            left += new
        return False
