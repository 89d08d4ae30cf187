"""Into what parts BytePS cuts gradients, changed in the running job of a ``DistributedTrainer`` of MXNet.

Another bound comes with names of its own for the gradients (``gradient_3~1``, see ``byteps_partitions``); while it is
in force, what the job pushes under other names is cut by the job's own bound, alone.

A flow (``byteps_flow``) leaves the bound as it is. The trainer's own method is called as ever, and what it would push
is pushed when it is through, part by part: the parts of a gradient are arrays of dpro's, copied from it and back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import byteps.mxnet as bps
import mxnet as mx
import numpy as np
from byteps.mxnet import ops
from mxnet.base import _LIB, c_str, check_call

from dpro_integrations import mxnet_engine
from dpro_integrations.byteps_flow import Flow, Piece
from dpro_integrations.byteps_partitions import Bounds
from dpro_integrations.mxnet_steps import reduced

_PUSH = "byteps_mxnet_push_pull_async"
PREFIX = "gradient_"
#: Whether pieces of a gradient on a CPU have its memory.
SHARES_MEMORY = True


def reduces_as_stock(trainer: Any) -> bool:
    """Whether ``trainer`` reduces by the method of BytePS' own class (on the object or in a subclass is another)."""
    own = bps.DistributedTrainer._allreduce_grads
    return type(trainer)._allreduce_grads is own and "_allreduce_grads" not in vars(trainer)


def bounds() -> Bounds:
    """Those of this process."""

    def declare(name: str) -> None:
        # (byteps_declare_tensor() takes what a void function leaves behind for an error code)
        ops.MXNET_LIB_CTYPES.byteps_mxnet_declare_tensor(c_str(name), ctypes.c_int(0), None, None)

    return Bounds(ops.MXNET_LIB_CTYPES, declare, bps.local_size())


