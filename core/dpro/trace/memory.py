"""What a rank's memory is taken by, as measured in one captured step: segments, and what is held from one to another.

A step falls into *segments*, cut where a unit of the model (a module that is called once a step) begins or ends its
forward pass or begins its backward pass. Of an allocation only this is kept: bytes, the segment it was made in, the one
it was freed in. What lives within one segment is in that segment's rise. Part of a capture (``meta.extra``, JSON);
whose modules they are, and what a schedule makes of it, is known elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpro.trace.model import EventKind, RankTrace

#: Where a trace's ``meta.extra``, and a graph's ``info``, have it.
MEMORY = "memory"
#: The same, for what one pass over a k-th of the batch takes: k -> ns, 1 among them.
MICRO = "micro"
#: Before the number of a unit in the name of a mark: forward begins, has ended, backward begins.
FORWARD, AFTER, BACKWARD = "dpro.forward ", "dpro.after ", "dpro.backward "
#: Autograd's own event around each node (:data:`dpro.graph.threads.BACKWARD_PREFIX`).
_AUTOGRAD = "autograd::engine::evaluate_function"
#: An allocation of before the step.
BEFORE = -1
_MOST_SEGMENTS, _MOST_HELD, _MOST_BYTES = 100_000, 1_000_000, 1 << 50


@dataclass(frozen=True)
class Unit:
    """A module. ``forward``, ``after`` and ``backward`` are the segments that begin at its marks."""

    name: str
    forward: int
    after: int
    backward: int
    #: of the same Sequential as the unit before it, which hands it nothing but its input
    follows: bool = False
    #: why it must not be run twice in a step ('': it may)
    refused: str = ""


@dataclass(frozen=True)
class Held:
    """Bytes made in segment ``made`` (or :data:`BEFORE`) and freed in segment ``freed`` (their number: not in this
    step); ``output`` is the unit whose output they are, -1 none."""

    made: int
    freed: int
    nbytes: int
    output: int = -1


@dataclass(frozen=True)
class MemoryProfile:
    """``base_bytes`` are allocated as the step begins. ``rise[s]`` is the most that segment ``s`` adds to what there
    was at its begin, ``kept[s]`` how much of that outlives the step (gradients)."""

    base_bytes: int
    rise: tuple[int, ...]
    kept: tuple[int, ...]
    held: tuple[Held, ...]
    units: tuple[Unit, ...]
    #: the whole backward pass of a block that runs again is over before that of the one before it begins
    settles: bool = False

    @property
    def segments(self) -> int:
        return len(self.rise)

    @property
    def peak(self) -> int:
        """The most that was allocated at once in the measured step, bytes."""
        change = np.zeros(self.segments + 1, dtype=np.int64)
        for held in self.held:
            change[held.made + 1] += held.nbytes if held.made != BEFORE else 0
            if held.freed < self.segments:
                change[held.freed + 1] -= held.nbytes
        level = self.base_bytes + np.cumsum(change)[: self.segments]
        return int((level + np.array(self.rise)).max())

    def block(self, name: str) -> Block | None:
        """The run of units that is called so: a unit by its name, several by ``<first>..<last key>``; None: no such.

        Units of one run follow each other in one Sequential, and each may be run twice.
        """
        head, dots, last = name.partition("..")
        number = {unit.name: k for k, unit in enumerate(self.units)}
        begin = number.get(head, -1)
        end = number.get(head.rpartition(".")[0] + "." * ("." in head) + last, -1) if dots else begin
        run = self.units[begin : end + 1]
        if begin < 0 or not run or any(unit.refused for unit in run) or not all(unit.follows for unit in run[1:]):
            return None
        return Block(name, begin, end, run[0].forward, run[-1].after, run[0].backward, run[-1].backward)


@dataclass(frozen=True)
class Block:
    """Units ``first`` to ``last``: their forward pass is the segments ``forward`` up to and without ``after``, the
    backward pass of the last begins with ``backward``, that of the first with ``first_backward``."""

    name: str
    first: int
    last: int
    forward: int
    after: int
    first_backward: int
    backward: int


def block_name(units: Sequence[Unit], first: int, last: int) -> str:
    """How :meth:`MemoryProfile.block` finds units ``first`` to ``last``."""
    name = units[first].name
    return name if first == last else f"{name}..{units[last].name.rpartition('.')[2]}"


@dataclass(frozen=True)
class Mark:
    """A mark of the step, ns. At ``AFTER`` marks ``outputs`` are the addresses of what the unit returned."""

    at: int
    label: str
    outputs: tuple[int, ...] = ()


def marks_of(trace: RankTrace, begin: int, end: int) -> list[tuple[int, str]]:
    """(ns, label) of the marks between two instants, in order of time; the last one is the end of the backward pass."""
    inside = (trace.start >= begin) & (trace.start < end)
    labels = [name.startswith((FORWARD, AFTER, BACKWARD)) for name in trace.names]
    backward = [name.startswith(_AUTOGRAD) for name in trace.names]
    rows = np.flatnonzero(inside & (trace.kind == EventKind.ANNOTATION) & np.take(labels, trace.name)).tolist()
    marks = sorted((int(trace.start[row]), trace.names[trace.name[row]]) for row in rows)
    ends = trace.end[inside & (trace.kind == EventKind.CPU_OP) & np.take(backward, trace.name)]
    if marks and len(ends) and int(ends.max()) > marks[-1][0]:
        marks.append((int(ends.max()), "end of the backward pass"))
    return marks


def profile(
    events: Sequence[tuple[int, int, int]],
    marks: Sequence[Mark],
    bounds: tuple[int, int],
    base_bytes: int,
    units: Sequence[tuple[str, bool, str]],
) -> MemoryProfile:
    """Put a step's allocations into its segments.

    Args:
        events: (ns, address, bytes; negative where freed), of the whole capture.
        marks: of this step.
        bounds: of this step, ns.
        base_bytes: allocated at its begin.
        units: name, :attr:`Unit.follows` and :attr:`Unit.refused` of each.
    """
    marks = sorted(marks, key=lambda mark: mark.at)
    count = len(marks) + 1
    alive: dict[int, list[int]] = {}  # address -> made, freed, bytes, output
    held: list[list[int]] = []
    rise = [0] * count
    segment, level, start_level = 0, 0, 0
    at_peak: list[list[list[int]]] = [[] for _ in range(count)]  # what the segment had made as it was highest
    fresh: list[list[int]] = []

    def cross(until: int) -> None:
        nonlocal segment, start_level, fresh
        while segment < len(marks) and marks[segment].at <= until:
            mark = marks[segment]
            for address in mark.outputs:
                if address in alive:
                    alive[address][3] = int(mark.label.removeprefix(AFTER))
            segment += 1
            start_level, fresh = level, []

    for at, address, nbytes in sorted(events, key=lambda event: event[0]):
        if at >= bounds[1]:
            break
        inside = at >= bounds[0]
        if inside:
            cross(at)
        if nbytes > 0:
            item = [segment if inside else BEFORE, count, nbytes, -1]
            alive[address] = item
            if inside:
                level += nbytes
                fresh.append(item)
                held.append(item)
                if level - start_level > rise[segment]:
                    rise[segment] = level - start_level
                    at_peak[segment] = list(fresh)
        elif (found := alive.pop(address, None)) is not None and inside:
            level -= found[2]
            found[1] = segment
            if found[0] == BEFORE:
                held.append(found)
    cross(bounds[1])
    kept = [sum(item[2] for item in items if item[1] == count) for items in at_peak]
    outliving = [Held(*item) for item in held if item[0] != item[1]]
    return MemoryProfile(base_bytes, tuple(rise), tuple(kept), _joined(outliving), _units(marks, units, count))


def _units(marks: Sequence[Mark], told: Sequence[tuple[str, bool, str]], count: int) -> tuple[Unit, ...]:
    places: dict[str, list[int]] = {}
    for k, mark in enumerate(marks):
        places.setdefault(mark.label, []).append(k + 1)
    out = []
    for number, (name, follows, refused) in enumerate(told):
        at = [places.get(f"{kind}{number}", []) for kind in (FORWARD, AFTER, BACKWARD)]
        if any(len(found) != 1 for found in at) and not refused:
            refused = "it has no backward pass" if len(at[0]) == 1 else "it is not called once a step"
        forward, after, backward = (found[0] if found else count for found in at)
        out.append(Unit(name, forward, after, backward, follows, refused))
    return tuple(out)


def _joined(held: Iterable[Held]) -> tuple[Held, ...]:
    """Those that are made and freed together, as one."""
    sums: dict[tuple[int, int, int], int] = {}
    for one in held:
        key = one.made, one.freed, one.output
        sums[key] = sums.get(key, 0) + one.nbytes
    return tuple(Held(made, freed, nbytes, output) for (made, freed, output), nbytes in sums.items())


def dump(memory: MemoryProfile) -> dict[str, Any]:
    """As JSON values."""
    return {
        "base_bytes": memory.base_bytes,
        "rise": [*memory.rise],
        "kept": [*memory.kept],
        "held": [[one.made, one.freed, one.nbytes, one.output] for one in memory.held],
        "units": [asdict(unit) for unit in memory.units],
        "settles": memory.settles,
    }


def load(told: Any) -> MemoryProfile | None:
    """What :func:`dump` gave, of a stored trace, which may hold anything: None where it is no such profile."""
    if not isinstance(told, dict) or not _is_count(told.get("base_bytes")):
        return None
    rise, kept, held, units = (told.get(key) for key in ("rise", "kept", "held", "units"))
    if not all(isinstance(value, list) for value in (rise, kept, held, units)):
        return None
    assert isinstance(rise, list) and isinstance(kept, list) and isinstance(held, list) and isinstance(units, list)
    if not 0 < len(rise) == len(kept) <= _MOST_SEGMENTS or not all(map(_is_count, [*rise, *kept])):
        return None
    count = len(rise)
    if len(held) > _MOST_HELD or not all(_is_held(one, count, len(units)) for one in held):
        return None
    if not all(_is_unit(unit, count) for unit in units):
        return None
    return MemoryProfile(
        told["base_bytes"],
        tuple(rise),
        tuple(kept),
        tuple(Held(*one) for one in held),
        tuple(Unit(**unit) for unit in units),
        told.get("settles") is True,
    )


def load_micro(told: Any) -> dict[int, int]:
    """Times of micro-batches of a stored trace (JSON has its keys as text), empty where it has none."""
    if not isinstance(told, dict) or not all(_is_count(ns) and ns for ns in told.values()):
        return {}
    return {int(key): ns for key, ns in told.items() if isinstance(key, str) and key.isdecimal() and len(key) < 5}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_BYTES


def _is_held(one: Any, segments: int, units: int) -> bool:
    if not isinstance(one, list) or len(one) != 4 or any(type(n) is not int for n in one):
        return False
    made, freed, nbytes, output = one
    return BEFORE <= made < freed <= segments and _is_count(nbytes) and -1 <= output < units


def _is_unit(unit: Any, segments: int) -> bool:
    if not isinstance(unit, dict) or set(unit) != {"name", "forward", "after", "backward", "follows", "refused"}:
        return False
    places = (unit["forward"], unit["after"], unit["backward"])
    return (
        all(type(place) is int and 0 <= place <= segments for place in places)
        and isinstance(unit["name"], str)
        and isinstance(unit["refused"], str)
        and type(unit["follows"]) is bool
    )
