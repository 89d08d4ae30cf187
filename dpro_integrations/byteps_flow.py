"""Gradients that go to BytePS' servers in parts, one after the other, so many bytes at once. Knows no framework.

BytePS hands a push to the network as soon as it can, and a question for a sum goes behind all that was handed over
before it. What bounds that is the framework's own order of things: a part is pushed when enough of those before it are
back. So each part is a tensor to BytePS, with a name of its own (``gradient_3.2~1``, see ``byteps_partitions``), and no
larger than the job's own partitions. All workers have the same parts in the same order: with another one they would
wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.trace.byteps import PAGE_BYTES, cut, waits
from dpro_integrations import byteps_partitions
from dpro_integrations.byteps_partitions import Bounds


class Piece(NamedTuple):
    """A part of a gradient: bytes from where to where; ``whole``: it is all of it."""

    gradient: str
    number: int
    begin: int
    end: int
    whole: bool


@dataclass(frozen=True)
class Flow:
    """What goes, in order, and ``most`` bytes at once; ``key`` is the same for the same names."""

    pieces: tuple[Piece, ...]
    most: int

    @property
    def key(self) -> tuple[Piece, ...]:
        return self.pieces

    def waits(self, places: Sequence[int] | None = None) -> list[list[int]]:
        """For each of the pieces at ``places`` (all of them, if not given) the places of earlier ones to wait for."""
        going = range(len(self.pieces)) if places is None else places
        found = waits([self.pieces[at].end - self.pieces[at].begin for at in going], self.most)
        return [[going[k] for k in before] for before in found]

    def of(self, gradient: str) -> list[int]:
        """Places of a gradient's pieces, from its first byte on."""
        return [place for place, piece in enumerate(self.pieces) if piece.gradient == gradient]


def flow_of(plan: Plan, known: Mapping[str, int], bounds: Bounds) -> Flow:
    """How gradients go under ``plan``, which has ``in_flight_bytes``.

    Args:
        known: bytes of every gradient, as it is pushed, by name.

    Raises:
        PlanError: the plan does not fit, or BytePS could not work with it.
    """
    sizes, order = plan.partitions or {}, plan.push_order or []
    assert plan.in_flight_bytes is not None
    if sorted(order) != sorted(known) or set(sizes) != set(known):
        missing = sorted({*known} ^ {*order} | {*known} ^ {*sizes})
        raise PlanError(f"the plan's gradients are not the job's ({', '.join(missing[:2]) or 'some more than once'})")
    pieces: list[Piece] = []
    for name in order:
        if sizes[name] % PAGE_BYTES:
            raise PlanError(f"parts of {sizes[name]} bytes are no whole pages of {PAGE_BYTES}")
        at = 0
        for number, nbytes in enumerate(cut(known[name], sizes[name])):
            if nbytes > bounds.own:
                raise PlanError(f"BytePS itself cuts what is larger than {bounds.own} bytes")
            pieces.append(Piece(name, number, at, at + nbytes, nbytes == known[name]))
            at += nbytes
    if len(pieces) > (most := byteps_partitions.MOST_GRADIENTS):
        raise PlanError(f"{len(pieces)} parts need as many names, and dpro has {most}")
    flow = Flow(tuple(pieces), plan.in_flight_bytes)
    if not bounds.room(flow.key):
        raise PlanError(f"{byteps_partitions.MOST_BOUNDS} partition sizes were tried: BytePS frees no memory of any")
    return flow
