"""Into what parts BytePS cuts gradients, changed in the running job of a ``DistributedTrainer`` of MXNet.

BytePS reads one bound, a global of its library, when a name is first pushed, and again at every push; it ends the
process where the two cuts differ in number. So a bound that is put in force comes with names of its own for the
gradients (``gradient_3~1``), declared on all workers in the same order, and while it is in force whatever the job
pushes under other names is cut by the job's own bound, alone. The first push under a new name waits for all workers.

A name's buffers, on workers and servers, are never freed: :data:`MOST_BOUNDS` bounds per process, each of which may
be put in and out of force as often as one likes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import byteps.mxnet as bps
import mxnet as mx
import numpy as np
from byteps.mxnet import ops
from mxnet.base import _LIB, c_str, check_call

from dpro.trace.byteps import DEFAULT_PARTITION_BYTES, aligned
from dpro_integrations import mxnet_engine
from dpro_integrations.mxnet_steps import reduced

#: Bounds that a process may try. Each costs as much memory as all gradients together: once in every worker, and once
#: per worker's share in the servers.
MOST_BOUNDS = 4
#: ``uint32_t BytePSGlobal::_partition_bytes``
_SYMBOL = "_ZN6byteps6common12BytePSGlobal16_partition_bytesE"
#: ``unsigned int next_key_``
_COUNTER = "_ZN6byteps6common9next_key_E"
#: BytePS has 2^16 numbers; the upper half is for names of dpro's: gradients of so many at most, then meetings.
FIRST_NUMBER = 1 << 15
MOST_GRADIENTS = 4096
MEETING_NUMBER = FIRST_NUMBER + MOST_BOUNDS * MOST_GRADIENTS
_PUSH = "byteps_mxnet_push_pull_async"
_PREFIX = b"gradient_"
_made = 0


def reduces_as_stock(trainer: Any) -> bool:
    """Whether ``trainer`` reduces by the method of BytePS' own class (on the object or in a subclass is another)."""
    own = bps.DistributedTrainer._allreduce_grads
    return type(trainer)._allreduce_grads is own and "_allreduce_grads" not in vars(trainer)


def is_traced() -> bool:
    """Whether BytePS records its stages."""
    return os.environ.get("BYTEPS_TRACE_ON", "0") not in ("", "0")


def job_bound() -> int:
    """The bound that BytePS took from the environment when it started, bytes.

    Raises:
        ValueError: the environment's is no number.
    """
    told = int(os.environ.get("BYTEPS_PARTITION_BYTES", "") or DEFAULT_PARTITION_BYTES)
    return aligned(told, bps.local_size())


def most_bytes() -> int:
    """No part may be larger: BytePS would never send it (0: no limit)."""
    return job_bound() * int(os.environ.get("BYTEPS_SCHEDULING_CREDIT", "") or 0)


def bound_in_force() -> int:
    """What BytePS cuts by now.

    Raises:
        ValueError: this build of BytePS does not export it.
    """
    return int(_global().value)


def why_not() -> str:
    """One clause: why bounds can't be changed in this process ('' if they can)."""
    if others := sorted({"byteps.tensorflow", "byteps.torch"} & sys.modules.keys()):
        return f"{others[0]} is loaded as well, and it can't be told which of the two has the bound"
    if os.environ.get("BYTEPS_ENABLE_ASYNC", "0") not in ("", "0"):
        return "the job is asynchronous"
    if bps.local_size() > 1:
        return "several processes share a worker"
    try:
        now, expected = bound_in_force(), job_bound()
        counted = int(ctypes.c_uint32.in_dll(ops.MXNET_LIB_CTYPES, _COUNTER).value)
    except ValueError as error:
        return str(error)
    if counted > FIRST_NUMBER:
        return f"the job has more than {FIRST_NUMBER} tensors"
    if now != expected:
        return f"BytePS' bound reads {now}, not {expected} as its environment says"
    return ""


