"""gloo's frames found in single socket calls: hand-made streams, cut in every way that a socket cuts them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.trace import gloo
from dpro.trace.gloo import HEADER_BYTES, Label, Opcode


def header(opcode: int, slot: int, length: int) -> bytes:
    carried = length if opcode <= Opcode.SEND_UNBOUND_BUFFER else 0
    return np.array([HEADER_BYTES + carried, opcode, slot, 0, length, 0], dtype=np.uint64).tobytes()


def frame(opcode: int, slot: int, length: int, fill: int = 7) -> bytes:
    return header(opcode, slot, length) + bytes([fill]) * (length if opcode <= Opcode.SEND_UNBOUND_BUFFER else 0)


def calls(stream: bytes, cuts: list[int], base: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Calls that move ``stream`` from one cut to the next; offsets count from ``base``."""
    edges = sorted({0, len(stream), *cuts})
    offset = np.array(edges[:-1], dtype=np.int64)
    nbytes = np.diff(np.array(edges, dtype=np.int64))
    head = np.zeros((len(offset), HEADER_BYTES), dtype=np.uint8)
    for k, (start, size) in enumerate(zip(offset, nbytes, strict=True)):
        piece = np.frombuffer(stream[start : start + min(int(size), HEADER_BYTES)], dtype=np.uint8)
        head[k, : len(piece)] = piece
    return offset + base, nbytes, head, np.minimum(nbytes, HEADER_BYTES).astype(np.uint8)


def table(frames: gloo.Frames) -> list[tuple[int, int, int, int]]:
    columns = (frames.offset, frames.length, frames.opcode, frames.slot)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def labelled(stream: bytes, cuts: list[int], base: int = 0) -> list[tuple[int, int]]:
    offset, nbytes, head, filled = calls(stream, cuts, base)
    labels, slots = gloo.label(gloo.parse(offset, nbytes, head, filled), offset, nbytes)
    return list(zip(labels.tolist(), slots.tolist(), strict=True))


def test_receiver_reads_header_and_payload_in_turn() -> None:
    stream = frame(3, 9, 1000) + frame(1, 9, 1000) + frame(2, 10, 5)
    cuts = [48, 96, 1096]
    assert table(gloo.parse(*calls(stream, cuts))) == [(0, 0, 3, 9), (48, 1000, 1, 9), (1096, 0, 2, 10)]
    assert labelled(stream, cuts) == [
        (Label.CONTROL, 9),
        (Label.CONTROL, 9),  # the header alone
        (Label.PAYLOAD, 9),
        (Label.CONTROL, 10),
    ]


def test_sender_writes_header_and_payload_at_once_and_is_cut() -> None:
    stream = frame(1, 4, 5000) + frame(1, 5, 300)
    assert labelled(stream, [2000, 5048], base=777) == [(Label.PAYLOAD, 4), (Label.PAYLOAD, 4), (Label.PAYLOAD, 5)]


def test_header_in_pieces_first_between_and_last() -> None:
    stream = frame(2, 1, 0) + frame(1, 2, 100) + frame(3, 3, 0)
    cuts = [48, 58, 96, 196, 200, 230]
    assert table(gloo.parse(*calls(stream, cuts))) == [(0, 0, 2, 1), (48, 100, 1, 2), (196, 0, 3, 3)]
    assert [label for label, _ in labelled(stream, cuts)] == [1, 1, 1, 2, 1, 1, 1]


def test_capture_begins_within_a_frame() -> None:
    stream = bytes(500) + frame(3, 8, 10) + frame(1, 8, 10)
    got = labelled(stream, [200, 500, 548, 596], base=10_000)
    assert got == [(Label.PAYLOAD, -1), (Label.PAYLOAD, -1), (Label.CONTROL, 8), (Label.CONTROL, 8), (Label.PAYLOAD, 8)]


def test_greeting_of_a_new_connection_is_control() -> None:
    assert labelled(b"\x05" + bytes(7) + frame(1, 8, 10), [8]) == [(Label.CONTROL, -1), (Label.PAYLOAD, 8)]


def test_calls_that_were_dropped() -> None:
    stream = frame(1, 1, 1000) + frame(1, 2, 1000) + frame(1, 3, 1000)
    offset, nbytes, head, filled = calls(stream, [48, 500, 1048, 1096, 2096, 2144])
    kept = np.array([0, 1, 4, 5, 6])  # lost: the rest of frame 1 and the header of frame 2
    frames = gloo.parse(offset[kept], nbytes[kept], head[kept], filled[kept])
    assert table(frames) == [(0, 1000, 1, 1), (2096, 1000, 1, 3)]
    labels, slots = gloo.label(frames, offset[kept], nbytes[kept])
    assert list(zip(labels.tolist(), slots.tolist(), strict=True)) == [
        (Label.CONTROL, 1),
        (Label.PAYLOAD, 1),
        (Label.MESSAGE, -1),  # payload of the frame whose header was dropped: not known
        (Label.CONTROL, 3),
        (Label.PAYLOAD, 3),
    ]


def test_payload_that_looks_like_a_header() -> None:
    stream = header(1, 6, 96) + header(1, 99, 500) + header(2, 98, 0) + frame(2, 7, 0)
    assert table(gloo.parse(*calls(stream, [48, 96, 144]))) == [(0, 96, 1, 6), (144, 0, 2, 7)]


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 40,
        bytes(4800),
        b"\xff" * 4800,
        np.arange(600, dtype=np.uint64).tobytes(),
        np.array([48, 4, 0, 0, 0, 0], dtype=np.uint64).tobytes(),  # no such opcode
        np.array([49, 2, 0, 0, 0, 0], dtype=np.uint64).tobytes(),  # a notification with a payload
        np.array([47, 1, 0, 0, 2**64 - 1, 0], dtype=np.uint64).tobytes(),  # a length that wraps
    ],
)
def test_stream_that_is_not_gloos(stream: bytes) -> None:
    assert {label for label, _ in labelled(stream, [48, 96, 144])} == {Label.MESSAGE}


def test_no_calls() -> None:
    none = calls(b"", [])
    frames = gloo.parse(*none)
    assert len(frames) == 0
    assert len(gloo.label(frames, none[0], none[1])[0]) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Opcode)), st.integers(0, 2**62), st.integers(0, 300)), min_size=1, max_size=12
    ),
    st.lists(st.integers(0, 4000), max_size=30),
    st.integers(0, 1 << 40),
)
def test_any_stream_cut_anywhere(parts: list[tuple[int, int, int]], cuts: list[int], base: int) -> None:
    """Every call of a stream seen from its start is labelled by the bytes it really moved.

    gloo itself begins every header with a call, so the cuts include those.
    """
    stream, kinds, starts, want = b"", [], [], []
    for opcode, slot, length in parts:
        starts.append(len(stream))
        carried = length if opcode <= Opcode.SEND_UNBOUND_BUFFER else 0
        want.append((len(stream) + base, carried, int(opcode), slot))
        stream += frame(opcode, slot, length)
        kinds += [Label.CONTROL] * HEADER_BYTES + [Label.PAYLOAD] * carried
    cuts = [cut for cut in cuts if cut < len(stream)] + starts
    assert table(gloo.parse(*calls(stream, cuts, base))) == want
    edges = sorted({0, len(stream), *cuts})
    expected = [max(kinds[a:b]) for a, b in itertools.pairwise(edges)]
    assert [label for label, _ in labelled(stream, cuts, base)] == expected
