"""BytePS' own record of its stages, switched on and off in the running job. Knows no framework.

What ``BYTEPS_TRACE_ON`` and its companions say BytePS keeps in globals of its library. It looks at them when a name has
made a round: the name's ``start``-th one is the first that is recorded. The end that the environment would set is never
reached here: a name that passed it without having passed the start would end the process. What was recorded is written
by a call of BytePS' own.

BytePS fills a hash map per name with the name's partitions while other threads look things up in it. GCC's grows when
it gets its 14th entry, and who looks something up in that moment may crash; so no name with more partitions is
recorded.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpro.errors import TraceError
from dpro.trace.byteps import Comm, read

#: A name with more partitions is not recorded.
MOST_PARTS = 13
_ON, _START, _END, _FOLDER = (
    f"_ZN6byteps6common12BytePSGlobal{name}E"
    for name in ("9_is_trace", "11_start_step", "9_end_step", "10_trace_dirB5cxx11")
)
_WRITE = "_ZN6byteps6common12BytePSGlobal12OutputTracesEv"
#: ``std::string::assign(char const*)``
_ASSIGN = "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE6assignEPKc"
_NEVER = 2**31 - 1
#: BytePS tells of a tensor's end before it has noted it, s.
_NOTED_S = 0.05


def is_the_jobs() -> bool:
    """Whether the job was started with it."""
    return os.environ.get("BYTEPS_TRACE_ON", "0") not in ("", "0")


class _Layout(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t))


class OwnTrace:
    """The record of one library of BytePS'.

    Args:
        library: the plugin's.
        local_rank: by which BytePS names a folder.

    Raises:
        ValueError: this build of BytePS does not export what it takes.
    """

    def __init__(self, library: ctypes.CDLL, local_rank: int) -> None:
        self._local_rank = local_rank
        self._on, self._start, self._end = (ctypes.c_int.in_dll(library, name) for name in (_ON, _START, _END))
        self._folder = _Text(library, _FOLDER)
        try:
            self._write = getattr(library, _WRITE)
        except AttributeError as error:
            raise ValueError(str(error)) from error
        self._write.restype = None
        self._stock: tuple[int, int] | None = None

    @property
    def runs(self) -> bool:
        """Whether it was begun, and neither ended nor finished."""
        return self._stock is not None

    def begin(self, rounds: int) -> None:
        """Record, from the round after the next one on, the names that have made ``rounds``."""
        self._stock = self._stock or (self._start.value, self._end.value)
        # the flag of a name is set when a round ends: that of the next one
        self._start.value, self._end.value = rounds + 2, _NEVER
        self._on.value = 1

    def end(self) -> None:
        """Record no more than the next round of a name. What there is stays in memory until the next :meth:`finish`."""
        stock, self._stock = self._stock, None
        if stock is not None:
            self._on.value = 0
            self._start.value, self._end.value = stock

    def finish(self) -> Comm:
        """End, and what was recorded; no name may be on its way.

        Raises:
            RuntimeError: there is nothing, or it can't be read.
        """
        self.end()
        time.sleep(_NOTED_S)
        with tempfile.TemporaryDirectory(prefix="dpro-") as scratch:
            file = Path(scratch) / str(self._local_rank) / "comm.json"
            file.parent.mkdir()
            with self._folder.being(scratch):
                self._write()
            try:
                return read(file)
            except TraceError as error:
                raise RuntimeError(f"BytePS' own trace can't be read: {error}") from error


class _Text:
    """A global ``std::string``, laid out as its symbol says (``cxx11``)."""

    def __init__(self, library: ctypes.CDLL, symbol: str) -> None:
        self._value = _Layout.in_dll(library, symbol)
        try:
            self._assign: Any = getattr(ctypes.CDLL("libstdc++.so.6"), _ASSIGN)
        except (OSError, AttributeError) as error:
            raise ValueError(str(error)) from error
        self._assign.restype, self._assign.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)

    @contextmanager
    def being(self, text: str) -> Iterator[None]:
        """Another value for a while."""
        own = ctypes.string_at(self._value.at, self._value.size)
        self._put(text.encode())
        try:
            yield
        finally:
            self._put(own)

    def _put(self, text: bytes) -> None:
        self._assign(ctypes.addressof(self._value), text)
