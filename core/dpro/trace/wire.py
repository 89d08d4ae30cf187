"""The wire: every socket call by which the communication libraries of this process moved bytes.

The tracer (``core/native/wire.cpp``) puts wrappers into the slots (global offset table entries) through which the
named libraries call ``send``, ``recv`` and the like, and takes them out again. TCP alone; files, pipes and sockets
of other kinds pass untouched. Offsets are counted from the connection's first byte, by both ends alike, whenever
either began to look: where a stream stands at the first traced call comes from the kernel (``TCP_INFO``).

Assumed, and true of gloo, ZeroMQ and libuv: no two threads move bytes on one connection in one direction at once,
and nobody but the named libraries does on their connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro import _native
from dpro.trace import gloo
from dpro.trace.model import COLUMNS, DEFAULTS, EventKind, RankTrace

#: Parts of the file names of libraries that carry gradients: torch (with gloo), Horovod, BytePS.
LIBRARIES = ("libtorch_cpu.so", "libgloo", "mpi_lib", "c_lib.", "libps.")

_Int = npt.NDArray[np.int64]


@dataclass
class Events:
    """Socket calls that moved bytes, in the order in which they ended. Columns [events].

    ``resource`` is an index into ``resources``, the directed streams (``wire/<sender>><receiver>``, ip:port; both
    ends have the same name for it). ``offset`` is -1 where the kernel does not say where the stream stood.
    """

    kind: npt.NDArray[np.uint8]  #: EventKind.SEND or RECV
    resource: npt.NDArray[np.int32]
    start: _Int  #: ns, CLOCK_MONOTONIC
    end: _Int
    offset: _Int  #: first byte on the directed stream
    nbytes: _Int
    head: npt.NDArray[np.uint8]  #: [events, 48] the first bytes moved
    head_bytes: npt.NDArray[np.uint8]  #: how many of ``head`` are there
    resources: list[str]

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Seen:
    """What a capture saw; filled when it ends."""

    events: Events = field(default_factory=lambda: _events(_NOTHING))
    #: calls for which there was no room
    dropped: int = 0
    #: slots patched
    slots: int = 0
    #: why nothing was seen, "" if something could be
    why: str = ""


def supported() -> str:
    """Why the wire cannot be traced on this machine; "" where it can."""
    return _native.wire_unsupported()


@contextlib.contextmanager
def capture(libraries: Sequence[str] | None = None) -> Iterator[Seen]:
    """Trace while the block runs; what was seen is in the yielded object afterwards.

    Never raises on its own account: where nothing can be traced the capture is empty and ``why`` says so.

    Args:
        libraries: parts of file names of loaded libraries; :data:`LIBRARIES` if not given.
    """
    seen = Seen(why=supported())
    wanted = list(LIBRARIES if libraries is None else libraries)
    attached = False
    if not seen.why:
        try:
            seen.slots = _native.wire_attach(wanted)
            attached = True
            if not seen.slots:
                seen.why = f"no library with a traced call is loaded ({', '.join(wanted)})"
        except RuntimeError as error:
            seen.why = str(error)
    try:
        yield seen
    finally:
        if attached:
            found = _native.wire_detach()
            seen.events, seen.dropped = _events(found), found["dropped"]


def append(trace: RankTrace, events: Events) -> RankTrace:
    """``trace`` with a row per socket call, all sorted by start; ``trace`` itself is not changed.

    A row's name is ``payload``, ``control`` or ``message``, its flow gloo's slot or -1 (see :mod:`dpro.trace.gloo`).
    """
    labels, slots = _label(events)
    rows: dict[str, npt.NDArray[Any]] = {
        "name": labels,
        "kind": events.kind,
        "resource": events.resource,
        "start": events.start,
        "end": events.end,
        "flow": slots,
        "nbytes": events.nbytes,
        "offset": events.offset,
    }
    for key in COLUMNS.keys() - rows.keys():
        rows[key] = np.full(len(events), DEFAULTS[key])
    columns = {key: rows[key].astype(kind) for key, kind in COLUMNS.items()}
    names = [label.name.lower() for label in gloo.Label]
    return trace.joined(RankTrace(trace.meta, columns, names, events.resources, np.empty((0, 2), dtype=np.int64)))


class Tap:
    """A capture in a job that goes on whatever happens: nothing here raises, trouble costs the rows alone.

    Traces from construction to :meth:`stop`.
    """

    def __init__(self, libraries: Sequence[str] | None = None) -> None:
        self._open = contextlib.ExitStack()
        self._seen = Seen()
        self._trouble = ""
        try:
            self._seen = self._open.enter_context(capture(libraries))
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """Detach; safe to call twice."""
        try:
            self._open.close()
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"

    def add_to(self, trace: RankTrace) -> RankTrace:
        """``trace`` with the rows, or with a warning that says why there are none."""
        why = self._trouble or self._seen.why
        if not why and self._seen.dropped:
            why = f"{self._seen.dropped} more than there is room for"
        if not why:
            try:
                return append(trace, self._seen.events)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        trace.warnings.append(f"messages on the wire not recorded: {why}")
        return trace


# -- parts -----------------------------------------------------------------------------------------

_NOTHING: dict[str, Any] = {
    **{key: np.empty(0, dtype=np.int64) for key in ("stream", "direction", "start", "end", "offset", "nbytes")},
    "head": np.empty((0, gloo.HEADER_BYTES), dtype=np.uint8),
    "head_bytes": np.empty(0, dtype=np.uint8),
    "streams": [],
}


def _events(found: dict[str, Any]) -> Events:
    """What the native side handed over, with streams by name."""
    sent = found["direction"] == 0
    pairs, corrections = _directed(found["streams"])
    names = {name: k for k, name in enumerate(dict.fromkeys(name for pair in pairs for name in pair))}
    ids = np.array([[names[out], names[back]] for out, back in pairs], dtype=np.int32).reshape(-1, 2)
    correction = np.array(corrections, dtype=np.int64)[found["stream"]] if len(sent) else 0
    known = found["offset"] >= 0
    return Events(
        kind=np.where(sent, EventKind.SEND, EventKind.RECV).astype(np.uint8),
        resource=ids[found["stream"], found["direction"]] if len(sent) else np.empty(0, dtype=np.int32),
        start=found["start"],
        end=found["end"],
        offset=found["offset"] - correction * (sent & known),
        nbytes=found["nbytes"],
        head=found["head"],
        head_bytes=found["head_bytes"],
        resources=list(names),
    )


def _directed(streams: list[tuple[str, int, str, int, int, bool]]) -> tuple[list[tuple[str, str]], list[int]]:
    """Names of the sending and the receiving direction of each connection, and what its send offsets are too high by.

    A connection between the same two ports as one before it is another stream: ``#2``.
    """
    pairs: list[tuple[str, str]] = []
    corrections: list[int] = []
    lives: dict[tuple[str, str], list[int]] = {}
    for local_ip, local_port, peer_ip, peer_port, identity, opener_unknown in streams:
        here, there = f"{local_ip}:{local_port}", f"{peer_ip}:{peer_port}"
        life = lives.setdefault((here, there), [])
        if identity not in life:
            life.append(identity)
        again = f"#{life.index(identity) + 1}" if life[0] != identity else ""
        pairs.append((f"wire/{here}>{there}{again}", f"wire/{there}>{here}{again}"))
        # the kernel counts the SYN of the end that opened; nobody listens at the port it opened from
        corrections.append(int(opener_unknown and local_port not in _listened_ports()))
    return pairs, corrections


def _listened_ports() -> set[int]:
    """Local ports at which a socket of this network namespace waits for connections."""
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":  # LISTEN
                    ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def _label(events: Events) -> tuple[npt.NDArray[np.int64], _Int]:
    """Label and slot of every event."""
    labels = np.full(len(events), int(gloo.Label.MESSAGE))
    slots = np.full(len(events), -1, dtype=np.int64)
    for stream in np.unique(events.resource):
        for kind in (EventKind.SEND, EventKind.RECV):
            rows = np.flatnonzero((events.resource == stream) & (events.kind == kind) & (events.offset >= 0))
            rows = rows[np.argsort(events.offset[rows], kind="stable")]
            offset, nbytes = events.offset[rows], events.nbytes[rows]
            frames = gloo.parse(offset, nbytes, events.head[rows], events.head_bytes[rows])
            labels[rows], slots[rows] = gloo.label(frames, offset, nbytes)
    return labels, slots
