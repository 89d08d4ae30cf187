"""Reader of Horovod timelines: what the coordinator's background thread ran, response by response.

Knows how ``horovod/common/timeline.cc`` (0.15 to 0.28) writes: a Chrome event list, often never closed,
in which every tensor is a "process" and each phase a B and an E without a name. All tensors of one
fused response begin before the first of them goes on to an activity, and that is how a response is
told. Times are µs of the coordinator's steady clock since the timeline was made.

A timeline says nothing of other ranks but, for tensors that are not in Horovod's cache, when the
coordinator heard that a rank is ready.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro.errors import TraceError
from dpro.trace.jsonstream import TraceFile, text
from dpro.trace.kineto import to_ns
from dpro.trace.model import Collective, EventKind, Meta, RankTrace, Tensor, TraceBuilder

GROUP = "horovod"
BACKGROUND = "horovod/background"
#: Names of a capture's rows on the main thread: a gradient is handed in; the main thread waits for it.
SUBMIT, WAIT = "horovod::submit", "horovod::wait"
_NEGOTIATE = "NEGOTIATE_"
#: The outermost phases of a tensor; what is inside is an activity (``common/message.cc``, ResponseType).
_OPERATIONS = frozenset({"ALLREDUCE", "ADASUM", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER"})
_EPOCH = "start_time_since_epoch_in_micros"
#: A timeline shows what it is within its first records.
_SNIFFED_RECORDS = 20
_MAX_TIME_NS = 1 << 62
_MAX_DIMENSION = 1 << 50
_DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
#: What Horovod makes of the names it is given.
_PREFIX = re.compile(r"^(?:grouped_)?(?:allreduce|adasum)\.")
_GROUPED = re.compile(r"^(.*)_(\d+)of(\d+)$")


@dataclass(frozen=True)
class Response:
    """One (fused) response that was carried out; times in ns of the timeline's own clock."""

    sequence: int
    operation: str  # allreduce, broadcast, …
    tensors: tuple[str, ...]  # as Horovod names them, in the order of the fusion buffer
    start: int
    end: int
    nbytes: int  # -1 unknown
    dtype: str = ""
    #: from the first request for a member to the agreement on the last one, where the timeline shows it
    negotiated: tuple[int, int] | None = None
    #: rank -> when the coordinator heard that its last member is ready
    ready: dict[int, int] = field(default_factory=dict)
    #: MEMCPY_IN_FUSION_BUFFER, GLOO_ALLREDUCE, … -> first start, last end
    activities: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """``epoch_ns``: CLOCK_REALTIME at the timeline's 0, as it was when Horovod was started (-1: not told)."""

    responses: list[Response]
    epoch_ns: int
    warnings: list[str]


def is_timeline(path: Path) -> bool:
    """Whether the file is a Horovod timeline, by its first records; a file that can't be read is none."""
    try:
        return any(_is_horovod(record) for record in islice(TraceFile(path).records(), _SNIFFED_RECORDS))
    except TraceError:
        return False


def read(path: Path) -> Timeline:
    """Read a timeline as far as it goes.

    Raises:
        TraceError: the file cannot be read, or shows nothing that Horovod ran to its end.
    """
    file, reader = TraceFile(path), _Reader()
    for record in file.records():
        reader.take(record)
    timeline = reader.finish(file.losses.warnings())
    if not timeline.responses:
        why = "no tensor's reduction in it" if reader.known else "no Horovod timeline"
        raise TraceError(path, "; ".join([why, *timeline.warnings]))
    return timeline


def read_trace(path: Path) -> RankTrace:
    """The coordinator's trace of a bare timeline: its collectives, in steps where the first tensor comes again."""
    timeline = read(path)
    reductions = [r for r in timeline.responses if r.operation in ("allreduce", "adasum")] or timeline.responses
    tensors: dict[str, Tensor] = {}
    for response in reductions:
        for name in response.tensors:
            tensors.setdefault(name, Tensor(name, (), response.dtype, -1, len(tensors)))
    numbers = {name: i for i, name in enumerate(tensors)}
    builder = TraceBuilder(Meta(rank=0, source=str(path), clock="trace", framework="horovod"))
    builder.warnings += [*timeline.warnings, "a timeline alone: what Horovod ran on rank 0, no compute"]
    add_responses(builder, reductions, [[numbers[name] for name in r.tensors] for r in reductions])
    trace = builder.freeze(_steps(reductions))
    trace.tensors = list(tensors.values())
    return trace


def add_responses(builder: TraceBuilder, responses: Iterable[Response], members: Sequence[Sequence[int]]) -> None:
    """A COLLECTIVE row for each of ``responses``; ``members`` are its tensors, by number in the trace."""
    for r, tensors in zip(responses, members, strict=True):
        facts = Collective(r.operation, GROUP, r.sequence, dtype=r.dtype, tensors=tuple(tensors))
        collective_row(builder, facts, r.start, r.end, r.nbytes)


