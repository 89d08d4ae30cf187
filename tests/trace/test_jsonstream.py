"""The lenient JSON reader: cut, broken and odd files, and its memory."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import TraceError
from dpro.trace.jsonstream import TraceFile, text

RECORDS = [{"ph": "X", "name": f"op {i}", "ts": i, "args": {"dims": [[i, 2], []]}} for i in range(40)]
WHOLE = json.dumps({"schemaVersion": 1, "traceEvents": RECORDS, "traceName": "x"}, indent=1).encode()


def read(path: Path, content: bytes) -> tuple[list[dict[str, object]], TraceFile]:
    path.write_bytes(content)
    file = TraceFile(path)
    return list(file.records()), file


def test_header_before_and_after_the_events(tmp_path: Path) -> None:
    records, file = read(tmp_path / "t.json", WHOLE)
    assert records == RECORDS
    assert file.header == {"schemaVersion": 1, "traceName": "x"}
    assert file.losses.warnings() == []


@pytest.mark.parametrize("ending", ["]", "", ",", ",\n", "},\n]"])
def test_bare_lists_closed_or_not(tmp_path: Path, ending: str) -> None:
    body = "[\n" + ",\n".join(json.dumps(r) for r in RECORDS) + ending
    records, _ = read(tmp_path / "t.json", body.encode())
    assert records == RECORDS


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(0, len(WHOLE) - 1), compress=st.booleans())
def test_a_file_cut_anywhere_gives_its_whole_records(tmp_path: Path, cut: int, compress: bool) -> None:
    packed = gzip.compress(WHOLE)
    kept = packed[: cut * len(packed) // len(WHOLE)] if compress else WHOLE[:cut]
    try:
        records, file = read(tmp_path / "cut.json", kept)
    except TraceError as error:
        assert str(error).startswith(str(tmp_path / "cut.json"))
        assert "\n" not in str(error)
        return
    assert records == RECORDS[: len(records)]
    if compress and records == RECORDS:
        return  # only the checksum was cut off
    assert file.losses.truncated_at is not None
    if not compress:
        # 40 records; each that ended before the cut is there
        assert len(records) == WHOLE[:cut].count(b"\n  }")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_a_trace_error(tmp_path: Path, content: bytes) -> None:
    try:
        read(tmp_path / "noise.json", content)
    except TraceError:
        pass


def test_a_corrupt_record_is_skipped_counted_and_located(tmp_path: Path) -> None:
    lines = [json.dumps(r) for r in RECORDS]
    lines[7] = '{"ph": "X", "name": "broken \\q escape", "ts": 7}'
    lines[20] = lines[20][:15]
    body = ("[" + ",\n".join(lines) + "]").encode()
    records, file = read(tmp_path / "t.json", body)
    assert [r["ts"] for r in records] == [i for i in range(40) if i not in (7, 20)]
    assert file.losses.corrupt_records == 2
    assert file.losses.corrupt_offsets == [
        body.index(b'{"ph": "X", "name": "broken'),
        body.index(lines[20].encode() + b",\n"),
    ]
    assert file.losses.truncated_at is None


def test_control_characters_in_strings_are_read(tmp_path: Path) -> None:
    records, file = read(tmp_path / "t.json", b'[{"ph": "X", "name": "a\x01\nb\x00"}]')
    assert records == [{"ph": "X", "name": "a\x01\nb\x00"}]
    assert file.losses.corrupt_records == 0


def test_records_longer_than_the_look_ahead(tmp_path: Path) -> None:
    long = {"ph": "X", "name": "n" * 300_000, "args": {"deep": [[1] * 100_000]}}
    records, file = read(tmp_path / "t.json", json.dumps([RECORDS[0], long, RECORDS[1]]).encode())
    assert records == [RECORDS[0], long, RECORDS[1]]
    assert not file.losses.warnings()


def test_utf8_names(tmp_path: Path) -> None:
    written = [{"ph": "X", "name": "größe→"}]
    for ascii_only in (True, False):
        records, _ = read(tmp_path / "t.json", json.dumps(written, ensure_ascii=ascii_only).encode())
        assert text(str(records[0]["name"])) == "größe→"


def test_several_gzip_members(tmp_path: Path) -> None:
    half = len(WHOLE) // 2
    records, _ = read(tmp_path / "t.json.gz", gzip.compress(WHOLE[:half]) + gzip.compress(WHOLE[half:]))
    assert records == RECORDS


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    record = json.dumps({"ph": "X", "name": "aten::mm", "ts": 1.5, "args": {"pad": "x" * 400}})
    path = tmp_path / "big.json"
    with path.open("w") as out:
        out.write("[" + record)
        for _ in range(40_000):
            out.write(",\n" + record)
    size = path.stat().st_size
    assert size > 16e6
    tracemalloc.start()
    count = sum(1 for _ in TraceFile(path).records())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 40_001
    assert peak < size / 2  # a few chunks of 1 MiB, as bytes and as text


@pytest.mark.parametrize("unit", [b'{"ph":"X" ', b'{"ph":[', b'{"ph":', b'{"ts":[1,{"ph":"X"},', b'{"name":"'])
def test_a_file_broken_throughout_takes_time_by_its_size(tmp_path: Path, unit: bytes) -> None:
    """Each of the pieces opens a record that fails only after what follows is parsed: 2 MB in seconds, not hours."""
    began = time.process_time()
    _, file = read(tmp_path / "t.json", b'{"traceEvents":[' + unit * (2_000_000 // len(unit)))
    assert time.process_time() - began < 8
    assert file.losses.corrupt_records or file.losses.truncated_at is not None
    assert file.losses.warnings()


def test_many_corrupt_records_do_not_end_the_reading(tmp_path: Path) -> None:
    good = json.dumps({"ph": "X", "name": "aten::mm", "ts": 1, "args": {"pad": "x" * 20_000}})
    bad = '{"ph": "X", "name": "C:\\Users", "args": {"pad": "yes"}}'
    records, file = read(tmp_path / "t.json", ("[" + ",\n".join([bad, bad, bad, good] * 300) + "]").encode())
    assert len(records) == 300  # each longer than the piece that is tried first
    assert (file.losses.corrupt_records, file.losses.given_up_at, file.losses.truncated_at) == (900, None, None)
