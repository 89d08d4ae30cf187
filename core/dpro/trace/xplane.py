"""Reader of TensorFlow's profiles: XSpace protobufs, ``<log folder>/plugins/profile/<time>/<host>.xplane.pb``.

Knows ``tsl/profiler/protobuf/xplane.proto`` and how TensorFlow's host tracer fills it (2.15, read beside its own
``xplane_pb2``): one plane ``/host:CPU``, one line a thread, one event a TraceMe. At ``host_tracer_level=3`` every node
that the executor runs is an event ``<node>:<OpType>`` (below, the cheap ones are missing); those are the ops. What
only wraps others or belongs to the executor itself is left out: ``ExecutorState::Process``, ``EagerExecute``,
``ExecutorPropagateOutputs``, ``FunctionRun``, Python frames. A call of a function that was not inlined is an op with
ops inside.

Steps are the ranges with a ``step_num``, which Keras calls ``train``; else the calls of the ``tf.function`` that took
most of the time. Times are ns since the profiler's session began, on CLOCK_REALTIME's rate (``GetCurrentTimeNanos``);
newer TensorFlow says when that was, in a plane "Task Environment", and then they are made ns of CLOCK_REALTIME. A job
that wants them on its own clock puts :data:`CLOCK_MARK` ranges into its profile, at best at the start and the end::

    with tf.profiler.experimental.Trace(CLOCK_MARK, monotonic_ns=time.monotonic_ns()):
        pass

Names come last in a plane, behind its events: of a file that is cut, the last plane has none.
"""

from __future__ import annotations

import mmap
import os
import re
from array import array
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dpro.errors import TraceError
from dpro.trace.dataflow import normalise
from dpro.trace.kineto import rank_in_name
from dpro.trace.model import EventKind, Meta, RankTrace, TraceBuilder
from dpro.trace.protowire import BYTES, Damage, Data, Schema, fields, message, signed, text
from dpro.trace.steps import infer_steps

#: Name of a range whose stat ``monotonic_ns`` says what CLOCK_MONOTONIC read when it began.
CLOCK_MARK = "dpro_clock"
_HOST, _ENVIRONMENT, _DEVICE = "/host:", "Task Environment", "/device:"
#: tsl/profiler/utils/tf_op_utils.cc: IsTfOpName, IsTfOpType
_OP = re.compile(r"([A-Za-z0-9.][A-Za-z0-9_./\\>-]*):([A-Z_][A-Za-z0-9_]*)")
#: Events of the executor's own, and those of them that only level 3 has (seen with 2.15.1).
_EXECUTOR = "Executor"
_VERBOSE = ("ExecutorPropagateOutputs", "ExecutorState::ScheduleReady")
_FULL_LEVEL = "profile with ProfilerOptions(host_tracer_level=3)"
#: No protobuf is larger.
_MAX_BYTES = 2 << 30
_MAX_TIME_NS = 1 << 62
_MAX_CLOCK_NS = 1 << 61
_MAX_DURATION_NS = 24 * 3600 * 10**9

# xplane.proto
_XSPACE_PLANE, _XSPACE_HOST = 1, 4
_PLANE_NAME, _PLANE_LINE, _PLANE_EVENTS, _PLANE_STATS, _PLANE_STAT = 2, 3, 4, 5, 6
_LINE_ID, _LINE_NAME, _LINE_NS, _LINE_EVENT = 1, 2, 3, 4
_EVENT_KIND, _EVENT_OFFSET, _EVENT_DURATION, _EVENT_STAT, _EVENT_COUNT = 1, 2, 3, 4, 5
_STAT_KIND, _STAT_UINT, _STAT_INT, _STAT_TEXT, _STAT_NAME = 1, 3, 4, 5, 7
#: What TensorFlow's allocator records, where it was told to count (``tsl/framework/cpu_allocator_impl.cc``).
_ALLOCATED, _FREED = "MemoryAllocation", "MemoryDeallocation"
_TEXT_STAT: Schema = {_STAT_KIND: ("kind", None), _STAT_TEXT: ("text", None), _STAT_NAME: ("name", None)}
_MAX_BYTES_AT_ONCE = 1 << 50
_T = TypeVar("_T")
#: An entry of the two maps from numbers to names.
_ENTRY: Schema = {1: ("key", None), 2: ("value", {2: ("name", None)})}


