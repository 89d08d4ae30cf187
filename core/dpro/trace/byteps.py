"""Reader of BytePS's communication traces: when every partition of every tensor went through which stage.

Knows how ``byteps/common/global.cc`` (0.2) writes ``comm.json``: a Chrome event for each stage of a partition in
each round, whose ``tid`` is the partition's key (the tensor's declared index, 16 bits further up, plus the number of
the partition), and one without a stage for the whole tensor. Times are µs of the system clock since the epoch. A
stage begins when its thread takes the partition, so that queueing lies between stages. PUSH ends when the server's
acknowledgement is back; PULL holds the wait for the other workers. With one process per worker REDUCE and BROADCAST
do nothing, and are left out.

The file tells no sizes. Who has the gradients (a capture) and the bound (:class:`Settings`) knows them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpro.errors import TraceError
from dpro.trace.horovod import SUBMIT, WAIT, spans
from dpro.trace.jsonstream import TraceFile, text
from dpro.trace.model import EventKind, Meta, RankTrace, Tensor, TraceBuilder

#: Names of the rows of a partition, in the order of its way: tensor, ``flow`` the partition, bytes where known. They
#: are ANNOTATIONs: no thread works in a PUSH or a PULL, and what the wire carried are rows of its own.
COPY_OUT, PUSH, PULL, COPY_IN = "byteps::copyd2h", "byteps::push", "byteps::pull", "byteps::copyh2d"
ROWS = {"COPYD2H": COPY_OUT, "PUSH": PUSH, "PULL": PULL, "COPYH2D": COPY_IN}
#: Key of ``RankTrace.meta.extra`` for what an adapter says of the job, see :class:`Settings`.
SETTINGS = "byteps"
#: ``RankTrace.meta.source`` of a server's own trace (its wire rows alone).
SERVER = "byteps_server"
DEFAULT_PARTITION_BYTES = 4_096_000
#: Numbers of the names that dpro declares: the upper half of those that there are. At most so many for each way to cut.
FIRST_NUMBER = 1 << 15
MOST_NAMES = 4096
#: A bound is rounded up to whole pages.
PAGE_BYTES = 4096
#: A key has so many bits for the partition.
PART_BITS = 16
MAX_PARTS = 1 << PART_BITS

_STAGES = frozenset(
    {
        "COORDINATE_REDUCE", "REDUCE", "COPYD2H", "PCIE_REDUCE", "COORDINATE_PUSH", "COMPRESS", "PUSH", "PULL",
        "DECOMPRESS", "COPYH2D", "COORDINATE_BROADCAST", "BROADCAST",
    }
)  # fmt: skip
_PREFIX = "Comm."
_TOTAL = "total"
#: A file shows what it is within its first records.
_SNIFFED_RECORDS = 20
_MAX_TIME_NS = 1 << 62
_MAX_KEY = 1 << 48
_MAX_COUNT = 1 << 16
_NUMBER = re.compile(r"-?\d{1,17}")
#: Keys are written as signed numbers of 32 bits: those of the upper half are below 0.
_WRAPPED = 1 << 32
#: What an adapter adds to a name so that BytePS cuts the tensor anew.
_GENERATION = re.compile(r"~\d+$")
#: What MXNet's plugin puts before a name.
_PLUGIN = "byteps."
#: The two clocks were read one after the other, and one of them may be slewed meanwhile: no more than this.
_CLOCKS_NS = 1_000_000


class Stage(NamedTuple):
    """One stage of one partition in one round; of a whole tensor ``key`` is -1 and ``stage`` "". ns since the epoch."""

    tensor: str
    key: int
    stage: str
    start: int
    end: int


@dataclass(frozen=True)
class Comm:
    """A file's stages, and whole tensors from hand-in to callback; both by start."""

    stages: list[Stage]
    totals: list[Stage]
    warnings: list[str]


