"""Into what parts BytePS cuts gradients, changed in the running job of a ``DistributedTrainer`` of MXNet.

Another bound comes with names of its own for the gradients (``gradient_3~1``, see ``byteps_partitions``); while it is
in force, what the job pushes under other names is cut by the job's own bound, alone.
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
from dpro_integrations.byteps_partitions import Bounds
from dpro_integrations.mxnet_steps import reduced

_PUSH = "byteps_mxnet_push_pull_async"
PREFIX = "gradient_"


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
        self._wanted = 0
        self._pushed: set[bytes] = set()
        self._renaming = False
        self._stock: Any = None

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
        if not self._now:
            self._own = self.bounds.now
            self._stock = getattr(ops.MXNET_LIB_CTYPES, _PUSH)
            setattr(ops.MXNET_LIB_CTYPES, _PUSH, self._push)
            self._trainer._allreduce_grads = self._allreduce_grads
        self._now = self.bounds.now = bound

    def clear(self) -> None:
        """Back to the job's bound and names.

        Where :meth:`set` failed its names are declared now: they have been on the other workers, and those of the next
        bound must have the same ones everywhere.
        """
        wanted, self._wanted = self._wanted, 0
        if wanted:
            self._declare(wanted)
        if not self._now:
            return
        _settle()
        self.bounds.now = self._own
        self._now = 0
        if getattr(ops.MXNET_LIB_CTYPES, _PUSH) == self._push:  # else somebody wrapped ours, which passes on
            setattr(ops.MXNET_LIB_CTYPES, _PUSH, self._stock)
        if vars(self._trainer).get("_allreduce_grads") == self._allreduce_grads:
            del self._trainer._allreduce_grads

    # -- parts ---------------------------------------------------------------------------------

    def _declare(self, bound: int) -> None:
        if self.bounds.reserve(bound):
            for place, _ in reduced(self._trainer):
                self.bounds.name(bound, f"{PREFIX}{place}", place)

    def _allreduce_grads(self) -> None:
        """As the trainer does it, under the names of the bound in force."""
        trainer = self._trainer
        self._renaming = bool(self._now)
        try:
            type(trainer)._allreduce_grads(trainer)
        finally:
            self._renaming = False
            if self._now:
                self.bounds.rounds[self._now] += 1

    def _push(self, array: Any, name: Any, *rest: Any) -> Any:
        """In the place of ``byteps_mxnet_push_pull_async``."""
        if not self._now:
            return self._stock(array, name, *rest)
        given: bytes | None = getattr(name, "value", name)
        if self._renaming and given is not None and given.startswith(PREFIX.encode()):
            renamed = given + self.bounds.suffix(self._now).encode()
            if renamed not in self._pushed:
                # BytePS takes the array's address now; MXNet may not have given it one yet
                check_call(_LIB.MXNDArrayWaitToRead(array))
                self._pushed.add(renamed)
            return self._stock(array, c_str(renamed.decode()), *rest)
        if _nbytes(array) <= min(self._own, self._now):
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