class Partitions:
    """The bound of one trainer's gradients; the job's own at first.

    Args:
        trainer: made by ``bps.DistributedTrainer``; it stays the same object.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.bounds = bounds()
        self._own = 0  # the job's bound, while another is in force
        self._now = 0
        self._wanted: int | Flow | None = None
        self._pushed: set[bytes] = set()
        self._renaming = False
        self._flow: Flow | None = None
        self._given: dict[bytes, tuple[Any, Any]] = {}  # under a flow: by name, array and what else the trainer gave
        self._cuts: dict[str, _Cut] = {}  # under a flow: by a gradient's parameter
        self._stock: Any = None

    @property
    def changed(self) -> bool:
        """Whether a bound or a flow was put in force."""
        return bool(self._now) or self._flow is not None

    @property
    def in_force(self) -> int:
        """The bound that was put in force, 0 where the job's own is."""
        return self._now

    def set(self, bound: int) -> None:
        """Put ``bound``, bytes, in force. On all workers between the same two steps.

        Raises:
            RuntimeError: an operation of the job's own failed.
        """
        if bound == self._now:
            return
        self._wanted = bound
        _settle()
        self._declare(bound)
        if self._flow is not None:
            self._detach()
        if not self._now:
            self._own = self.bounds.now
            self._attach()
        self._now = self.bounds.now = bound

    def send(self, flow: Flow) -> None:
        """Put ``flow``, of the gradients by their parameters' names, in force; as :meth:`set`."""
        if flow == self._flow:
            return
        self._wanted = flow
        _settle()
        self._declare(flow)
        gradients = {parameter.name: parameter.list_grad()[0] for _, parameter in reduced(self._trainer)}
        pieces: dict[str, list[Piece]] = {}
        for piece in flow.pieces:
            pieces.setdefault(piece.gradient, []).append(piece)
        cuts = {name: _Cut(gradients[name], some) for name, some in pieces.items()}
        if self._now:
            self._detach()
        if self._flow is None:
            self._attach()
        self._flow, self._cuts = flow, cuts

    def clear(self) -> None:
        """Back to the job's bound and names.

        Where :meth:`set` failed its names are declared now: they have been on the other workers, and those of the next
        bound must have the same ones everywhere.
        """
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._declare(wanted)
        if self.changed:
            _settle()
            self._detach()

    # -- parts ---------------------------------------------------------------------------------

    def _attach(self) -> None:
        self._stock = getattr(ops.MXNET_LIB_CTYPES, _PUSH)
        setattr(ops.MXNET_LIB_CTYPES, _PUSH, self._push)
        self._trainer._allreduce_grads = self._allreduce_grads

    def _detach(self) -> None:
        """Nothing is on its way."""
        if self._now:
            self.bounds.now = self._own
        self._now, self._flow, self._cuts = 0, None, {}
        if getattr(ops.MXNET_LIB_CTYPES, _PUSH) == self._push:  # else somebody wrapped ours, which passes on
            setattr(ops.MXNET_LIB_CTYPES, _PUSH, self._stock)
        if vars(self._trainer).get("_allreduce_grads") == self._allreduce_grads:
            del self._trainer._allreduce_grads

    def _declare(self, wanted: int | Flow) -> None:
        places = {parameter.name: place for place, parameter in reduced(self._trainer)}
        if isinstance(wanted, Flow):
            if self.bounds.reserve(wanted.key):
                for at, piece in enumerate(wanted.pieces):
                    self.bounds.name(wanted.key, f"{PREFIX}{places[piece.gradient]}.{piece.number}", at)
        elif self.bounds.reserve(wanted):
            for place in places.values():
                self.bounds.name(wanted, f"{PREFIX}{place}", place)

    def _allreduce_grads(self) -> None:
        """As the trainer does it, under the names of the bound in force."""
        trainer = self._trainer
        self._renaming = self.changed
        self._given = {}
        try:
            type(trainer)._allreduce_grads(trainer)
        finally:
            self._renaming = False
            if self._now:
                self.bounds.rounds[self._now] += 1
        if self._flow is not None:
            with mx.autograd.pause():
                self._send(self._flow)

    def _send(self, flow: Flow) -> None:
        """Push what the trainer would have pushed, in the flow's order; what the flow does not know goes as ever."""
        found = {parameter.name: (place, parameter.list_grad()[0]) for place, parameter in reduced(self._trainer)}
        suffix, cuts = self.bounds.suffix(flow.key).encode(), self._cuts
        given, self._given = self._given, {}
        stock = {name: f"{PREFIX}{place}".encode() for name, (place, _) in found.items()}
        # others were frozen meanwhile, on all workers: these go by the same names whatever array a gradient is in
        ours = [name for name, own in cuts.items() if stock.get(name) in given and own.fits(found[name][1])]
        for name in ours:
            if found[name][1] is not cuts[name].gradient:
                cuts[name] = _Cut(found[name][1], cuts[name].pieces)
            cuts[name].give()
        going = [at for at, piece in enumerate(flow.pieces) if piece.gradient in ours]
        sent: dict[int, Any] = {}
        for at, before in zip(going, flow.waits(going), strict=True):
            piece = flow.pieces[at]
            array = sent[at] = cuts[piece.gradient].arrays[piece.number]
            renamed = stock[piece.gradient] + b"." + str(piece.number).encode() + suffix
            self._settle_address(renamed, array.handle)
            if before:
                mxnet_engine.mark("dpro/turn", [sent[k] for k in before], [array])
            check_call(self._stock(array.handle, c_str(renamed.decode()), *given[stock[piece.gradient]][1]))
        for name in ours:
            cuts[name].take()
        through = {stock[name] for name in ours}
        for other, (handle, rest) in given.items():
            if other not in through:
                check_call(self._stock(handle, c_str(other.decode()), *rest))

    def _settle_address(self, name: bytes, handle: Any) -> None:
        """At a name's first push BytePS takes the array's address; MXNet may not have given it one yet."""
        if name not in self._pushed:
            check_call(_LIB.MXNDArrayWaitToRead(handle))
            self._pushed.add(name)

    def _push(self, array: Any, name: Any, *rest: Any) -> Any:
        """In the place of ``byteps_mxnet_push_pull_async``."""
        if not self.changed:
            return self._stock(array, name, *rest)
        given: bytes | None = getattr(name, "value", name)
        if self._renaming and given is not None and given.startswith(PREFIX.encode()):
            if self._flow is not None:
                self._given[given] = array, rest
                return 0
            renamed = given + self.bounds.suffix(self._now).encode()
            self._settle_address(renamed, array)
            return self._stock(array, c_str(renamed.decode()), *rest)
        if self._flow is not None or _nbytes(array) <= min(self._own, self._now):
            return self._stock(array, name, *rest)  # one part either way
        with self._jobs_own():
            result = self._stock(array, name, *rest)
            check_call(_LIB.MXNDArrayWaitToRead(array))
        return result

    @contextmanager
    def _jobs_own(self) -> Iterator[None]:
        """The job's bound, with nothing else on its way."""
        mx.nd.waitall()
        others, self.bounds.now = self.bounds.now, self._own
        try:
            yield
        finally:
            self.bounds.now = others