@dataclass(frozen=True)
class Settings:
    """How a BytePS job is set up, as far as its adapter said (JSON in ``meta.extra[SETTINGS]``) and it can be believed.

    ``partitions`` has the bound of tensors that were cut anew in the running job, ``declared`` the tensors' declared
    indices (both by name in the trace). ``node`` is the address of the worker's host, ``server_nodes`` those of the
    servers' hosts, one for each server, in any order; empty where not known. ``credit`` 0: partitions go first come,
    first served. ``job_bytes``: the job's own bound where it was recorded under another one; 0: it was not.
    """

    workers: int = 0
    servers: int = 1
    partition_bytes: int = DEFAULT_PARTITION_BYTES
    credit: int = 0
    hash_fn: str = "djb2"
    job_bytes: int = 0
    node: str = ""
    server_nodes: tuple[str, ...] = ()
    partitions: Mapping[str, int] = field(default_factory=dict)
    declared: Mapping[str, int] = field(default_factory=dict)

    def bound(self, tensor: str) -> int:
        """Bytes of a partition of the tensor, at most."""
        return self.partitions.get(tensor, self.partition_bytes)


def settings(trace: RankTrace) -> Settings:
    """What the trace says of its job; defaults where it says nothing, or nonsense."""
    told = trace.meta.extra.get(SETTINGS)
    told = told if isinstance(told, dict) else {}
    counts = {key: told[key] for key in ("workers", "servers", "credit") if _count(told.get(key), _MAX_COUNT)}
    nodes = told.get("server_nodes")
    job_bytes = told.get("job_bytes", 0)
    return Settings(
        **{**counts, "servers": max(1, counts.get("servers", 1))},
        partition_bytes=aligned(told["partition_bytes"])
        if _count(told.get("partition_bytes"), _MAX_KEY) and told["partition_bytes"]
        else DEFAULT_PARTITION_BYTES,
        hash_fn=str(told.get("hash_fn", "djb2")),
        job_bytes=aligned(job_bytes) if _count(job_bytes, _MAX_KEY) and job_bytes else 0,
        node=str(told.get("node", "")),
        server_nodes=tuple(map(str, nodes)) if isinstance(nodes, list) else (),
        partitions={name: n for name, n in _counts(told.get("partitions"), _MAX_KEY).items() if n > 0},
        declared=_counts(told.get("declared"), _MAX_COUNT),
    )


