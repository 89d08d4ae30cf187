"""What stands between a tensor's producer in one form and its reader in another: Split, Concat, AddN, a collective.

Knows two lists of devices; not which tensor it is. HeteroG's rules (CoNEXT 2020; ``fastt_heterog_disco.md`` section
2.6): a full copy is read on its own device or from replica 0; parts are cut from replica 0's copy; parts are joined on
the reader's first device; n parts become m through gcd(n, m) joints; what has no rows is a part of a sum, and added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro.graph.tasks import CHANNEL, Ints

SPLIT, CONCAT, ADD, ALL_REDUCE = "Split", "Concat", "AddN", "AllReduce"
Floats = npt.NDArray[np.float64]


class Mode(IntEnum):
    """How the parts of a tensor are parts of it."""

    ROWS = 0  # of a batch
    SUM = 1  # of a sum that one device makes
    COLLECTIVE = 2  # of a sum that all make together


@dataclass(frozen=True)
class Conversion:
    """q ops put in, that make r tensors. A tensor is told by the replica that makes it (>= 0), or as ``~i``: the i-th
    new one.

    ``types`` and ``device`` [q]. ``maker`` [r]: the op that makes each new
    tensor, ``fraction`` [r]: its bytes of those of the whole. ``source``, ``reader`` [e]: which tensor is read by which
    op, parts in order. ``read`` [replicas of the reader]: the tensor that each reads in the end.
    """

    types: tuple[str, ...]
    device: Ints
    maker: Ints
    fraction: Floats
    source: Ints
    reader: Ints
    read: Ints


class _Draft:
    def __init__(self) -> None:
        self.types: list[str] = []
        self.device: list[int] = []
        self.maker: list[int] = []
        self.fraction: list[float] = []
        self.uses: list[tuple[int, int]] = []

    def op(self, kind: str, device: int, sources: list[int], fractions: list[float]) -> list[int]:
        """Put in; the tensors that it makes."""
        number = len(self.types)
        self.types.append(kind)
        self.device.append(device)
        self.uses += [(source, number) for source in sources]
        made = [~(len(self.maker) + i) for i in range(len(fractions))]
        self.maker += [number] * len(fractions)
        self.fraction += fractions
        return made

    def done(self, read: list[int]) -> Conversion:
        def ints(values: list[int]) -> Ints:
            return np.array(values, dtype=np.int64)

        return Conversion(
            tuple(self.types), ints(self.device), ints(self.maker), np.array(self.fraction),
            ints([source for source, _ in self.uses]), ints([op for _, op in self.uses]), ints(read),
        )  # fmt: skip


def conversion(
    source: tuple[int, ...], parted: bool, target: tuple[int, ...], to_parts: bool, mode: Mode
) -> Conversion:
    """From a producer with replicas on ``source`` to a reader with replicas on ``target``.

    Args:
        parted: the producer's replicas have parts; ``to_parts``: the reader's take parts.
    """
    draft = _Draft()
    if not parted:
        if to_parts and mode is Mode.ROWS:
            return draft.done(draft.op(SPLIT, source[0], [0], [1.0 / len(target)] * len(target)))
        return draft.done([source.index(d) if d in source else 0 for d in target])
    if mode is not Mode.ROWS:
        return _summed(draft, source, target, mode)
    if not to_parts:
        return draft.done(draft.op(CONCAT, target[0], list(range(len(source))), [1.0]) * len(target))
    joints = gcd(len(source), len(target))
    n, m = len(source) // joints, len(target) // joints
    read: list[int] = []
    for j in range(joints):
        first = target[j * m]
        whole = [j] if n == 1 else draft.op(CONCAT, first, list(range(j * n, (j + 1) * n)), [1.0 / joints])
        at = source[j] if n == 1 else first
        read += whole if m == 1 else draft.op(SPLIT, at, whole, [1.0 / len(target)] * m)
    return draft.done(read)


def _summed(draft: _Draft, source: tuple[int, ...], target: tuple[int, ...], mode: Mode) -> Conversion:
    """Replicas of one device are added up there first."""
    sums = []
    for device in sorted(set(source)):
        here = [i for i, d in enumerate(source) if d == device]
        sums += here if len(here) == 1 else draft.op(ADD, device, here, [1.0])
    if len(sums) > 1:
        kind, device = (ALL_REDUCE, CHANNEL) if mode is Mode.COLLECTIVE else (ADD, target[0])
        sums = draft.op(kind, device, sums, [1.0])
    return draft.done(sums * len(target))


class Ragged:
    """Rows of different lengths, one after the other."""

    def __init__(self, rows: list[npt.NDArray[Any]]) -> None:
        lengths = [len(row) for row in rows]
        self.length: Ints = np.array(lengths, dtype=np.int64)
        self._begin: Ints = np.array([0, *accumulate(lengths)], dtype=np.int64)

    def take(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Of each cell of ``rows``: which of ``rows`` it is in, its place there, and its place among all cells."""
        count = self.length[rows]
        row = np.repeat(np.arange(len(rows)), count)
        within: Ints = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        return row, within, self._begin[rows][row] + within


class Conversions:
    """All conversions that were asked for, in columns, so that thousands of tensors are converted at once.

    Cells of ``ops`` [q each], ``tensors`` [r], ``uses`` [e] and ``reads`` [replicas] are those of the columns.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[tuple[int, ...], bool, tuple[int, ...], bool, Mode], int] = {}
        self._all: list[Conversion] = []
        #: of each the devices that it comes from
        self.sources: list[tuple[int, ...]] = []
        self._columns = -1

    def number(self, source: tuple[int, ...], parted: bool, target: tuple[int, ...], to_parts: bool, mode: Mode) -> int:
        """As :func:`conversion`."""
        key = source, parted, target, to_parts, mode
        if key not in self._numbers:
            self._numbers[key] = len(self._all)
            self._all.append(conversion(*key))
            self.sources.append(tuple(sorted(set(source))))
        return self._numbers[key]

    def settle(self) -> None:
        """Make the columns anew where there are more conversions than they have."""
        if self._columns == len(self._all):
            return
        self._columns = len(self._all)
        self.ops, self.tensors = Ragged([c.device for c in self._all]), Ragged([c.maker for c in self._all])
        self.uses, self.reads = Ragged([c.source for c in self._all]), Ragged([c.read for c in self._all])
        self.types = np.array([kind for c in self._all for kind in c.types], dtype=object)
        self.device, self.maker = self._column("device"), self._column("maker")
        self.fraction: Floats = np.concatenate([np.zeros(0), *(c.fraction for c in self._all)])
        self.source, self.reader, self.read = self._column("source"), self._column("reader"), self._column("read")

    def _column(self, name: str) -> Ints:
        return np.concatenate([np.zeros(0, np.int64), *(getattr(c, name) for c in self._all)])
