"""Reader of PyTorch profiler (Kineto) traces, every vintage.

Knows how Kineto writes events; refuses to know what they cost or how they depend on each other
(``graph`` does). Times are µs in the file whatever ``displayTimeUnit`` says (it only tells a
viewer what to print), written as integers, as floats, or relative to ``baseTimeNanoseconds``; they
are converted digit by digit. Broken records, impossible times and missing facts become counted
warnings, never exceptions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dpro.errors import TraceError
from dpro.trace.jsonstream import TraceFile, text
from dpro.trace.model import Collective, EventKind, Meta, RankTrace, TraceBuilder
from dpro.trace.steps import infer_steps, used_steps

_NS_PER_US = 1000
#: A longer event is an unfinished one (its end was never written).
_MAX_DURATION_NS = 24 * 3600 * 10**9

#: No clock is beyond this (2116, counted from 1970), so that differences and sums of times stay in int64.
_MAX_TIME_NS = 1 << 62
_MAX_BYTES = 1 << 50
_MAX_RANK = 1 << 24

_SYNC_CALLS = frozenset(
    f"{api}{what}Synchronize" for api in ("cuda", "hip") for what in ("Device", "Stream", "Event")
) | {"cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"}
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "privateuse1_runtime"})
_KERNEL = frozenset({"kernel", "concurrent_kernel", "gpu_kernel"})
_MEMCPY = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
#: The outermost event of a node of a backward pass, with the node's number.
_BACKWARD = "autograd::engine::evaluate_function"
_RANK_IN_NAME = re.compile(r"(?:rank|worker|gpu)[_\-.]?(\d+)", re.IGNORECASE)
_DTYPE_BYTES = {
    "char": 1, "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "short": 2,
    "float": 4, "int": 4, "double": 8, "long": 8, "long int": 8,
}  # fmt: skip

#: (ns, device type, address, bytes; negative where freed) of one allocation
Allocation = tuple[int, int, int, int]


def read(path: Path, memory: list[Allocation] | None = None) -> RankTrace:
    """Read one Kineto file (``.json`` or gzip) of one rank.

    ``memory``, if given, gets what was allocated and freed (``profile_memory=True``), on the trace's clock.
    ``meta.rank`` is -1 where neither ``distributedInfo`` nor the file name tells it
    (:func:`dpro.trace.store.load` then goes by order).

    Raises:
        TraceError: the file cannot be read, is no JSON trace, or holds no usable event.
    """
    file = TraceFile(path)
    reader = _Reader(path, wants_memory=memory is not None)
    for record in file.records():
        reader.take(record)
    trace = reader.finish(file)
    if memory is not None:
        memory += [(at + reader.base_ns, device, address, n) for at, device, address, n in reader.memory]
    return trace


def to_ns(value: Any) -> int | None:
    """Exact ns of a number of µs as the JSON reader gives it (int, or the text of a float)."""
    if type(value) is int:
        return value * _NS_PER_US
    if not isinstance(value, str):
        return None
    whole, _, fraction = value.partition(".")
    try:
        if "e" in value or "E" in value:
            return round(float(value) * _NS_PER_US)
        ns = abs(int(whole)) * _NS_PER_US + (int(fraction[:3].ljust(3, "0")) if fraction else 0)
        if len(fraction) > 3 and fraction[3] >= "5":  # Kineto prints ns exactly; others may not
            ns += 1
    except (ValueError, OverflowError):
        return None
    return -ns if whole.startswith("-") else ns


def rank_in_name(path: Path) -> int:
    """The rank that a file's name tells (``rank3.json``, ``worker_12.json.gz``), -1 where it tells none."""
    match = _RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match and len(match.group(1)) <= 7 else -1  # 10 digits are a process or a time


