"""What a stored trace must be before it is believed: sizes before it is read, values before it is used.

Knows the arrays and the JSON of :class:`~dpro.trace.model.RankTrace` files and nothing of their meaning. A
file comes from another machine, or from nobody in particular: floors above index with its numbers, so each
is in range here or the file is refused.
"""

from __future__ import annotations

import math
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dpro.trace.model import RankTrace

#: Of all arrays of one rank, uncompressed: 30 million events.
MAX_STORED_BYTES = 2 << 30
#: The JSON beside them (names, tensors, facts of collectives).
_MAX_SIDE_BYTES = 256 << 20
_MAX_TIME_NS = 1 << 62
_MAX_BYTES = 1 << 50
_MAX_RANK = 1 << 24


class Unfit(ValueError):
    """The reason, for a person, why a file is refused."""


def check_sizes(file: IO[bytes]) -> None:
    """Refuse an archive that is larger than a trace, or whose arrays claim more than is stored of them.

    Raises:
        Unfit: what is too large. zipfile.BadZipFile, ValueError: not such a file.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        total = sum(member.file_size for member in members)
        if total > MAX_STORED_BYTES:
            raise Unfit(f"{total >> 20} MiB of arrays, more than {MAX_STORED_BYTES >> 20}")
        for member in members:
            if member.filename == "side.npy" and member.file_size > _MAX_SIDE_BYTES:
                raise Unfit(f"{member.file_size >> 20} MiB of names, more than {_MAX_SIDE_BYTES >> 20}")
            with archive.open(member) as array:
                version = np.lib.format.read_magic(array)
                header = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = header(array)
            if math.prod(shape) * dtype.itemsize > member.file_size:
                raise Unfit(f"{member.filename} claims more than is stored of it")
    file.seek(0)


def check(trace: RankTrace, dtypes: dict[str, str], kinds: int) -> None:
    """Refuse a trace whose parts do not fit each other; columns get their ``dtypes``.

    Raises:
        Unfit: what does not fit.
    """
    rows = _length(trace)
    for key, dtype in dtypes.items():
        column = trace.columns[key]
        if column.ndim != 1 or len(column) != rows:
            raise Unfit(f"{key!r} has shape {column.shape}, not ({rows},)")
        if column.dtype.kind not in "iu":
            raise Unfit(f"{key!r} is of {column.dtype}, not of whole numbers")
        if rows:
            low, high = _range(key, trace, kinds)
            if int(column.min()) < low or int(column.max()) > high:
                raise Unfit(f"{key!r} has a value out of range")
        trace.columns[key] = column.astype(dtype, copy=False)
    _check_bounds(trace.step_bounds)
    trace.step_bounds = trace.step_bounds.astype(np.int64, copy=False)
    _check_side(trace, rows)


def _length(trace: RankTrace) -> int:
    start = trace.columns["start"]
    if start.ndim != 1:
        raise Unfit(f"'start' has {start.ndim} dimensions")
    return len(start)


def _range(key: str, trace: RankTrace, kinds: int) -> tuple[int, int]:
    """Least and largest value of a column, see ``model.COLUMNS``."""
    return {
        "name": (0, len(trace.names) - 1),
        "kind": (0, kinds - 1),
        "resource": (0, len(trace.resources) - 1),
        "start": (-_MAX_TIME_NS, _MAX_TIME_NS),
        "end": (-_MAX_TIME_NS, _MAX_TIME_NS),
        "step": (-1, len(trace.step_bounds) - 1),
        "flow": (-_MAX_TIME_NS, _MAX_TIME_NS),
        "nbytes": (-1, _MAX_BYTES),
        "peer": (-1, max(_MAX_RANK, len(trace.resources))),
        "offset": (-1, _MAX_TIME_NS),
        "tensor": (-1, len(trace.tensors) - 1),
        "link": (-1, _MAX_TIME_NS),
    }[key]


def _check_bounds(bounds: npt.NDArray[Any]) -> None:
    if bounds.ndim != 2 or bounds.shape[1] != 2 or bounds.dtype.kind not in "iu":
        raise Unfit(f"step bounds of {bounds.dtype} and shape {bounds.shape}, not of whole numbers and (steps, 2)")
    flat = bounds.ravel()
    if len(flat):
        low, high = int(flat.min()), int(flat.max())
        if low < -_MAX_TIME_NS or high > _MAX_TIME_NS or high - low >= _MAX_TIME_NS:
            raise Unfit("step bounds out of range")
    if bool((flat[1:] < flat[:-1]).any()):
        raise Unfit("steps overlap or end before they start")


def _check_side(trace: RankTrace, rows: int) -> None:
    for what, texts in (("names", trace.names), ("resources", trace.resources), ("warnings", trace.warnings)):
        _need(isinstance(texts, list) and all(isinstance(text, str) for text in texts), what)
    for tensor in trace.tensors:
        _need(isinstance(tensor.name, str) and isinstance(tensor.dtype, str), "a tensor")
        _need(all(_whole(length, 0, _MAX_BYTES) for length in tensor.shape), "a tensor's shape")
        _need(_whole(tensor.nbytes, 0, _MAX_BYTES), "a tensor's bytes")
        _need(_whole(tensor.ready, -1, _MAX_RANK) and _whole(tensor.bucket, -1, _MAX_RANK), "a tensor's place")
    for row, facts in trace.collectives.items():
        _need(0 <= row < rows, "a collective's row")
        _need(all(isinstance(text, str) for text in (facts.name, facts.group, facts.dtype)), "a collective's name")
        _need(_whole(facts.sequence, -_MAX_TIME_NS, _MAX_TIME_NS), "a collective's sequence")
        _need(_whole(facts.group_size, -1, _MAX_RANK), "a collective's group")
    meta = trace.meta
    for text in (meta.host, meta.framework, meta.source, meta.clock):
        _need(isinstance(text, str), "what the trace is from")
    _need(_whole(meta.rank, -1, _MAX_RANK) and _whole(meta.world_size, -1, _MAX_RANK), "the rank or the world size")
    _need(isinstance(meta.unprofiled_step_ns, list), "the un-profiled steps")
    _need(all(_whole(ns, 0, _MAX_TIME_NS) for ns in meta.unprofiled_step_ns), "the un-profiled steps")
    _need(_number(meta.event_overhead_ns, 0, 1e9), "the cost of recording an event")
    _need(isinstance(meta.contention, dict), "the CPU times")
    _need(all(_number(value, -_MAX_TIME_NS, _MAX_TIME_NS) for value in meta.contention.values()), "the CPU times")
    _need(0 <= meta.contention.get("idle_share", 0.0) <= 1, "the CPU times")
    _need(isinstance(meta.extra, dict), "what the adapter kept")


def _need(good: bool, what: str) -> None:
    if not good:
        raise Unfit(f"{what}: wrong type or out of range")


def _whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _number(value: object, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high  # type: ignore[operator]