def aligned(nbytes: int, local_size: int = 1) -> int:
    """The bound that BytePS makes of ``BYTEPS_PARTITION_BYTES``: whole pages for each local process."""
    grain = PAGE_BYTES * local_size
    return max(1, -(-nbytes // grain)) * grain


def cut(nbytes: int, bound: int) -> list[int]:
    """Bytes of the partitions of a tensor: all as large as they may be, the last one takes the rest."""
    full, rest = divmod(nbytes, bound)
    return [bound] * full + [rest] * bool(rest)


def waits(sizes: Sequence[int], most: int) -> list[list[int]]:
    """What is to be through before each piece goes, so that no more than ``most`` bytes are on their way at once.

    Args:
        sizes: bytes of the pieces in the order in which they go. One that is larger than ``most`` goes alone.

    Returns for each piece the places of earlier ones; what these waited for is through by then, too. (A credit, as
    ByteScheduler has it: SOSP 2019, section 4.)
    """
    out: list[list[int]] = []
    before: list[int] = []  # by piece: all before that place are through when it goes
    first = held = 0
    for nbytes in sizes:
        while first < len(before) and held + nbytes > most:
            held -= sizes[first]
            first += 1
        out.append(list(range(before[first - 1], first)) if first else [])
        before.append(first)
        held += nbytes
    return out


def launch_bytes(partitions: Mapping[str, int]) -> int:
    """``BYTEPS_PARTITION_BYTES`` for a job that is started with a plan's partitions: what most of them have."""
    return Counter(partitions.values()).most_common(1)[0][0] if partitions else DEFAULT_PARTITION_BYTES


def server_of(key: int, servers: int, hash_fn: str) -> int:
    """Which server has the partition with this key (``BytePSGlobal::EncodeDefaultKey``).

    For hashes of text as they are meant: stock builds take them of a string that is gone, and may differ.
    """
    if servers <= 1:
        return 0
    if hash_fn == "naive":
        return ((key >> PART_BITS) + key % MAX_PARTS) * 9973 % servers
    value = 0 if hash_fn == "sdbm" else 5381
    for letter in str(key).encode():
        value = (letter + (value << 6) + (value << 16) - value) if hash_fn == "sdbm" else value * 33 + letter
        value %= 1 << 64
    return value % servers


# -- the file ----------------------------------------------------------------------------------


def is_comm(path: Path) -> bool:
    """Whether the file is such a trace, by its first records; a file that can't be read is none."""
    try:
        return any(_is_comm(record) for record in islice(TraceFile(path).records(), _SNIFFED_RECORDS))
    except TraceError:
        return False


def read(path: Path) -> Comm:
    """Read a ``comm.json`` as far as it goes.

    Raises:
        TraceError: the file cannot be read, or nothing of BytePS's is in it.
    """
    file, counts, known = TraceFile(path), Counter[str](), False
    stages: list[Stage] = []
    totals: list[Stage] = []
    for record in file.records():
        if not _is_comm(record):
            continue
        known = True
        found = _stage(record, counts)
        if found is not None:
            (stages if found.stage else totals).append(found)
    warnings = [*file.losses.warnings(), *(f"{count} {what}" for what, count in sorted(counts.items()))]
    if not stages:
        why = "no stage of a partition in it" if known else "no BytePS trace"
        raise TraceError(path, "; ".join([why, *warnings]))
    return Comm(sorted(stages, key=_by_time), sorted(totals, key=_by_time), warnings)


def read_trace(path: Path) -> RankTrace:
    """A worker's trace of a bare ``comm.json``: what it pushed and pulled; no compute, no sizes.

    A gradient is handed in where BytePS took it; an optimizer that waits for all of a step's gradients is assumed.
    A step is over where a tensor comes that it has had.
    """
    comm = read(path)
    wholes = _wholes(comm)
    names: dict[str, int] = {}
    for whole in wholes:
        names.setdefault(whole.tensor, len(names))
    meta = Meta(rank=_rank_in(path), source=str(path), clock="trace", framework="byteps")
    meta.extra[SETTINGS] = {"declared": {s.tensor: s.key >> PART_BITS for s in comm.stages}}
    builder = TraceBuilder(meta)
    builder.warnings += [*comm.warnings, "a BytePS trace alone: what a worker pushed and pulled, no compute, no sizes"]
    bounds = _steps(wholes)
    for begin, end in bounds:
        inside = [whole for whole in wholes if begin <= whole.start < end]
        over = min(end, max(whole.end for whole in inside))
        for whole in inside:
            tensor = names[whole.tensor]
            builder.add(SUBMIT, EventKind.ANNOTATION, "byteps/worker", whole.start, whole.start, tensor=tensor)
            builder.add(WAIT, EventKind.ANNOTATION, "byteps/worker", whole.start, over, tensor=tensor)
    _add_rows(builder, comm.stages, names, {}, 0)
    trace = builder.freeze(bounds)
    trace.tensors = [Tensor(name, (), "", 0, number) for name, number in names.items()]
    return trace


def with_comm(trace: RankTrace, comm: Comm, zero_ns: int, names: Mapping[str, int] | None = None) -> RankTrace:
    """A worker's ``trace`` with a row for every stage that lies in one of its steps; :class:`Settings` get the keys.

    Args:
        trace: with :data:`~dpro.trace.horovod.SUBMIT` and :data:`~dpro.trace.horovod.WAIT` rows, tensors, and
            :class:`Settings`, from which sizes come.
        zero_ns: where the epoch lies on the trace's clock, from both clocks read at once. It is corrected, by 1 ms at
            most, by what must be: nothing is copied out before it was handed in, nor needed before it was copied in.
        names: gradients (numbers) by the name BytePS has for them; without it told by the tensors' names.
    """
    known = names if names is not None else _plain(trace, comm)
    told = settings(trace)
    sizes: dict[tuple[int, int], int] = {}
    parts: dict[int, int] = {}
    for stage in comm.stages:
        if stage.tensor in known:
            tensor = known[stage.tensor]
            parts[tensor] = max(parts.get(tensor, 0), stage.key % MAX_PARTS + 1)
    unsure = 0
    for tensor, count in parts.items():
        found = _sizes(trace.tensors[tensor], told, count)
        unsure += not found
        sizes.update({(tensor, part): nbytes for part, nbytes in enumerate(found)})
    zero_ns, slack_ns = _fit(trace, comm, known, zero_ns)
    inside = trace.step_at(np.array([stage.start + zero_ns for stage in comm.stages], dtype=np.int64)) >= 0
    builder = TraceBuilder(trace.meta)
    kept = [stage for stage, yes in zip(comm.stages, inside.tolist(), strict=True) if yes]
    _add_rows(builder, kept, known, sizes, zero_ns)
    out = trace.joined(builder.freeze([]))
    index = {trace.tensors[known[s.tensor]].name: s.key >> PART_BITS for s in comm.stages if s.tensor in known}
    said = trace.meta.extra.get(SETTINGS)
    said = {**(said if isinstance(said, dict) else {}), "declared": {**told.declared, **index}}
    out.meta = replace(trace.meta, extra={**trace.meta.extra, SETTINGS: said})
    out.warnings += comm.warnings
    if not any(stage.tensor in known for stage in kept):
        out.warnings.append("no stage of BytePS's trace lies in the captured steps")
    if unsure:
        out.warnings.append(f"{unsure} gradient(s) whose partitions fit no bound: their sizes are not known")
    if slack_ns > _CLOCKS_NS:
        out.warnings.append(f"BytePS's trace contradicts the capture by {slack_ns / 1e6:.1f} ms: was a clock set?")
    return out


def _is_comm(record: Mapping[str, Any]) -> bool:
    return record.get("cat", "Comm") == "Comm" and str(record.get("pid", "")).startswith(_PREFIX)


def _stage(record: Mapping[str, Any], counts: Counter[str]) -> Stage | None:
    """None, and counted, where the record says nothing that can be used."""
    tensor = text(str(record["pid"])).removeprefix(_PREFIX)
    start, length, tid = record.get("ts"), record.get("dur"), record.get("tid")
    if type(start) is not int or type(length) is not int or not 0 <= start < _MAX_TIME_NS // 1000:
        counts["event(s) without a usable time dropped"] += 1
        return None
    if not 0 <= length < _MAX_TIME_NS // 1000:
        counts["event(s) without a usable time dropped"] += 1
        return None
    at, over = start * 1000, (start + length) * 1000
    if tid == _TOTAL:
        if not length:  # a spare one, of a round that had begun before the one before it was recorded
            counts["tensor(s) without an end dropped"] += 1
            return None
        return Stage(tensor, -1, "", at, over)
    stage = text(str(record.get("name", ""))).rpartition(".")[2]
    key = int(tid) if isinstance(tid, str) and _NUMBER.fullmatch(tid) else tid
    if type(key) is int and -_WRAPPED < key < 0:
        key += _WRAPPED
    if stage not in _STAGES or type(key) is not int or not 0 <= key < _MAX_KEY:
        counts["event(s) of no known stage dropped"] += 1
        return None
    if not length and stage in ("PUSH", "PULL"):  # written as 0 long when it ends never
        counts["stage(s) without an end dropped"] += 1
        return None
    return Stage(tensor, key, stage, at, over)


def _by_time(stage: Stage) -> tuple[int, int, int]:
    return stage.start, stage.key, stage.end


def _wholes(comm: Comm) -> list[Stage]:
    """Whole tensors by start; where the file has none of a tensor, from its first stage to its last, round by round."""
    told = {whole.tensor for whole in comm.totals}
    made: list[Stage] = []
    rounds: dict[tuple[str, int, str], int] = {}
    spans_of: dict[tuple[str, int], tuple[int, int]] = {}
    for stage in comm.stages:
        if stage.tensor not in told:
            number = rounds[stage[:3]] = rounds.get(stage[:3], -1) + 1
            start, end = spans_of.get((stage.tensor, number), (stage.start, stage.end))
            spans_of[stage.tensor, number] = min(start, stage.start), max(end, stage.end)
    made = [Stage(tensor, -1, "", *span) for (tensor, _), span in spans_of.items()]
    return sorted([*comm.totals, *made], key=_by_time)


def _steps(wholes: Sequence[Stage]) -> list[tuple[int, int]]:
    begins: list[int] = []
    had: set[str] = set()
    for whole in wholes:
        if not begins or whole.tensor in had:
            had = set()
            begins.append(whole.start)
        had.add(whole.tensor)
    return [(a, b) for a, b in pairwise([*begins, max(whole.end for whole in wholes)]) if b > a]


def _add_rows(
    builder: TraceBuilder,
    stages: Iterable[Stage],
    names: Mapping[str, int],
    sizes: Mapping[tuple[int, int], int],
    zero_ns: int,
) -> None:
    for stage in stages:
        if stage.stage in ROWS and stage.tensor in names:
            tensor, part = names[stage.tensor], stage.key % MAX_PARTS
            more = {"tensor": tensor, "flow": part, "nbytes": sizes.get((tensor, part), -1)}
            where = f"byteps/{stage.stage.lower()}"
            builder.add(
                ROWS[stage.stage], EventKind.ANNOTATION, where, stage.start + zero_ns, stage.end + zero_ns, None, **more
            )


def _plain(trace: RankTrace, comm: Comm) -> dict[str, int]:
    """BytePS's names that are a tensor's, but for the plugin's prefix and a generation's suffix."""
    numbers = {tensor.name: number for number, tensor in enumerate(trace.tensors)}
    found = {}
    for name in {stage.tensor for stage in comm.stages}:
        given = _GENERATION.sub("", name)
        for form in (given, given.removeprefix(_PLUGIN)):
            if form in numbers:
                found[name] = numbers[form]
    return found


def _sizes(tensor: Tensor, told: Settings, count: int) -> list[int]:
    """Bytes of a tensor's ``count`` partitions; [] where no bound that is known or usual makes so many."""
    for bound in (told.bound(tensor.name), DEFAULT_PARTITION_BYTES, aligned(-(-tensor.nbytes // count))):
        sizes = cut(tensor.nbytes, bound)
        if len(sizes) == count:
            return sizes
    return []


def _fit(trace: RankTrace, comm: Comm, names: Mapping[str, int], zero_ns: int) -> tuple[int, int]:
    """``zero_ns`` corrected, and by how much that is still against what must be.

    A gradient's rounds are those of its rows, counted from the last: what began before the capture did is missing.
    """
    low, high = -_MAX_TIME_NS, _MAX_TIME_NS
    begins: dict[int, dict[int, list[int]]] = {}
    ends: dict[int, dict[int, list[int]]] = {}
    for stage in comm.stages:
        if stage.tensor in names and stage.stage in ("COPYD2H", "COPYH2D"):
            of, at = (begins, stage.start) if stage.stage == "COPYD2H" else (ends, stage.end)
            of.setdefault(names[stage.tensor], {}).setdefault(stage.key, []).append(at + zero_ns)
    for gaps, known, handed in ((begins, spans(trace, SUBMIT), True), (ends, spans(trace, WAIT), False)):
        for tensor in gaps.keys() & known.keys():
            rows = _rounds(trace, known[tensor][0 if handed else 1].tolist())
            for times in gaps[tensor].values():
                found = [rows[step] - at for step, at in _rounds(trace, times).items() if step in rows]
                if handed:
                    low = max([low, *found])
                else:
                    high = min([high, *found])
    # a µs is as fine as the file is
    wanted = min(max(0, low), high) if low <= high + 1000 else 0
    kept = max(-_CLOCKS_NS, min(_CLOCKS_NS, wanted))
    return zero_ns + kept, max(0, low - kept, kept - high)


def _rounds(trace: RankTrace, times: Sequence[int]) -> dict[int, int]:
    """Step -> the only time that lies in it."""
    steps = trace.step_at(np.array(times, dtype=np.int64)).tolist()
    count = Counter(steps)
    return {step: at for step, at in zip(steps, times, strict=True) if step >= 0 and count[step] == 1}


def _rank_in(path: Path) -> int:
    """The number at the end of the worker's folder's name: ``<worker>/<local rank>/comm.json``; -1 if there is none."""
    where = path.resolve().parent
    found = re.search(r"(\d{1,6})$", (where.parent if where.name.isdigit() else where).name)
    return int(found[1]) if found else -1


def _counts(told: object, most: int) -> dict[str, int]:
    return {str(key): n for key, n in told.items() if _count(n, most)} if isinstance(told, dict) else {}


def _count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value < most
