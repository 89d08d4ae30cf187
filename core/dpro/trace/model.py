"""What one rank measured: events in numpy columns, and the facts around them.

This module knows no file format and no framework. Readers (``kineto.py``, …) make a
:class:`RankTrace`; ``graph`` reads it. All times are int64 nanoseconds; in traces captured by
dpro they are on the rank's ``CLOCK_MONOTONIC``, in imported files on whatever clock the file has
(one clock per file), with ``meta.clock`` saying which.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dpro.errors import TraceError
from dpro.trace import stored as stored_checks

FORMAT_VERSION = 1


class EventKind(IntEnum):
    """What an event is, as the profiler saw it."""

    CPU_OP = 0  # a framework op on a host thread; nested, `resource` is the thread
    RUNTIME = 1  # a driver/runtime call on a host thread (cudaLaunchKernel, cudaMemcpyAsync)
    KERNEL = 2  # work on a device stream; `resource` is the stream
    MEMCPY = 3  # a copy or memset on a device stream
    COLLECTIVE = 4  # the running of one collective: a NCCL kernel, a gloo work item
    SYNC = 5  # a host call that waits for the device (device/stream/event synchronise)
    ANNOTATION = 6  # a user or framework range (ProfilerStep, Optimizer.step); carries no work
    SEND = 7  # one socket call that wrote; `resource` is the directed stream "wire/<from>><to>" (ip:port)
    RECV = 8  # one socket call that read; its stream has the sender's name for it
    EVENT_RECORD = 9  # cudaEventRecord, `flow` joins it to STREAM_WAIT
    STREAM_WAIT = 10  # cudaStreamWaitEvent


#: Kinds that run on a device stream (a COLLECTIVE may run on a host thread instead).
DEVICE_KINDS = (EventKind.KERNEL, EventKind.MEMCPY, EventKind.COLLECTIVE)

#: Column name -> dtype. Every column has the length of the trace.
#: name:      index into RankTrace.names
#: kind:      EventKind
#: resource:  index into RankTrace.resources (a host thread, a device stream, a socket direction)
#: start/end: ns
#: step:      index into RankTrace.step_bounds, -1 outside every step
#: flow:      joins cause and effect: a launch and its kernel carry the same id; messages of one collective
#:            carry its tag on the wire (gloo's slot); a node of torch's backward pass has its number; -1 none
#: nbytes:    payload of a collective, copy or message; -1 unknown
#: peer:      the other rank of a message; of a STREAM_WAIT or SYNC the stream (resource) made to wait
#:            or waited for; -1 none
#: offset:    first byte on the directed stream of a message; -1 none
#: tensor:    index into RankTrace.tensors; -1 none
#: link:      of a STREAM_WAIT or event SYNC the stream (resource) whose event it waits for, with the
#:            EVENT_RECORD's id in `flow` where known; of a CPU_OP the layer (of ``meta.extra["layers"]``) that it is
#:            of, where that was noted (:mod:`dpro.trace.regions`); -1 none
COLUMNS: dict[str, str] = {
    "name": "i4",
    "kind": "u1",
    "resource": "i4",
    "start": "i8",
    "end": "i8",
    "step": "i4",
    "flow": "i8",
    "nbytes": "i8",
    "peer": "i4",
    "offset": "i8",
    "tensor": "i4",
    "link": "i8",
}
DEFAULTS = {"step": -1, "flow": -1, "nbytes": -1, "peer": -1, "offset": -1, "tensor": -1, "link": -1}


@dataclass
class Tensor:
    """One gradient. ``ready`` is its place in the gradient-ready order (0 first), -1 unknown."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    ready: int = -1
    #: Index of the DDP bucket / Horovod group it was captured in; -1 unknown.
    bucket: int = -1


@dataclass
class Collective:
    """Facts of one COLLECTIVE event that do not fit a column (keyed by event index)."""

    name: str  # all_reduce, all_gather, all_to_all, broadcast, …
    group: str = ""  # process group name or ranks, "" unknown
    sequence: int = -1  # order within the group, -1 unknown
    group_size: int = -1
    dtype: str = ""
    #: indices into RankTrace.tensors of what it carried, where the framework says so (Horovod's fused responses)
    tensors: tuple[int, ...] = ()


#: Key of ``Meta.extra``, and of a graph's ``info``: 16 bit formats that the job could reduce gradients in, best first.
GRADIENT_DTYPES = "gradient_dtypes"
#: A setting of a library's beyond this, ns or bytes, is not one.
_MOST_SETTING = 1 << 50


