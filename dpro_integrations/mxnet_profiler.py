"""MXNet's profiler, of which a process has one: what the job does with it, and lending it to a capture.

MXNet has no call that says whether its profiler runs: that is read off the profiler itself (1.9; :func:`_state`). Nor
does it say how it is configured, so that the job's calls are noted, from :func:`watch` on (which is called when
``dpro_integrations.mxnet`` is imported, or at activation by environment). The job has the right of way: whatever it
asks of the profiler while a capture has it ends the capture first.

MXNet 1.9 writes the head of its file once per process, and every later file without: no JSON. A capture takes the head
away from the first profile of the job's own, so that it is put back there (:func:`mend`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mxnet import profiler
from mxnet.base import _LIB, MXNetError

#: As a process starts (``src/profiler/profiler.h``, Profiler's members).
_INITIAL: dict[str, Any] = {
    "profile_symbolic": True,
    "profile_imperative": False,
    "profile_memory": True,
    "profile_api": True,
    "continuous_dump": False,
    "aggregate_stats": False,
    "filename": "profile.json",
}
#: MXNet removes a file of this name when it is configured: a name is given only with a run.
_NO_FILE = ""
#: How a file begins, and what follows the head's records, of which there may be none (``src/profiler/profiler.cc``).
_START, _NEXT = '{\n    "traceEvents": [\n', ",\n\n    {"
_FUNCTIONS = ("set_config", "profiler_set_config", "set_state", "dump", "dumps", "pause", "resume")


class _Ledger:
    """What the job last asked for."""

    def __init__(self) -> None:
        self.config: dict[str, Any] | None = None
        self.file = Path()
        self.running = os.environ.get("MXNET_PROFILER_AUTOSTART", "0") not in ("", "0")
        #: what it recorded is still to be written
        self.undumped = self.running
        #: our configuration is in force instead of its own
        self.ours = False
        #: records of the head that a capture has taken, until the job's own file has them
        self.head = ""
        self.give_way: Callable[[], None] | None = None
        #: whether anybody still asks
        self.wanted = False
        self.originals: dict[str, Callable[..., Any]] = {}
        self.wrappers: dict[str, Callable[..., Any]] = {}


_ledger = _Ledger()


def watch() -> None:
    """Note the job's calls from now on. Safe to call twice."""
    ledger = _ledger
    ledger.wanted = True
    if ledger.originals:
        return
    for name in _FUNCTIONS:
        original = getattr(profiler, name)
        wrapper = functools.wraps(original)(functools.partial(_called, name))
        ledger.originals[name], ledger.wrappers[name] = original, wrapper
        setattr(profiler, name, wrapper)


def unwatch() -> None:
    """Let the functions go, once the job has its own configuration back, and the head that a capture has taken."""
    ledger = _ledger
    ledger.wanted = False
    if ledger.head or ledger.ours:
        return
    for name, original in ledger.originals.items():
        if getattr(profiler, name) is ledger.wrappers[name]:
            setattr(profiler, name, original)
    ledger.originals, ledger.wrappers = {}, {}


def in_use() -> str:
    """Why a capture can't have the profiler, one clause; "" if it can."""
    running, undumped = _state() or (_ledger.running, _ledger.undumped)
    if running:
        return "the job's own profiler is running"
    if undumped:
        return "the job's own profiler holds what it recorded"
    return ""


def _state() -> tuple[bool, bool] | None:
    """Whether the profiler runs, and whether it holds what is not dumped; None where that can't be read.

    ``mxnet::profiler::Profiler`` begins with the pointer to its functions (8 bytes), a mutex (40), ``state_`` (int),
    ``enable_output_`` (bool, padded) and ``mode_`` (int, a sum of 1, 2, 4 and 8).
    """
    try:
        get = _LIB._ZN5mxnet8profiler8Profiler3GetEPSt10shared_ptrIS1_E
    except AttributeError:
        return None
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    state, output, mode = struct.unpack_from("i?3xi", ctypes.string_at(get(None), 60), 48)
    return (state == 1, output) if state in (0, 1) and 0 <= mode < 16 else None


def borrow(file: str, give_way: Callable[[], None]) -> None:
    """Record every op of the engine, one by one: with statistics MXNet makes no bulks, and after them as before.

    Args:
        file: where :func:`give_back` writes.
        give_way: called when the job wants the profiler; must give it back.

    Raises:
        RuntimeError: the job uses it.
    """
    if reason := in_use():
        raise RuntimeError(reason)
    watch()
    _ledger.ours, _ledger.give_way, _ledger.file = True, give_way, Path(file)
    own = {"profile_api": False, "profile_memory": False, "profile_symbolic": True, "profile_imperative": True}
    _ledger.originals["set_config"](continuous_dump=False, aggregate_stats=True, filename=file, **own)
    _ledger.originals["set_state"]("run")


def give_back() -> None:
    """Stop recording; what was recorded is in the file. Does nothing where nothing is lent."""
    ledger = _ledger
    if ledger.give_way is None:
        return
    ledger.give_way = None
    ledger.originals["set_state"]("stop")
    ledger.originals["dump"](True)
    ledger.originals["set_config"](**(_INITIAL | {"filename": _NO_FILE}))
    ledger.head = mend(ledger.file, "") or ledger.head


def mend(file: Path, head: str) -> str:
    """Put the records ``head`` in front of a file that has none; returns those of a file that has some, else ""."""
    text = file.read_text()
    records, next_, _ = text.removeprefix(_START).partition(_NEXT)
    if records or not next_:
        return records if next_ and '"ph": "M"' in records else ""
    body = text.removeprefix(_START).removeprefix(next_).lstrip()
    file.write_text(f"{_START}{head}{next_ if head else '    {'}\n        {body}")
    return ""


def _as_config(mode: str = "symbolic", filename: str = "profile.json") -> dict[str, Any]:
    """What the deprecated ``profiler_set_config`` sets."""
    return {f"profile_{mode}": True, "filename": filename}


def _configure(ledger: _Ledger) -> None:
    """Put the job's configuration in force after one of ours.

    1.9 can't start its thread for continuous dumps, which are the default, again once a capture has stopped it: then
    what the job records is written when it asks for it.
    """
    config = _INITIAL if ledger.config is None else ledger.config
    try:
        ledger.originals["set_config"](**config)
    except MXNetError:
        ledger.originals["set_config"](**{**config, "continuous_dump": False})


def _called(name: str, *args: Any, **kwargs: Any) -> Any:
    ledger = _ledger
    if ledger.give_way is not None:
        ledger.give_way()
    original = ledger.originals.get(name) or getattr(profiler, name)
    if kwargs.get("profile_process", "worker") != "worker":  # that of a parameter server, another process
        return original(*args, **kwargs)
    if name in ("set_config", "profiler_set_config"):
        ledger.config = dict(kwargs) if name == "set_config" else _as_config(*args, **kwargs)
        if ledger.ours:
            ledger.ours, original = False, lambda *_, **__: _configure(ledger)
    elif name == "set_state":
        state = args[0] if args else kwargs.get("state", "stop")
        ledger.running = state == "run"
        if ledger.running:
            ledger.undumped = True
            if ledger.ours:  # it relies on what it had set before
                ledger.ours = False
                _configure(ledger)
    result = original(*args, **kwargs)
    if name in ("dump", "dumps") and not ledger.running:
        ledger.undumped = False
    if name == "dump" and ledger.head:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # it is as MXNet wrote it, then
            mend(Path((ledger.config or _INITIAL).get("filename", _INITIAL["filename"])), ledger.head)
        ledger.head = ""
    if not ledger.wanted:
        unwatch()
    return result