def collective_row(builder: TraceBuilder, facts: Collective, start: int, end: int, nbytes: int) -> None:
    """The one form in which a trace holds a response."""
    builder.add(facts.name, EventKind.COLLECTIVE, BACKGROUND, start, end, facts, nbytes=nbytes)


def with_timeline(trace: RankTrace, timeline: Timeline, zero_ns: int, groups: dict[str, list[int]]) -> RankTrace:
    """The coordinator's ``trace`` with a COLLECTIVE row for every response that lies in one of its steps.

    Args:
        trace: with :data:`SUBMIT` and :data:`WAIT` rows.
        zero_ns: where the timeline's 0 lies on the trace's clock, roughly. It is corrected by what must be:
            no response begins before its members were handed in, nor ends after one of them was had.
        groups: gradients (numbers) of a group by the name of its first.
    """
    numbers = {tensor.name: i for i, tensor in enumerate(trace.tensors)}
    members = []
    for response in timeline.responses:
        found = []
        for name in response.tensors:
            given, place, _ = plain_names(name)
            grouped = groups.get(given, [])
            found.append(grouped[place - 1] if 0 < place <= len(grouped) else numbers.get(given, -1))
        members.append([number for number in found if number >= 0])
    zero_ns = _fit(trace, timeline.responses, members, zero_ns)
    placed = [replace(r, start=r.start + zero_ns, end=r.end + zero_ns) for r in timeline.responses]
    inside = trace.step_at(np.array([r.start for r in placed], dtype=np.int64)) >= 0
    builder = TraceBuilder(trace.meta)
    kept = [i for i, yes in enumerate(inside.tolist()) if yes]
    add_responses(builder, [placed[i] for i in kept], [members[i] for i in kept])
    return trace.joined(builder.freeze([]))


def spans(trace: RankTrace, name: str) -> dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Gradient -> starts and ends of its rows called ``name``, in order."""
    rows = np.flatnonzero(np.isin(trace.name, [i for i, n in enumerate(trace.names) if n == name]))
    tensor = trace.tensor[rows]
    return {
        number: (trace.start[rows[tensor == number]], trace.end[rows[tensor == number]])
        for number in np.unique(tensor).tolist()
    }


def bounds(trace: RankTrace, responses: Sequence[tuple[int, int]], members: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Least and greatest ns that may be added to ``responses`` (start, end) so that they fit the trace's own rows.

    A member's k-th response is its k-th in ``responses`` counted from the last, as its rows are: whatever began
    before the capture did is missing in both.
    """
    submitted, waited = spans(trace, SUBMIT), spans(trace, WAIT)
    low, high = -_MAX_TIME_NS, _MAX_TIME_NS
    seen: Counter[int] = Counter()
    for (start, end), numbers in zip(reversed(responses), reversed(members), strict=True):
        for number in numbers:
            seen[number] += 1
            if number in submitted and seen[number] <= len(submitted[number][0]):
                low = max(low, int(submitted[number][0][-seen[number]]) - start)
            if number in waited and seen[number] <= len(waited[number][1]):
                high = min(high, int(waited[number][1][-seen[number]]) - end)
    return low, high


def _fit(trace: RankTrace, responses: list[Response], members: list[list[int]], zero_ns: int) -> int:
    low, high = bounds(trace, [(r.start, r.end) for r in responses], members)
    # The main thread spins while it waits, so that the upper bound is met to microseconds.
    return min(max(zero_ns, low), high)


def plain_names(name: str) -> tuple[str, int, int]:
    """(the name Horovod was given, place in its group, size of the group); a tensor of no group: place 0 of 0.

    A grouped reduction has the name of its first tensor only, and numbers the members.
    """
    given = _PREFIX.sub("", name)
    match = _GROUPED.match(given) if name.startswith("grouped_") else None
    return (match[1], int(match[2]), int(match[3])) if match else (given, 0, 0)


def _is_horovod(record: dict[str, Any]) -> bool:
    args = record.get("args")
    told = isinstance(args, dict) and _EPOCH in args
    return told or str(record.get("name", "")).startswith(_NEGOTIATE)