def declare(name: str, number: int) -> None:
    """Declare ``name`` with a number of dpro's own, from :data:`FIRST_NUMBER` on; those of the job go on as they were.

    Workers know a tensor by its number, which BytePS counts up: one that declares less than the others would mix up
    all that are declared later. So nothing of dpro's is counted.

    Raises:
        ValueError: this build of BytePS does not export what counts, or the job has as many tensors.
    """
    counter = ctypes.c_uint32.in_dll(ops.MXNET_LIB_CTYPES, _COUNTER)
    if counter.value >= FIRST_NUMBER:
        raise ValueError(f"the job has more than {FIRST_NUMBER} tensors")
    own, counter.value = counter.value, number
    # (byteps_declare_tensor() takes what a void function leaves behind for an error code)
    ops.MXNET_LIB_CTYPES.byteps_mxnet_declare_tensor(c_str(name), ctypes.c_int(0), None, None)
    counter.value = own


class Partitions:
    """The bound of one trainer's gradients; the job's own at first.

    Args:
        trainer: made by ``bps.DistributedTrainer``; it stays the same object.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._suffixes: dict[int, str] = {}  # bound -> what its names end with
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

    def room(self, bound: int) -> bool:
        """Whether ``bound`` may still be tried."""
        return bound in self._suffixes or _made < MOST_BOUNDS

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
            self._own = bound_in_force()
            self._stock = getattr(ops.MXNET_LIB_CTYPES, _PUSH)
            setattr(ops.MXNET_LIB_CTYPES, _PUSH, self._push)
            self._trainer._allreduce_grads = self._allreduce_grads
        self._now = _global().value = bound

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
        _global().value = self._own
        self._now = 0
        if getattr(ops.MXNET_LIB_CTYPES, _PUSH) == self._push:  # else somebody wrapped ours, which passes on
            setattr(ops.MXNET_LIB_CTYPES, _PUSH, self._stock)
        if vars(self._trainer).get("_allreduce_grads") == self._allreduce_grads:
            del self._trainer._allreduce_grads

    # -- parts ---------------------------------------------------------------------------------

    def _declare(self, bound: int) -> None:
        global _made
        if bound in self._suffixes:
            return
        _made += 1
        suffix = self._suffixes[bound] = f"~{_made}"
        first = FIRST_NUMBER + (_made - 1) * MOST_GRADIENTS
        for place, _ in reduced(self._trainer):
            declare(f"{_PREFIX.decode()}{place}{suffix}", first + place)

    def _allreduce_grads(self) -> None:
        """As the trainer does it, under the names of the bound in force."""
        trainer = self._trainer
        self._renaming = bool(self._now)
        try:
            type(trainer)._allreduce_grads(trainer)
        finally:
            self._renaming = False

    def _push(self, array: Any, name: Any, *rest: Any) -> Any:
        """In the place of ``byteps_mxnet_push_pull_async``."""
        if not self._now:
            return self._stock(array, name, *rest)
        given: bytes | None = getattr(name, "value", name)
        if self._renaming and given is not None and given.startswith(_PREFIX):
            renamed = given + self._suffixes[self._now].encode()
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
        bound = _global()
        others, bound.value = bound.value, self._own
        try:
            yield
        finally:
            bound.value = others


class _Everything:
    """What the engine still has to do, as something to wait for."""

    @staticmethod
    def wait_to_read() -> None:
        mx.nd.waitall()


def _settle() -> None:
    mxnet_engine.wait(_Everything)


def _global() -> Any:
    """Raises ValueError where the library does not export it."""
    return ctypes.c_uint32.in_dll(ops.MXNET_LIB_CTYPES, _SYMBOL)


def _nbytes(handle: Any) -> int:
    """Of the array that ``handle`` is of."""
    borrowed = mx.nd.NDArray(handle)
    try:
        return int(borrowed.size) * int(np.dtype(borrowed.dtype).itemsize)
    finally:
        borrowed.handle = None  # else the job's array would be freed with it