class _Reader:
    """Turns records into rows; what spans records is put together in :meth:`finish`."""

    def __init__(self, path: Path, wants_memory: bool) -> None:
        self.path = path
        self.wants_memory = wants_memory
        self.builder = TraceBuilder(Meta(source=str(path), clock="trace", framework="pytorch"))
        self.counts: Counter[str] = Counter()
        self.profiler_steps: list[tuple[int, int]] = []
        self.device: Any = None
        # cuda_sync records say which stream and event a runtime call was about: by correlation id
        self.sync_facts: dict[int, dict[str, Any]] = {}
        self.sized: list[tuple[int, int, int, int]] = []  # nccl annotation: resource, start, end, bytes
        self.gloo: list[tuple[str, str, int, int, int]] = []  # name, resource, start, end, bytes
        self.op_thread: Counter[str] = Counter()
        self.memory: list[Allocation] = []
        self.base_ns = 0

    def take(self, record: dict[str, Any]) -> None:
        if record.get("ph") == "X":
            self._complete(record)
        elif self.wants_memory and record.get("name") == "[memory]":
            self._allocation(record)

    def _allocation(self, record: dict[str, Any]) -> None:
        at, args = to_ns(record.get("ts")), record.get("args")
        if at is None or not isinstance(args, dict):
            return
        device, address, nbytes = (args.get(key) for key in ("Device Type", "Addr", "Bytes"))
        if type(device) is int and type(address) is int and type(nbytes) is int and abs(nbytes) < _MAX_BYTES:
            self.memory.append((at, device, address, nbytes))

    def _complete(self, record: dict[str, Any]) -> None:
        category = str(record.get("cat", "")).lower()
        if category in ("trace", "python_function", "gpu_user_annotation", "overhead", ""):
            return
        start = to_ns(record.get("ts"))
        duration = to_ns(record.get("dur", 0))
        if start is None or duration is None:
            self.counts["event(s) without a time dropped"] += 1
            return
        args = record.get("args")
        if not isinstance(args, dict):
            args = {}
        if category == "cuda_sync":
            if type(args.get("correlation")) is int:
                self.sync_facts[args["correlation"]] = args
            return
        on_device = category in _KERNEL or category in _MEMCPY
        if start < 0 or (on_device and start == 0):
            self.counts["event(s) at time 0 or before dropped"] += 1
            return
        if start >= _MAX_TIME_NS:
            self.counts["event(s) at an absurd time dropped"] += 1
            return
        if duration < 0 or duration > _MAX_DURATION_NS:
            self.counts["unfinished event(s) (negative or absurd duration) taken as 0 long"] += 1
            duration = 0
        name = text(str(record.get("name", "")))
        end = start + duration
        if on_device:
            self._device_event(category, name, start, end, args, record)
        else:
            self._host_event(category, name, start, end, args, record)

    def _device_event(
        self, category: str, name: str, start: int, end: int, args: dict[str, Any], record: dict[str, Any]
    ) -> None:
        flow = self._integer(args.get("correlation", args.get("External id", args.get("external id"))))
        resource = self._stream(args.get("stream", record.get("tid")), args.get("device"))
        if category in _MEMCPY:
            nbytes = self._bytes(args.get("bytes"))
            self.builder.add(name, EventKind.MEMCPY, resource, start, end, flow=flow, nbytes=nbytes)
        elif "nccl" in name[:24].lower() or "rccl" in name[:24].lower():
            facts = Collective(
                name=_collective_name(str(args.get("Collective name") or name)),
                group=str(args.get("Process Group Ranks") or args.get("Process Group Name") or ""),
                sequence=self._integer(args.get("Seq")),
                group_size=self._integer(args.get("Group size"), _MAX_RANK),
                dtype=str(args.get("dtype", "")),
            )
            self.builder.add(
                name,
                EventKind.COLLECTIVE,
                resource,
                start,
                end,
                facts,
                flow=flow,
                nbytes=self._bytes(_message_bytes(args)),
            )
        else:
            self.builder.add(name, EventKind.KERNEL, resource, start, end, flow=flow)

    def _host_event(
        self, category: str, name: str, start: int, end: int, args: dict[str, Any], record: dict[str, Any]
    ) -> None:
        thread = f"cpu/{record.get('tid')}"
        if category in _RUNTIME:
            kind = EventKind.RUNTIME
            if name in _SYNC_CALLS:
                kind = EventKind.SYNC
            elif "EventRecord" in name:
                kind = EventKind.EVENT_RECORD
            elif "StreamWaitEvent" in name:
                kind = EventKind.STREAM_WAIT
            flow = self._integer(args.get("correlation", args.get("External id")))
            self.builder.add(name, kind, thread, start, end, flow=flow)
        elif category in ("cpu_op", "operator"):
            self.op_thread[thread] += 1
            node = self._integer(args.get("Sequence number")) if name.startswith(_BACKWARD) else -1
            self.builder.add(name, EventKind.CPU_OP, thread, start, end, flow=node)
        elif category == "user_annotation":
            if name.startswith("gloo:"):
                self.gloo.append((name, thread, start, end, self._bytes(_shape_bytes(args))))
                return
            if name.startswith("ProfilerStep"):
                self.profiler_steps.append((start, end))
            elif name.startswith("nccl:"):
                self.sized.append((self.builder.resource_id(thread), start, end, self._bytes(_shape_bytes(args))))
            self.builder.add(name, EventKind.ANNOTATION, thread, start, end)

    def _integer(self, value: Any, below: int = 1 << 62) -> int:
        """``value``; -1 where it is no integer, or (counted) too large to be one of those."""
        if type(value) is not int:
            return -1
        if not -below < value < below:
            self.counts["number(s) too large to be true taken as unknown"] += 1
            return -1
        return value

    def _bytes(self, value: Any) -> int:
        return max(self._integer(value, _MAX_BYTES), -1)

    def _stream(self, stream: Any, device: Any) -> str:
        """Name of a stream; the device is named only from the second one on."""
        if self.device is None:
            self.device = device
        return f"stream/{stream}" if device == self.device else f"stream/{device}:{stream}"

    # -- after the last record -----------------------------------------------------------------

    def finish(self, file: TraceFile) -> RankTrace:
        builder, header = self.builder, file.header
        # A gloo range on the thread that runs the model is a call; on a worker it is the running of it.
        main = self.op_thread.most_common(1)[0][0] if self.op_thread else ""
        for name, thread, start, end, nbytes in self.gloo:
            if thread == main:
                builder.add(name, EventKind.ANNOTATION, thread, start, end)
            else:
                facts = Collective(name=_collective_name(name.removeprefix("gloo:")))
                builder.add(name, EventKind.COLLECTIVE, thread, start, end, facts, nbytes=nbytes)
        if not len(builder):
            lost = "; ".join(file.losses.warnings())
            raise TraceError(self.path, "no events in it" + (f" ({lost})" if lost else ""))
        self._identity(header)
        builder.warnings += file.losses.warnings()
        trace = builder.freeze(self._steps())
        if not trace.steps:
            bounds, how = infer_steps(trace)
            trace.step_bounds = bounds
            trace.warnings.append(f"no ProfilerStep marks: {how}")
            trace.assign_steps()
        self._join_calls(trace)
        self._size_collectives(trace)
        base = header.get("baseTimeNanoseconds")
        if type(base) is int and -_MAX_TIME_NS < base < _MAX_TIME_NS - int(trace.end.max()):
            trace.shift(base)
            self.base_ns = base
        elif type(base) is int:
            self.counts["base time out of range not applied"] += 1
        trace.warnings += [f"{count} {what}" for what, count in sorted(self.counts.items())]
        _, note = used_steps(trace)
        if note:
            trace.warnings.append(note)
        return trace

    def _identity(self, header: dict[str, Any]) -> None:
        meta, warnings = self.builder.meta, self.builder.warnings
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        meta.rank = self._integer(info.get("rank"), _MAX_RANK)
        meta.world_size = self._integer(info.get("world_size"), _MAX_RANK)
        meta.host = text(str(header.get("host_name", "")))
        if info.get("backend"):
            meta.extra["backend"] = str(info["backend"])
        if meta.rank < 0:
            meta.rank = rank_in_name(self.path)
            if meta.rank >= 0:
                warnings.append(f"no rank in the file: {meta.rank} taken from its name")

    def _steps(self) -> list[tuple[int, int]]:
        """ProfilerStep marks, once each (several threads or profilers may carry them)."""
        steps: list[tuple[int, int]] = []
        for start, end in sorted(self.profiler_steps):
            if end > start and (not steps or start >= steps[-1][1]):
                steps.append((start, end))
        return steps

    def _join_calls(self, trace: RankTrace) -> None:
        """Which stream or event a call waits for, where cuda_sync records tell (see model.COLUMNS)."""
        if not self.sync_facts:
            return
        streams = {name: i for i, name in enumerate(trace.resources)}
        kind, flow = trace.kind, trace.flow
        waits = np.flatnonzero((kind == EventKind.STREAM_WAIT) | (kind == EventKind.SYNC))
        for i in waits.tolist():
            facts = self.sync_facts.get(int(flow[i]))
            if facts is None:
                continue
            trace.columns["peer"][i] = streams.get(f"stream/{facts.get('stream')}", -1)
            trace.columns["link"][i] = streams.get(f"stream/{facts.get('wait_on_stream')}", -1)
            trace.columns["flow"][i] = self._integer(facts.get("wait_on_cuda_event_record_corr_id"))

    def _size_collectives(self, trace: RankTrace) -> None:
        """Bytes of NCCL kernels without metadata, from the ``nccl:`` range around their launch."""
        bare = np.flatnonzero((trace.kind == EventKind.COLLECTIVE) & (trace.nbytes < 0) & (trace.flow >= 0))
        if not len(bare) or not self.sized:
            return
        calls = np.flatnonzero(trace.kind == EventKind.RUNTIME)
        call_of = dict(zip(trace.flow[calls].tolist(), calls.tolist(), strict=True))
        for i in bare.tolist():
            call = call_of.get(int(trace.flow[i]))
            if call is None:
                continue
            thread, at = int(trace.resource[call]), int(trace.start[call])
            for resource, start, end, nbytes in self.sized:
                if resource == thread and start <= at <= end:
                    trace.columns["nbytes"][i] = nbytes