@dataclass
class _Running:
    """A response between its first B and its last E."""

    operation: str
    sequence: int
    members: dict[int, str] = field(default_factory=dict)  # pid -> tensor
    start: int = 0
    end: int = 0
    opening: bool = True  # members may still join
    over: int = 0  # members that ended
    nbytes: int = 0
    dtype: str = ""
    negotiated: list[tuple[int, int]] = field(default_factory=list)
    ready: dict[int, int] = field(default_factory=dict)
    activities: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Reader:
    def __init__(self) -> None:
        self.known = False  # something said that this is Horovod's
        self.epoch_ns = -1
        self.done: list[_Running] = []
        self.counts: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        self._phases: dict[int, list[tuple[str, int]]] = {}  # pid -> names and starts of open phases
        self._running: dict[int, _Running] = {}  # by pid
        self._latest: _Running | None = None
        self._begun = 0
        self._negotiated: dict[int, tuple[int, int]] = {}
        self._ready: dict[int, dict[int, int]] = {}

    def take(self, record: dict[str, Any]) -> None:
        self.known = self.known or _is_horovod(record)
        phase, pid, name = record.get("ph"), record.get("pid"), text(str(record.get("name", "")))
        if type(pid) is not int:
            return
        args = record.get("args")
        args = args if isinstance(args, dict) else {}
        if phase == "M":
            if name == "process_name" and "name" in args:
                self._names[pid] = text(str(args["name"]))
            elif type(args.get(_EPOCH)) is int and 0 < args[_EPOCH] < _MAX_TIME_NS // 1000:
                self.epoch_ns = args[_EPOCH] * 1000
            return
        if phase not in ("B", "E", "X"):
            return
        at = to_ns(record.get("ts"))
        if at is None or not 0 <= at < _MAX_TIME_NS:
            self.counts["event(s) without a usable time dropped"] += 1
        elif phase == "B":
            self._begin(pid, name, at)
        elif phase == "E":
            self._end(pid, args, at)
        elif name.isdecimal() and len(name) < 8:
            self._ready.setdefault(pid, {})[int(name)] = at

    def finish(self, lost: list[str]) -> Timeline:
        open_ends = len({id(r) for r in self._running.values()})
        if open_ends:
            self.counts["response(s) without an end dropped"] += open_ends
        done = sorted(self.done, key=lambda r: r.sequence)
        responses = [
            Response(
                sequence=k,
                operation=r.operation,
                tensors=tuple(r.members.values()),
                start=r.start,
                end=max(r.start, r.end),
                nbytes=r.nbytes,
                dtype=r.dtype,
                negotiated=(min(n[0] for n in r.negotiated), max(n[1] for n in r.negotiated)) if r.negotiated else None,
                ready=r.ready,
                activities=r.activities,
            )
            for k, r in enumerate(done)
        ]
        warnings = [*lost, *(f"{count} {what}" for what, count in sorted(self.counts.items()))]
        return Timeline(responses, self.epoch_ns, warnings)

    def _begin(self, pid: int, name: str, at: int) -> None:
        phases = self._phases.setdefault(pid, [])
        if name.startswith(_NEGOTIATE) or name in _OPERATIONS:
            if pid in self._running:
                self._drop(self._running[pid])
            phases[:] = [(name, at)]
            if name in _OPERATIONS:
                self._join(pid, name, at)
            else:
                self._ready.pop(pid, None)
        elif pid in self._running:
            phases[1:] = [(name, at)]  # activities follow each other
            self._running[pid].opening = False

    def _join(self, pid: int, name: str, at: int) -> None:
        response = self._latest
        if response is None or not response.opening or response.operation != name.lower():
            self._latest = response = _Running(name.lower(), self._begun, start=at)
            self._begun += 1
        response.members[pid] = self._names.get(pid, f"tensor {pid}")
        self._running[pid] = response
        if pid in self._negotiated:
            response.negotiated.append(self._negotiated.pop(pid))
        for rank, heard in self._ready.pop(pid, {}).items():
            response.ready[rank] = max(heard, response.ready.get(rank, heard))

    def _end(self, pid: int, args: dict[str, Any], at: int) -> None:
        phases = self._phases.get(pid)
        if not phases:
            self.counts["end(s) without a beginning dropped"] += 1
            return
        name, began = phases.pop()
        response = self._running.get(pid)
        if response is None:
            self._negotiated[pid] = (began, at)
            return
        response.opening = False
        if phases:
            first, last = response.activities.get(name, (began, at))
            response.activities[name] = min(first, began), max(last, at)
            return
        nbytes, response.dtype = _nbytes(args), str(args.get("dtype", response.dtype))
        response.nbytes = response.nbytes + nbytes if nbytes >= 0 and response.nbytes >= 0 else -1
        response.end = max(response.end, at)
        response.over += 1
        del self._running[pid]
        if response.over == len(response.members):
            self.done.append(response)

    def _drop(self, response: _Running) -> None:
        """A response that lost an end: the rest of it is none either."""
        self.counts["response(s) without an end dropped"] += 1
        for pid in [pid for pid, running in self._running.items() if running is response]:
            del self._running[pid]
            self._phases[pid].clear()


def _nbytes(args: dict[str, Any]) -> int:
    """Bytes of a tensor from what its last E says; -1 where it does not."""
    size, shape = _DTYPE_BYTES.get(str(args.get("dtype"))), args.get("shape")
    if size is None or not isinstance(shape, str) or not re.fullmatch(r"\[(\d{1,15}(, \d{1,15}){0,63})?\]", shape):
        return -1
    total = size * math.prod(int(n) for n in re.findall(r"\d+", shape))
    return total if total < _MAX_DIMENSION else -1


def _steps(responses: list[Response]) -> list[tuple[int, int]]:
    """A step is over where a tensor comes that it has had already."""
    begins: list[int] = []
    had: set[str] = set()
    for response in responses:
        if not begins or had & set(response.tensors):
            had = set()
            begins.append(response.start)
        had.update(response.tensors)
    return [(a, b) for a, b in pairwise([*begins, max(r.end for r in responses)]) if b > a]
