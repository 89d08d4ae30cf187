"""SEND and RECV joined by bytes: by hand, and against a byte-by-byte oracle."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.clock.messages import Messages, match_messages
from dpro.trace.model import EventKind, Meta, RankTrace, TraceBuilder

AB = "wire/10.0.0.1:5>10.0.0.2:6"
Spans = list[tuple[str, int, int]]  # stream, offset, nbytes
Call = tuple[str, EventKind, str, int, int]  # name, kind, stream, offset, nbytes
SEND, RECV = EventKind.SEND, EventKind.RECV


def rank(*calls: Call) -> RankTrace:
    builder = TraceBuilder(Meta())
    builder.resource_id("wire/other names have other numbers on each rank")
    for at, (name, kind, stream, offset, nbytes) in enumerate(calls):
        builder.add(name, kind, stream, at, at + 1, offset=offset, nbytes=nbytes)
    return builder.freeze([])


def rows(found: Messages) -> list[tuple[int, ...]]:
    columns = (found.send_trace, found.send_row, found.recv_trace, found.recv_row, found.offset, found.nbytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_calls_that_cut_the_stream_differently() -> None:
    sender = rank(("payload", SEND, AB, 0, 100), ("payload", SEND, AB, 100, 50))
    receiver = rank(("payload", RECV, AB, 0, 30), ("payload", RECV, AB, 30, 90), ("payload", RECV, AB, 120, 30))
    found = match_messages([receiver, sender])
    assert rows(found) == [
        (1, 0, 0, 0, 0, 30),
        (1, 0, 0, 1, 30, 70),
        (1, 1, 0, 1, 100, 20),
        (1, 1, 0, 2, 120, 30),
    ]
    assert found.matched_share() == found.matched_share(payload_only=False) == 1


def test_one_direction_is_not_the_other_and_one_end_alone_is_counted() -> None:
    other = "wire/10.0.0.2:6>10.0.0.1:5"
    found = match_messages([rank(("payload", SEND, AB, 0, 10)), rank(("payload", RECV, other, 0, 10))])
    assert (len(found), found.one_ended, found.matched_share()) == (0, 2, 0)


def test_shares_count_both_ends_by_name() -> None:
    # 80 payload bytes sent, 60 of them read as payload and 20 in a read called control; 10 control unread
    sender = rank(("payload", SEND, AB, 0, 80), ("control", SEND, AB, 80, 10))
    receiver = rank(("payload", RECV, AB, 0, 60), ("control", RECV, AB, 60, 20))
    found = match_messages([sender, receiver])
    assert found.matched_share() == 1  # 80 of 80 sent, 60 of 60 read
    assert found.matched_share(payload_only=False) == 160 / 170
    lost = match_messages([sender, rank(("payload", RECV, AB, 0, 60))])
    assert lost.matched_share() == 120 / 140


def test_gaps_bytes_seen_twice_and_rows_without_a_place() -> None:
    sender = rank(
        ("payload", SEND, AB, 0, 10), ("payload", SEND, AB, 5, 10), ("payload", SEND, AB, 40, 10),
        ("payload", SEND, AB, -1, 7), ("payload", SEND, AB, 2**62, 3),
    )  # fmt: skip
    receiver = rank(("payload", RECV, AB, 0, 45), ("payload", RECV, AB, 0, 45))
    found = match_messages([sender, receiver])
    assert rows(found) == [(0, 0, 1, 0, 0, 10), (0, 1, 1, 0, 10, 5), (0, 2, 1, 0, 40, 5)]
    assert (found.repeated_bytes, found.unplaced_bytes) == (5 + 45, 7 + 3)


def test_nothing_to_match() -> None:
    assert len(match_messages([])) == 0
    found = match_messages([rank(), rank()])
    assert (len(found), found.matched_share(), found.one_ended) == (0, 1, 0)


spans = st.lists(st.tuples(st.sampled_from("xy"), st.integers(-1, 12), st.integers(-1, 6)), max_size=6)


@settings(deadline=None)
@given(spans, spans)
def test_every_byte_is_matched_once_where_both_ends_have_it(sent: Spans, read: Spans) -> None:
    traces = [rank(*(("payload", kind, *span) for span in ends)) for kind, ends in ((SEND, sent), (RECV, read))]
    found = match_messages(traces)

    def owners(trace: RankTrace) -> dict[tuple[str, int], int]:
        """Byte -> the row that has it: of several the one that begins first, then the first."""
        out: dict[tuple[str, int], int] = {}
        for row in sorted(range(len(trace)), key=lambda r: (trace.offset[r], r)):
            if trace.offset[row] >= 0:
                for byte in range(trace.offset[row], trace.offset[row] + max(0, trace.nbytes[row])):
                    out.setdefault((trace.resources[trace.resource[row]], byte), row)
        return out

    senders, receivers = owners(traces[0]), owners(traces[1])
    expected = {(key[0], key[1], senders[key], receivers[key]) for key in senders.keys() & receivers.keys()}
    got = [
        (traces[0].resources[traces[0].resource[s]], byte, s, r)
        for _, s, _, r, offset, nbytes in rows(found)
        for byte in range(offset, offset + nbytes)
    ]
    assert len(got) == len(set(got)) and set(got) == expected
    assert (found.nbytes > 0).all()


def test_many_rows() -> None:
    """300,000 calls on 30 streams, reads of another size than writes."""
    builder, other = TraceBuilder(Meta()), TraceBuilder(Meta())
    for stream in range(30):
        name = f"wire/10.0.0.1:{stream}>10.0.0.2:9"
        for k in range(6_000):
            builder.add("payload", SEND, name, k, k + 1, offset=200 * k, nbytes=200)
        for k in range(4_000):
            other.add("payload", RECV, name, k, k + 1, offset=300 * k, nbytes=300)
    found = match_messages([builder.freeze([]), other.freeze([])])
    # cuts every 200 and every 300 bytes: 4 pieces in 600
    assert len(found) == 30 * 1_200_000 // 600 * 4
    assert found.matched_share() == 1 and int(found.nbytes.sum()) == 30 * 1_200_000
    assert np.unique(found.nbytes).tolist() == [100, 200]
