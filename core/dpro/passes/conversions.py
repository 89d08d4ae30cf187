"""What stands between a tensor's producer in one form and its reader in another: Split, Concat, AddN, a collective.

Knows two lists of devices; not which tensor it is. HeteroG's rules (CoNEXT 2020; ``fastt_heterog_disco.md`` section
2.6): a full copy is read on its own device or from replica 0; parts are cut from replica 0's copy; parts are joined on
the reader's first device; n parts become m through gcd(n, m) joints; what has no rows is a part of a sum, and added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import gcd

import numpy as np

from dpro.graph.tasks import CHANNEL, Ints

SPLIT, CONCAT, ADD, ALL_REDUCE = "Split", "Concat", "AddN", "AllReduce"


class Mode(IntEnum):
    """How the parts of a tensor are parts of it."""

    ROWS = 0  # of a batch
    SUM = 1  # of a sum that one device makes
    COLLECTIVE = 2  # of a sum that all make together


@dataclass(frozen=True)
class Conversion:
    """q ops put in, that make r tensors. A tensor is told by the replica that makes it (>= 0), or as ``~i``: the i-th
    new one.

    ``types`` and ``device`` [q]; ``collective``: which of them is one, or -1. ``maker`` [r]: the op that makes each new
    tensor, ``fraction`` [r]: its bytes of those of the whole. ``source``, ``reader`` [e]: which tensor is read by which
    op, parts in order. ``read`` [replicas of the reader]: the tensor that each reads in the end.
    """

    types: tuple[str, ...]
    device: Ints
    collective: int
    maker: Ints
    fraction: np.ndarray[tuple[int], np.dtype[np.float64]]
    source: Ints
    reader: Ints
    read: Ints


class _Draft:
    def __init__(self) -> None:
        self.types: list[str] = []
        self.device: list[int] = []
        self.collective = -1
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
            tuple(self.types), ints(self.device), self.collective, ints(self.maker), np.array(self.fraction),
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
        if mode is Mode.COLLECTIVE:
            draft.collective = len(draft.types)
        kind, device = (ALL_REDUCE, CHANNEL) if mode is Mode.COLLECTIVE else (ADD, target[0])
        sums = draft.op(kind, device, sums, [1.0])
    return draft.done(sums * len(target))