@dataclass
class Meta:
    """Everything about a capture that is not an event."""

    rank: int = -1
    world_size: int = -1
    host: str = ""
    framework: str = ""
    source: str = ""  # file or adapter it came from
    clock: str = "monotonic"  # monotonic | trace (the file's own)
    #: ns of steps timed with nothing attached, before capture (may be empty)
    unprofiled_step_ns: list[int] = field(default_factory=list)
    #: measured cost of recording one event, ns, subtracted from host ops by the graph builder
    event_overhead_ns: float = 0.0
    #: CPU time of the host's threads during capture, ns (empty: not known): ``main_cpu_ns`` the training
    #: thread ran, ``main_delay_ns`` it was runnable without a core, ``others_cpu_ns`` the others ran, ``wall_ns``;
    #: ``cores`` that the process may use; ``idle_share``, no time: of one core, 0 to 1, what communication threads take
    #: while nothing is handed in (Horovod's rounds)
    contention: dict[str, float] = field(default_factory=dict)
    #: anything a reader or adapter wants to keep; JSON values only
    extra: dict[str, Any] = field(default_factory=dict)

    def library(self) -> dict[str, int]:
        """What the communication library was set to, as far as an adapter said and it can be believed.

        ``cycle_ns``, ``fusion_bytes`` (0: never fused), ``ddp_first_bucket_bytes``.
        """
        told = self.extra.get("graph_info")
        known = ("cycle_ns", "fusion_bytes", "ddp_first_bucket_bytes")
        values = {key: told.get(key) for key in known} if isinstance(told, dict) else {}
        return {key: n for key, n in values.items() if type(n) is int and 0 <= n < _MOST_SETTING}

    def gradient_dtypes(self) -> list[str]:
        """16 bit formats that the job could reduce gradients in, best first; none where no adapter said."""
        told = self.extra.get(GRADIENT_DTYPES)
        return [dtype for dtype in told if isinstance(dtype, str)] if isinstance(told, list) else []