class _Cut:
    """A gradient and its pieces, as arrays: one that goes whole is its own; else each piece is an array of dpro's.

    On a CPU these have the gradient's own memory, and marks keep the engine's order of things: a copy would be an op of
    the worker's, behind whatever of the backward pass stands in its queue. (Views would not do: the engine takes all
    views of an array for one, and their pieces would go one after the other.) Elsewhere pieces are copies.
    """

    def __init__(self, gradient: Any, pieces: list[Piece]) -> None:
        self.gradient, self.pieces = gradient, pieces
        self._whole = pieces[0].whole
        size = np.dtype(gradient.dtype).itemsize
        self._spans = [(piece.begin // size, piece.end // size) for piece in pieces]
        gradient.wait_to_read()
        self._shared = not self._whole and SHARES_MEMORY and gradient.context.device_type == "cpu"
        if self._whole:
            self.arrays = [gradient]
        elif self._shared:
            memory = _memory(gradient)
            self.arrays = [mx.nd.from_numpy(memory[begin:end], zero_copy=True) for begin, end in self._spans]
        else:
            self.arrays = [mx.nd.zeros_like(view) for view in self._views()]
        for array in self.arrays:  # BytePS takes the address of each at once
            array.wait_to_read()

    def fits(self, gradient: Any) -> bool:
        """Whether the pieces are of such an array."""
        return bool(gradient.size == self.gradient.size and gradient.dtype == self.gradient.dtype)

    def give(self) -> None:
        """Have the pieces what the gradient has."""
        if self._shared:
            mxnet_engine.mark("dpro/cut", [self.gradient], self.arrays)
        elif not self._whole:
            for view, array in zip(self._views(), self.arrays, strict=True):
                view.copyto(array)

    def take(self) -> None:
        """Have the gradient what the pieces have."""
        if self._shared:
            mxnet_engine.mark("dpro/joined", self.arrays, [self.gradient])
        elif not self._whole:
            for view, array in zip(self._views(), self.arrays, strict=True):
                array.copyto(view)

    def _views(self) -> list[Any]:
        flat = self.gradient.reshape((-1,))
        return [flat[begin:end] for begin, end in self._spans]


def _memory(array: Any) -> Any:
    """The memory of an array on a CPU, which it must outlive, as a flat numpy array."""
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    kind = np.dtype(array.dtype)
    held = (ctypes.c_char * (int(array.size) * kind.itemsize)).from_address(address.value or 0)
    return np.frombuffer(held, dtype=kind)


class _Everything:
    """What the engine still has to do, as something to wait for."""

    @staticmethod
    def wait_to_read() -> None:
        mx.nd.waitall()


def _settle() -> None:
    mxnet_engine.wait(_Everything)


def _nbytes(handle: Any) -> int:
    """Of the array that ``handle`` is of."""
    borrowed = mx.nd.NDArray(handle)
    try:
        return int(borrowed.size) * int(np.dtype(borrowed.dtype).itemsize)
    finally:
        borrowed.handle = None  # else the job's array would be freed with it