class Allocation(NamedTuple):
    """``nbytes`` allocated at ``at`` (ns, on the trace's clock) by the node ``op`` ("" unknown); 0: freed."""

    at: int
    address: int
    nbytes: int
    op: str


def read(path: Path, allocations: list[Allocation] | None = None) -> RankTrace:
    """Read one rank's profile as far as it goes.

    ``meta.rank`` is -1 where the file name does not tell it. ``allocations`` gets those that the profile has, by time.

    Raises:
        TraceError: the file cannot be read, is no XSpace, or no op of TensorFlow's executor is in it.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise TraceError(path, "empty file")
            if size > _MAX_BYTES:
                raise TraceError(path, f"{size >> 20} MiB, more than any protobuf has")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                trace = _read(data, path, allocations)
    except OSError as error:
        raise TraceError(path, error.strerror or "cannot be read") from error
    trace.meta.rank = rank_in_name(path)
    return trace


def read_bytes(blob: bytes, source: object, allocations: list[Allocation] | None = None) -> RankTrace:
    """The same of a serialised XSpace; ``source`` is what errors and ``meta.source`` call it."""
    return _read(blob, source, allocations)


def _read(data: Data, source: object, allocations: list[Allocation] | None = None) -> RankTrace:
    reader = _Reader(data, source)
    reader.space()
    trace = reader.finish()
    if allocations is not None:
        made = sorted(reader.allocations, key=lambda one: one.at)
        allocations += [one._replace(at=one.at + reader.shifted) for one in made]
    return trace


class _Reader:
    def __init__(self, data: Data, source: object) -> None:
        self.data, self.source = data, source
        self.damage = Damage()
        self.counts: Counter[str] = Counter()
        meta = Meta(source=str(source), clock="trace", framework="tensorflow")
        self.builder = TraceBuilder(meta)
        self.planes = 0  # of TensorFlow's, also without ops
        self.full_level = False
        self.epoch_ns = 0
        self.clock_ns: list[int] = []  # what was to be taken from a time to have the monotonic one
        self.shifted = 0  # what was added to all times in the end
        self.allocations: list[Allocation] = []
        self.op_types: dict[str, str] = {}
        self.threads: dict[int, str] = {}  # line id -> resource
        self.unnamed: list[tuple[str, str, int, int]] = []
        self.marks: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        self.calls: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    def space(self) -> None:
        for number, wire, at, end in fields(self.data, 0, len(self.data), self.damage):
            if wire == BYTES and number == _XSPACE_PLANE:
                self._plane(at, end)
            elif wire == BYTES and number == _XSPACE_HOST and not self.builder.meta.host:
                self.builder.meta.host = text(self.data, at, end)

    def _plane(self, at: int, end: int) -> None:
        name = ""
        lines: list[tuple[int, int]] = []
        own: list[tuple[int, int]] = []
        kinds: dict[int, str] = {}
        stats: dict[int, str] = {}
        for number, wire, value, until in fields(self.data, at, end, self.damage):
            if wire != BYTES:
                continue
            if number == _PLANE_NAME:
                name = text(self.data, value, until)
            elif number == _PLANE_LINE:
                lines.append((value, until))
            elif number == _PLANE_STAT:
                own.append((value, until))
            elif number in (_PLANE_EVENTS, _PLANE_STATS):
                entry = message(self.data, value, until, _ENTRY, self.damage)
                table = kinds if number == _PLANE_EVENTS else stats
                table[_last(entry, "key", int, 0)] = _last(_last(entry, "value", dict, {}), "name", str, "")
        if name == _ENVIRONMENT:
            told = self._stats(own, stats).get("profile_start_time", 0)
            self.epoch_ns = told if 0 < told < _MAX_TIME_NS else 0
        elif name.startswith(_HOST):
            self.planes += 1
            host = _Kinds(kinds, stats, cut=end > len(self.data))
            self.full_level |= any(kind in _VERBOSE for kind in kinds.values())
            for begin, until in lines:
                self._line(begin, until, host)
        elif name.startswith(_DEVICE):
            self.planes += 1
            if lines:
                self.counts["line(s) of devices not read: only ops on the host are"] += len(lines)

    def _line(self, at: int, end: int, kinds: _Kinds) -> None:
        number, name, base = 0, "", 0
        events = array("q")
        for key, wire, value, until in fields(self.data, at, end, self.damage):
            if key == _LINE_EVENT and wire == BYTES:
                events.extend((value, until))
            elif key == _LINE_NAME and wire == BYTES:
                name = text(self.data, value, until)
            elif key == _LINE_ID and wire != BYTES:
                number = signed(value)
            elif key == _LINE_NS and wire != BYTES:
                base = signed(value)
        if not events:
            return
        thread = self._thread(number, name)
        for i in range(0, len(events), 2):
            self._event(events[i], events[i + 1], base, thread, kinds)

    def _thread(self, number: int, name: str) -> str:
        """Resource of a line; threads of one name (Python's) are told apart by their number."""
        if number not in self.threads:
            resource = f"cpu/{name or number}"
            if resource in self.threads.values():
                resource = f"{resource}/{number}"
            self.threads[number] = resource
        return self.threads[number]

    def _event(self, at: int, end: int, base: int, thread: str, kinds: _Kinds) -> None:
        kind, offset, duration = -1, 0, 0
        stats: list[tuple[int, int]] = []
        for key, wire, value, until in fields(self.data, at, end, self.damage):
            if key == _EVENT_KIND and wire != BYTES:
                kind = signed(value)
                if kind in kinds.dull:
                    return
            elif key == _EVENT_OFFSET and wire != BYTES:
                offset = signed(value)
            elif key == _EVENT_DURATION and wire != BYTES:
                duration = signed(value)
            elif key == _EVENT_STAT and wire == BYTES:
                stats.append((value, until))
            elif key == _EVENT_COUNT:  # a sum of many: it has no time
                return
        if end > len(self.data):
            return  # its end may be missing
        start = base + offset // 1000
        duration = duration // 1000
        if not 0 <= start < _MAX_TIME_NS:
            self.counts["event(s) at an absurd time dropped"] += 1
            return
        if not 0 <= duration <= _MAX_DURATION_NS:
            self.counts["unfinished event(s) (negative or absurd duration) taken as 0 long"] += 1
            duration = 0
        op = kinds.ops.get(kind)
        if op is not None:
            self.op_types[op[0]] = op[1]
            self.builder.add(op[0], EventKind.CPU_OP, thread, start, start + duration)
        elif kinds.names.get(kind) in (_ALLOCATED, _FREED):
            self._allocation(kinds.names[kind], start, stats, kinds.stats)
        elif kind in kinds.names:
            self._range(kinds.names[kind], start, start + duration, thread, self._stats(stats, kinds.stats))
        elif kinds.cut:
            self.unnamed.append((f"event {kind}", thread, start, start + duration))
        else:
            self.counts["event(s) of a kind that the file does not name dropped"] += 1

    def _range(self, name: str, start: int, end: int, thread: str, stats: dict[str, int]) -> None:
        """What a TraceMe that is no op tells: a step, a call of a function, what time it is."""
        if name == CLOCK_MARK and 0 <= stats.get("monotonic_ns", -1) < _MAX_CLOCK_NS:
            self.clock_ns.append(start - stats["monotonic_ns"])
        elif "step_num" in stats:
            self.marks[name].append((start, end, thread))
        elif "tf_function_call" in stats:
            self.calls[name].append((start, end))

    def _allocation(self, kind: str, at: int, stats: list[tuple[int, int]], names: dict[int, str]) -> None:
        numbers = self._stats(stats, names)
        address, nbytes = numbers.get("addr", -1), numbers.get("requested_bytes", 0) if kind == _ALLOCATED else 0
        if address < 0 or (kind == _ALLOCATED and not 0 < nbytes < _MAX_BYTES_AT_ONCE):
            return
        op = ""
        for begin, until in stats:
            told = message(self.data, begin, until, _TEXT_STAT, self.damage)
            if names.get(_last(told, "kind", int, 0)) == "tf_op":
                op = names.get(_last(told, "name", int, 0), "") or _last(told, "text", str, "")
        self.allocations.append(Allocation(at, address, nbytes, normalise(op)))

    def _stats(self, places: list[tuple[int, int]], names: dict[int, str]) -> dict[str, int]:
        """Whole numbers among the stats, by name; the others as -1."""
        out = {}
        for at, end in places:
            name, number = "", -1
            for key, wire, value, _ in fields(self.data, at, end, self.damage):
                if key == _STAT_KIND and wire != BYTES:
                    name = names.get(signed(value), "")
                elif key in (_STAT_UINT, _STAT_INT) and wire != BYTES:
                    number = signed(value)
            out[name] = number
        return out

    # -- after the last plane ------------------------------------------------------------------

    def finish(self) -> RankTrace:
        builder = self.builder
        named = len(builder)
        if not named:
            for name, thread, start, end in self.unnamed:
                builder.add(name, EventKind.CPU_OP, thread, start, end)
        lost = self.damage.warnings()
        if self.unnamed:
            lost.append(
                f"{len(self.unnamed)} event(s) whose names were behind the end of the file "
                + ("dropped" if named else "called by number; some only wrap others")
            )
        lost += [f"{count} {what}" for what, count in sorted(self.counts.items())]
        if not len(builder):
            why = f"no op of TensorFlow's executor in it: {_FULL_LEVEL}" if self.planes else "not a TensorFlow profile"
            raise TraceError(self.source, "; ".join([why, *lost]))
        builder.warnings += lost
        if named and not self.full_level:
            builder.warnings.append(f"cheap ops are missing: {_FULL_LEVEL}")
        builder.meta.extra |= {"dataflow": {}, "op_types": self.op_types}
        trace = self._in_steps()
        if self.clock_ns:
            # A mark's range begins after the clock was read: the least difference is the nearest to the truth.
            self.shifted = -min(self.clock_ns)
            trace.shift(self.shifted)
            trace.meta.clock = "monotonic"
        elif self.epoch_ns and int(trace.end.max()) < _MAX_TIME_NS - self.epoch_ns:
            self.shifted = self.epoch_ns
            trace.shift(self.shifted)
        return trace

    def _in_steps(self) -> RankTrace:
        builder = self.builder
        # Evaluation has its own name ("test") and is no step of training.
        name = "train" if "train" in self.marks else max(self.marks, key=lambda n: len(self.marks[n]), default="")
        bounds = _apart([(start, end) for start, end, _ in self.marks[name]])
        for start, end, thread in self.marks[name]:
            builder.add(name, EventKind.ANNOTATION, thread, start, end)
        if not bounds and self.calls:
            name = max(self.calls, key=lambda n: sum(end - start for start, end in self.calls[n]))
            calls = _apart(self.calls[name])
            bounds = list(pairwise([*(start for start, _ in calls), *(end for _, end in calls[-1:])]))
            builder.warnings.append(f"no step marks: {len(bounds)} step(s) told by calls of the tf.function {name!r}")
        trace = builder.freeze(bounds)
        if not trace.steps:
            trace.step_bounds, how = infer_steps(trace)
            trace.warnings.append(f"no step marks: {how}")
            trace.assign_steps()
        return trace


class _Kinds:
    """What the numbers of a plane's events stand for."""

    def __init__(self, names: dict[int, str], stats: dict[int, str], cut: bool) -> None:
        self.names, self.stats, self.cut = names, stats, cut
        self.ops: dict[int, tuple[str, str]] = {}
        for kind, name in names.items():
            if match := _OP.fullmatch(name):
                self.ops[kind] = normalise(match[1]), match[2]
        #: not worth a look: most of all events
        self.dull = {kind for kind, name in names.items() if name.startswith(_EXECUTOR) and kind not in self.ops}


def _apart(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges that take time and do not begin inside one before, by start."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if end > start and (not out or start >= out[-1][1]):
            out.append((start, end))
    return out


def _last(parsed: dict[str, list[Any]], key: str, kind: type[_T], default: _T) -> _T:
    """A field that is there once, the last time it is."""
    return next((value for value in reversed(parsed.get(key, [])) if isinstance(value, kind)), default)