@dataclass
class RankTrace:
    """One rank's events as columns (see :data:`COLUMNS`), sorted by start.

    ``step_bounds`` is int64 [steps, 2]: start and end of every captured step, ns.
    """

    meta: Meta
    columns: dict[str, npt.NDArray[Any]]
    names: list[str]
    resources: list[str]
    step_bounds: npt.NDArray[np.int64]
    tensors: list[Tensor] = field(default_factory=list)
    collectives: dict[int, Collective] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["start"])

    def __getattr__(self, key: str) -> npt.NDArray[Any]:
        # trace.start instead of trace.columns["start"]
        columns = self.__dict__.get("columns")
        if columns is not None and key in columns:
            found: npt.NDArray[Any] = columns[key]
            return found
        raise AttributeError(key)

    @property
    def streams(self) -> list[int]:
        """Resources that are device streams; none in a job on the host alone."""
        return [i for i, name in enumerate(self.resources) if name.startswith("stream/")]

    @property
    def steps(self) -> int:
        return len(self.step_bounds)

    def step_ns(self) -> npt.NDArray[np.int64]:
        """Duration of every captured step, ns."""
        return self.step_bounds[:, 1] - self.step_bounds[:, 0]

    def assign_steps(self) -> None:
        """Fill the ``step`` column from ``step_bounds`` (an event belongs where it starts)."""
        if len(self.step_bounds):
            self.columns["step"] = self.step_at(self.start).astype(np.int32)

    def step_at(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The step that each of ``times`` (ns) lies in, -1 outside every step."""
        step = np.searchsorted(self.step_bounds[:, 0], times, side="right") - 1
        return np.where((step >= 0) & (times < self.step_bounds[np.maximum(step, 0), 1]), step, -1)

    def sort(self) -> None:
        """Rows by start, longer ones first, so that parents precede children."""
        order = np.lexsort((-self.end, self.start))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        self.columns = {key: column[order] for key, column in self.columns.items()}
        self.collectives = {int(place[row]): facts for row, facts in self.collectives.items()}

    def joined(self, more: RankTrace) -> RankTrace:
        """A new trace with the rows of ``more`` (on the same clock) among its own; all else is as it is here."""
        columns = {key: np.concatenate([self.columns[key], more.columns[key]]) for key in self.columns}
        names, columns["name"][len(self) :] = _extended(self.names, more.names, more.name)
        resources, columns["resource"][len(self) :] = _extended(self.resources, more.resources, more.resource)
        moved = {row + len(self): facts for row, facts in more.collectives.items()}
        out = replace(
            self,
            columns=columns,
            names=names,
            resources=resources,
            collectives=self.collectives | moved,
            warnings=list(self.warnings),
        )
        out.sort()
        out.assign_steps()
        return out

    def shift(self, offset_ns: int) -> None:
        """Move every time by ``offset_ns`` (another clock's zero)."""
        self.columns["start"] = self.start + offset_ns
        self.columns["end"] = self.end + offset_ns
        self.step_bounds = self.step_bounds + offset_ns

    def save(self, path: Path | IO[bytes]) -> None:
        """Write one compressed ``.npz`` (numbers as arrays, the rest as JSON; nothing pickled)."""
        side = {
            "version": FORMAT_VERSION,
            "meta": asdict(self.meta),
            "names": self.names,
            "resources": self.resources,
            "tensors": [asdict(t) for t in self.tensors],
            "collectives": {str(k): asdict(c) for k, c in self.collectives.items()},
            "warnings": self.warnings,
        }
        blob = np.frombuffer(json.dumps(side).encode(), dtype=np.uint8)
        np.savez_compressed(path, side=blob, step_bounds=self.step_bounds, **self.columns)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path | IO[bytes]) -> RankTrace:
        """Read what :meth:`save` wrote.

        Raises:
            TraceError: not such a file, written by a newer dpro, or with numbers that fit nothing in it.
        """
        if isinstance(path, Path):  # opened here: numpy leaves a file open that is no zip
            try:
                with path.open("rb") as file:
                    return cls._load(file, path)
            except OSError as error:
                raise TraceError(path, error.strerror or "cannot be read") from error
        return cls._load(path, path)

    @classmethod
    def _load(cls, file: IO[bytes], path: object) -> RankTrace:
        try:
            stored_checks.check_sizes(file)
            with np.load(file, allow_pickle=False) as stored:
                side = json.loads(stored["side"].tobytes())
                if side["version"] != FORMAT_VERSION:
                    raise TraceError(path, f"trace version {side['version']}, this dpro reads {FORMAT_VERSION}")
                columns = {key: stored[key] for key in COLUMNS}
                bounds = stored["step_bounds"]
            trace = cls(
                meta=Meta(**side["meta"]),
                columns=columns,
                names=side["names"],
                resources=side["resources"],
                step_bounds=bounds,
                tensors=[Tensor(**{**t, "shape": tuple(t["shape"])}) for t in side["tensors"]],
                collectives={
                    int(k): Collective(**{**c, "tensors": tuple(c.get("tensors", ()))})
                    for k, c in side["collectives"].items()
                },
                warnings=side["warnings"],
            )
            stored_checks.check(trace, COLUMNS, len(EventKind))
            if backward := int((trace.end < trace.start).sum()):
                trace.warnings.append(f"{backward} event(s) that end before they start taken as 0 long")
                trace.columns["end"] = np.maximum(trace.start, trace.end)
            return trace
        except TraceError:
            raise
        except stored_checks.Unfit as error:
            raise TraceError(path, f"not a dpro trace ({error})") from error
        except Exception as error:  # zip, json, key and type errors all mean the same to the reader
            raise TraceError(path, f"not a dpro trace ({type(error).__name__})") from error


class TraceBuilder:
    """Collects events row by row and freezes them into a :class:`RankTrace`."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        self.warnings: list[str] = []
        self._rows = {key: array("q") for key in COLUMNS}  # 8 bytes a number: traces have millions
        self._names: dict[str, int] = {}
        self._resources: dict[str, int] = {}
        self._collectives: dict[int, Collective] = {}

    def __len__(self) -> int:
        return len(self._rows["start"])

    def name_id(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def resource_id(self, name: str) -> int:
        return self._resources.setdefault(name, len(self._resources))

    def add(
        self,
        name: str,
        kind: EventKind,
        resource: str,
        start: int,
        end: int,
        collective: Collective | None = None,
        **more: int,
    ) -> int:
        """Append one event; ``more`` are further columns. Returns its (unsorted) index."""
        index = len(self)
        rows = self._rows
        rows["name"].append(self.name_id(name))
        rows["kind"].append(int(kind))
        rows["resource"].append(self.resource_id(resource))
        rows["start"].append(start)
        rows["end"].append(end)
        for key, default in DEFAULTS.items():
            rows[key].append(more.get(key, default))
        if collective is not None:
            self._collectives[index] = collective
        return index

    def freeze(self, step_bounds: list[tuple[int, int]]) -> RankTrace:
        """Sort by start (longer first, so that parents precede children) and assign steps."""
        trace = RankTrace(
            meta=self.meta,
            columns={key: np.asarray(rows, dtype=COLUMNS[key]) for key, rows in self._rows.items()},
            names=list(self._names),
            resources=list(self._resources),
            step_bounds=np.asarray(sorted(step_bounds), dtype=np.int64).reshape(-1, 2),
            collectives=self._collectives,
            warnings=self.warnings,
        )
        trace.sort()
        trace.assign_steps()
        return trace


def _extended(
    table: list[str], more: list[str], ids: npt.NDArray[np.integer]
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """``table`` with the new ones of ``more`` behind it, and ``ids``, places in ``more``, as places in that."""
    out, place = list(table), {name: k for k, name in enumerate(table)}
    for name in more:
        if name not in place:
            place[name] = len(out)
            out.append(name)
    return out, np.array([place[name] for name in more], dtype=np.int64)[ids]
