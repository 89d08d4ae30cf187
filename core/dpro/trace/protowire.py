"""Protocol Buffers' wire format: the fields of messages whose schema a reader knows.

A reader of its own and not the ``protobuf`` library, for two reasons: the library gives all of a message or nothing,
while a trace that was cut is worth what is left of it; and dpro reads a framework's files where none is installed.
Knows the encoding (varints, fixed numbers, length-delimited fields) and no meaning. What no writer writes ends the
message that it is in, and its neighbours are read on; that and data that end early are told in :class:`Damage`.
Nothing is copied but what is asked for, and no byte is looked at twice on one level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any, TypeAlias

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BITS = 70
_SIGN, _WRAP = 1 << 63, 1 << 64
_CUT, _CORRUPT = -1, -2

Data: TypeAlias = bytes | mmap
#: Field number -> (key of the result, None for text or a number, else the schema of the message in it).
Schema: TypeAlias = "Mapping[int, tuple[str, Schema | None]]"


@dataclass
class Damage:
    """What could not be read; offsets are bytes of the data."""

    cut_at: int = -1  # the end of data that end inside a field
    corrupt: int = 0  # messages read only in part
    corrupt_at: int = -1  # the first of those places

    def warnings(self) -> list[str]:
        out = []
        if self.corrupt:
            out.append(f"{self.corrupt} corrupt message(s) read in part, the first at byte offset {self.corrupt_at}")
        if self.cut_at >= 0:
            out.append(f"file ends early, at byte {self.cut_at}: read up to there")
        return out

    def at(self, place: int, why: int, end: int, size: int) -> None:
        if why == _CUT and end >= size:
            self.cut_at = size
            return
        self.corrupt += 1
        if self.corrupt_at < 0:
            self.corrupt_at = place


def fields(data: Data, at: int, end: int, damage: Damage) -> Iterator[tuple[int, int, int, int]]:
    """The fields of the message in ``data[at:end]``: number, wire type, value, end.

    Of a :data:`BYTES` field value and end are the place of its content, the end behind that of the data where they
    are cut; of a number the end is -1. Numbers come unsigned (:func:`signed`), fixed ones as their bits.
    """
    size = len(data)
    end = min(end, size)
    while at < end:
        start = at
        key, at = _varint(data, at, end)
        number, wire = key >> 3, key & 7
        until = -1
        if at >= 0 and number > 0:
            if wire in (VARINT, BYTES):
                value, at = _varint(data, at, end)
                until = at + value if wire == BYTES else -1
            elif wire in (FIXED64, FIXED32):
                begin, at = at, at + (8 if wire == FIXED64 else 4)
                value = int.from_bytes(data[begin:at], "little")
                at = at if at <= end else _CUT
            else:  # groups went out of use with proto1; 6 and 7 never were
                at = _CORRUPT
        elif at >= 0:
            at = _CORRUPT
        if at < 0:
            damage.at(start, at, end, size)
            return
        if until > end:
            damage.at(start, _CUT, end, size)
            if end < size:
                return
            until = size + 1
        yield (number, wire, value, -1) if wire != BYTES else (number, BYTES, at, until)
        at = max(at, until)


def _varint(data: Data, at: int, end: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends, or why there is none."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (_WRAP - 1), at
        shift += 7
        if shift >= _MAX_VARINT_BITS:
            return 0, _CORRUPT
    return 0, _CUT


def signed(value: int) -> int:
    """An ``int64`` field's value."""
    return value - _WRAP if value >= _SIGN else value


def text(data: Data, at: int, end: int) -> str:
    return bytes(data[at:end]).decode("utf-8", "replace")


def message(data: Data, at: int, end: int, schema: Schema, damage: Damage) -> dict[str, list[Any]]:
    """The message in ``data[at:end]`` as lists by key, every field that ``schema`` names; absent ones are missing.

    Text that the data's end cuts is left out, and so is a field of another wire type than the schema's.
    """
    out: dict[str, list[Any]] = {}
    for number, wire, value, until in fields(data, at, end, damage):
        known = schema.get(number)
        if known is None:
            continue
        key, inner = known
        if wire != BYTES:
            if inner is None:
                out.setdefault(key, []).append(signed(value))
        elif inner is not None:
            out.setdefault(key, []).append(message(data, value, until, inner, damage))
        elif until <= len(data):
            out.setdefault(key, []).append(text(data, value, until))
    return out
