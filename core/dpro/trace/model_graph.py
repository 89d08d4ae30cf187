"""A model's training step as one device would run it, op by op: what placement starts from.

Knows the ops of one iteration, what they take on a reference device with the whole batch, and the tensors between them;
not how many devices there are. :func:`read` takes a file as other tools write it: PipeDream's layer profiles
(:mod:`dpro.trace.pipedream`) and the operator graphs of "Efficient algorithms for device placement of DNN graph
operators" (:mod:`dpro.trace.operator_graph`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from dpro.errors import TraceError

#: A file of a model is smaller.
MAX_FILE_BYTES = 256 << 20
MAX_OPS = 1_000_000
#: A longer op is a mistake in the file, ms.
MAX_OP_MS = 1e9
_SNIFFED_BYTES = 4096


class Role(IntEnum):
    """What an op is there for."""

    VARIABLE = 0  # holds parameters, takes no time
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3  # applies a gradient to a variable


@dataclass(frozen=True)
class ModelOp:
    """One op. ``type`` is the framework's word for it (``Conv2d``), by which devices differ in speed.

    ``kept_bytes``: what stays allocated on the device that runs it (parameters). ``partner``: of a BACKWARD op the op
    whose gradient it is, of an UPDATE op its variable; -1 where that is not known.
    """

    name: str
    type: str
    role: Role
    time_ns: int
    kept_bytes: int = 0
    partner: int = -1


@dataclass(frozen=True)
class Tensor:
    """What ``producer`` makes for all of ``consumers``. ``batched``: it has a row for each sample."""

    producer: int
    nbytes: int
    consumers: tuple[int, ...]
    batched: bool = True


@dataclass
class ModelGraph:
    """Ops in an order in which each comes after what it needs; ``said``: what was assumed, a line each."""

    name: str
    ops: list[ModelOp]
    tensors: list[Tensor]
    said: list[str] = field(default_factory=list)


def read(path: Path) -> ModelGraph:
    """The graph in a file of either format, told apart by its first bytes.

    Raises:
        TraceError: it cannot be read, or is neither.
    """
    from dpro.trace import operator_graph, pipedream

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TraceError(path, f"larger than {MAX_FILE_BYTES >> 20} MiB: not a model's graph")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(path, getattr(error, "strerror", None) or "not text") from error
    begin = text[:_SNIFFED_BYTES].lstrip()
    if not begin:
        raise TraceError(path, "empty")
    if begin.startswith("{"):
        return operator_graph.parse(text, path)
    if " -- " in begin:
        return pipedream.parse(text, path)
    raise TraceError(path, "neither a layer profile of PipeDream nor an operator graph in JSON")


def in_order(count: int, edges: list[tuple[int, int]], path: Path, names: list[str]) -> list[int]:
    """Ops so that each comes after what it needs, the first in the file first.

    Raises:
        TraceError: some wait for themselves.
    """
    import heapq

    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for src, dst in edges:
        after[src].append(dst)
        waits[dst] += 1
    ready = [op for op in range(count) if not waits[op]]
    out: list[int] = []
    while ready:
        op = heapq.heappop(ready)
        out.append(op)
        for user in after[op]:
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, user)
    if len(out) < count:
        stuck = next(op for op in range(count) if waits[op])
        raise TraceError(path, f"{count - len(out)} ops wait for themselves, {names[stuck]!r} among them")
    return out


def stem(path: Path) -> str:
    """``vgg16`` of ``vgg16.graph.txt``."""
    return path.name.split(".", 1)[0]
