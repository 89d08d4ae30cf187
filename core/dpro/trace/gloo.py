"""gloo's frames on one directed TCP stream, found again in what single socket calls moved.

gloo (``gloo/transport/tcp/pair.h``, ``Op``) puts a header of 48 bytes before everything: six 64-bit words, in the
byte order of the machine: bytes of the frame with its header, opcode, slot, offset, bytes of payload, offset at the
receiver. The sender writes header and payload in one call, the receiver reads them in two; both may be cut. A new
connection begins with 8 bytes by which the opener names itself. The slot is the tag of the collective and the same
at both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 48
_GREETING_BYTES = 8
#: No frame is larger: a word beyond it is no length.
_MOST_BYTES = 1 << 46

_Int = npt.NDArray[np.int64]


class Opcode(IntEnum):
    """What a frame is."""

    SEND_BUFFER = 0  # payload for a buffer that the receiver registered under the slot
    SEND_UNBOUND_BUFFER = 1  # payload for whoever waits for the slot
    NOTIFY_SEND_READY = 2  # header alone: I have something for the slot
    NOTIFY_RECV_READY = 3  # header alone: I wait for the slot


class Label(IntEnum):
    """What a socket call moved; the lower-case name is the row's."""

    MESSAGE = 0  # not gloo's, or not known
    CONTROL = 1  # notifications, headers alone, the opener's name
    PAYLOAD = 2  # at least one byte of payload


@dataclass
class Frames:
    """Frames of one directed stream, in order. Columns [frames]."""

    offset: _Int  #: of the header's first byte on the stream
    length: _Int  #: bytes of payload
    opcode: _Int
    slot: _Int

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def end(self) -> _Int:
        """First byte after the frame."""
        return self.offset + HEADER_BYTES + self.length


def parse(offset: _Int, nbytes: _Int, head: npt.NDArray[np.uint8], head_bytes: npt.NDArray[np.uint8]) -> Frames:
    """The frames that begin within the calls of one directed stream.

    Where one frame begins after another is arithmetic; the first is where a call begins with a header that agrees
    with itself, and so is the next after a gap. Frames whose beginning was not seen are not found.

    Args:
        offset: [calls] first byte of each call on the stream, rising.
        nbytes: [calls] bytes it moved.
        head: [calls, 48] the first of them.
        head_bytes: [calls] how many of ``head`` are there.
    """
    whole = np.flatnonzero(head_bytes == HEADER_BYTES)
    headers = np.ascontiguousarray(head[whole]).view(np.uint64).reshape(-1, 6)
    good = _agrees(headers)
    starts = dict(zip(offset[whole[good]].tolist(), headers[good].astype(np.int64).tolist(), strict=True))
    found: list[tuple[int, int, int, int]] = []
    end = int(offset[0]) if len(offset) else 0
    for start in [*sorted(starts), None]:
        # a header between may have been moved in pieces, and is lost if it was not seen
        while (start is None or end < start) and (words := _pieced(end, offset, nbytes, head, head_bytes)):
            end = _add(found, end, words)
        if start is not None and start >= end:  # else it is payload that looks like a header
            end = _add(found, start, starts[start])
    columns = np.array(found, dtype=np.int64).reshape(-1, 4)
    return Frames(*(np.ascontiguousarray(column) for column in columns.T))


def label(frames: Frames, offset: _Int, nbytes: _Int) -> tuple[npt.NDArray[np.int64], _Int]:
    """What each call of the stream moved: :class:`Label` [calls] and the slot it served (-1 not known) [calls].

    The bytes just before the first frame are the tail of one that began before we looked: payload, slot not known.
    """
    labels = np.full(len(offset), int(Label.MESSAGE))
    slots = np.full(len(offset), -1, dtype=np.int64)
    if not len(frames):
        return labels, slots
    first = np.searchsorted(frames.offset, offset, side="right") - 1
    last = np.searchsorted(frames.offset, offset + nbytes - 1, side="right") - 1
    # a call that is the end of one frame and the beginning of another serves the one that has payload in it
    for frame in (last, np.maximum(first, 0)):
        begin, end = frames.offset[frame], frames.end[frame]
        inside = (frame >= 0) & (offset < end) & (offset + nbytes > begin)
        payload = inside & (frames.length[frame] > 0) & (offset + nbytes > begin + HEADER_BYTES)
        labels = np.where(payload, int(Label.PAYLOAD), np.where(inside, np.maximum(labels, int(Label.CONTROL)), labels))
        slots = np.where(payload | (inside & (slots < 0)), frames.slot[frame], slots)
    tail = _tail(int(frames.offset[0]), offset, nbytes)
    greeting = len(tail) and offset[tail[0]] == 0 and frames.offset[0] == _GREETING_BYTES
    labels[tail] = int(Label.CONTROL if greeting else Label.PAYLOAD)
    return labels, slots


def _agrees(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which headers [n, 6] agree with themselves."""
    total, opcode, length = words[:, 0], words[:, 1], words[:, 4]
    sized = (length < _MOST_BYTES) & (words[:, 3] < _MOST_BYTES) & (words[:, 5] < _MOST_BYTES)
    payload = (opcode <= Opcode.SEND_UNBOUND_BUFFER) & (total == length + np.uint64(HEADER_BYTES))
    notice = (opcode >= Opcode.NOTIFY_SEND_READY) & (opcode <= Opcode.NOTIFY_RECV_READY) & (total == HEADER_BYTES)
    return np.asarray(sized & (payload | notice))


def _pieced(
    start: int, offset: _Int, nbytes: _Int, head: npt.NDArray[Any], head_bytes: npt.NDArray[Any]
) -> list[int] | None:
    """The header at ``start``, put together from calls that each moved a part of it; None where it is none."""
    gathered = b""
    at = int(np.searchsorted(offset, start))
    while at < len(offset) and offset[at] == start + len(gathered) and len(gathered) < HEADER_BYTES:
        piece = head[at, : head_bytes[at]].tobytes()
        gathered += piece
        if len(piece) < nbytes[at]:
            break
        at += 1
    if len(gathered) < HEADER_BYTES:
        return None
    words = np.frombuffer(gathered[:HEADER_BYTES], dtype=np.uint64).reshape(1, 6)
    if not _agrees(words)[0]:
        return None
    numbers: list[int] = words[0].astype(np.int64).tolist()
    return numbers


def _add(found: list[tuple[int, int, int, int]], start: int, words: list[int]) -> int:
    """Note the frame at ``start`` with header ``words``; its end. A notification tells a length but carries none."""
    total, opcode, slot = words[:3]
    found.append((start, total - HEADER_BYTES, opcode, slot))
    return start + total


def _tail(start: int, offset: _Int, nbytes: _Int) -> npt.NDArray[np.int64]:
    """Calls without a gap up to ``start``."""
    before = np.flatnonzero(offset < start)
    if not len(before) or offset[before[-1]] + nbytes[before[-1]] != start:
        return before[:0]
    gaps = np.flatnonzero(offset[before[1:]] != offset[before[:-1]] + nbytes[before[:-1]])
    return before[gaps[-1] + 1 :] if len(gaps) else before
