"""MXNet's engine, as far as dpro uses it: named marks in its order of things, and waiting without losing an error.

A mark is an op that does nothing. It runs when everything pushed before it that writes what it reads is over, on a
thread of the engine's priority pool, so that it does not wait behind the ops of the worker; the profiler records it
like any op. Nothing of the job's is written or copied.

MXNet hands an asynchronous error to the first that waits for its consequences, and forgets it. Where that is dpro, the
error is kept (:func:`job_error`) for the job to get, at the end of the same call of its trainer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, c_handle_array, check_call

#: ``include/mxnet/engine.h``, FnProperty::kNormal and kCPUPrioritized
_NORMAL, _PRIORITIZED = ctypes.c_int(0), ctypes.c_int(3)
# a function that may be called with any arguments and touches none of them
_NOTHING = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
_CALLED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_names: dict[str, bytes] = {}  # alive for good: the engine reads them when it gets there
_callbacks: list[Any] = []  # so are these
_kept: list[BaseException] = []


class _Context(ctypes.Structure):
    """``mxnet::Context``."""

    _fields_ = (("dev_type", ctypes.c_int32), ("dev_id", ctypes.c_int32))


_CPU = _Context(1, 0)


def mark(name: str, reads: Sequence[Any], writes: Sequence[Any] = ()) -> None:
    """An op called ``name`` behind what writes the arrays ``reads``.

    Args:
        writes: arrays of which nothing is written; who waits for one waits for the mark.
    """
    _push(_NOTHING, name, reads, writes, _PRIORITIZED)


def call_on_worker(action: Callable[[], None]) -> None:
    """Have a worker thread of the engine call ``action`` when it gets there."""

    def called(*_: Any) -> None:
        try:
            action()
        except Exception:  # nowhere to go from here
            pass

    function = _CALLED(called)
    _callbacks.append(function)
    _push(ctypes.cast(function, ctypes.c_void_p), "dpro/call", (), (), _NORMAL)


def array() -> Any:
    """An array to mark with: never computed, nor touched by a mark."""
    return mx.nd.empty((1,), ctx=mx.cpu())


def wait(token: Any) -> None:
    """Until ``token`` is written.

    Raises:
        RuntimeError: an op of the job's failed; :func:`job_error` has its error.
    """
    try:
        token.wait_to_read()
    except Exception as error:
        _kept.append(error)
        raise RuntimeError("an operation of the job's own failed") from error


def read(values: Any) -> Any:
    """``values`` as a numpy array; raises as :func:`wait` does."""
    wait(values)
    return values.asnumpy()


def job_error() -> BaseException | None:
    """The error of the job's that dpro came upon, once."""
    if not _kept:
        return None
    error = _kept[0]
    _kept.clear()
    return error


class Pace:
    """Lets Python be one step ahead of the engine, no more, so that the time between two steps is a step's time.

    A job that looks at its loss in every step is never further ahead; one that does not would have its steps timed
    by how fast Python hands them in.

    Args:
        arrays: what a step writes last.
    """

    def __init__(self, arrays: Callable[[], Iterable[Any]]) -> None:
        self._arrays = arrays
        self._tokens = (array(), array())
        self._steps = 0

    def step(self) -> None:
        """A step was handed in; returns when the one before it is over.

        Raises:
            RuntimeError: as :func:`wait` does.
        """
        mine, former = self._tokens[self._steps % 2], self._tokens[1 - self._steps % 2]
        self._steps += 1
        mark("dpro/pace", list(self._arrays()), [mine])
        if self._steps > 1:
            wait(former)


def _push(function: ctypes.c_void_p, name: str, reads: Sequence[Any], writes: Sequence[Any], prop: Any) -> None:
    check_call(
        _LIB.MXEnginePushSyncND(
            function, None, None, ctypes.byref(_CPU),
            c_handle_array(reads), ctypes.c_int(len(reads)), c_handle_array(writes), ctypes.c_int(len(writes)),
            ctypes.byref(prop), ctypes.c_int(0), _names.setdefault(name, name.encode()),
        )
    )  # fmt: skip