def _collective_name(name: str) -> str:
    """One spelling for ``allreduce``, ``all_reduce``, ``ncclKernel_AllReduce_RING_…``."""
    name = re.sub(r"^(?:ncclDevKernel|ncclKernel|rcclKernel|ncclKernels?)_?", "", name)
    word = re.split(r"[_(<]", name)[0] if name[:1].isupper() else name
    flat = word.replace("_", "").lower()
    known = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
             "sendrecv": "send_recv", "alltoall": "all_to_all"}  # fmt: skip
    for key, value in known.items():
        if key in flat:
            return value
    return flat


def _message_bytes(args: dict[str, Any]) -> int:
    size = _DTYPE_BYTES.get(str(args.get("dtype", "")).lower())
    count = args.get("In msg nelems")
    return count * size if size and type(count) is int and count >= 0 else -1


def _shape_bytes(args: dict[str, Any]) -> int:
    """Payload from recorded input shapes and types; -1 where they were not recorded."""
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return -1
    total = -1
    for dims, kind in zip(shapes, types, strict=False):
        size = _DTYPE_BYTES.get(str(kind).lower())
        if size and _is_shape(dims):
            total = max(total, 0) + size * math.prod(dims)
    return total


def _is_shape(dims: Any) -> bool:
    if not isinstance(dims, list) or not 0 < len(dims) <= 64:
        return False
    return all(type(length) is int and 0 <= length <= _MAX_BYTES for length in dims)
