"""Finding traces at a path, and the run folder."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dpro.errors import TraceError
from dpro.trace import kineto, store
from dpro.trace.model import RankTrace
from dpro.trace.store import RunFolder, load
from tests.trace import synthetic as syn

JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01" + bytes(range(256)) * 8
STEP = syn.dumps(syn.document(syn.gpu_step(), distributedInfo={"rank": 0, "world_size": 2})).encode()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.json", b"", "empty file"),
        ("t.json", b"[", "no events in it (file ends early, at byte 1: read up to there)"),
        ("t.json", b"[\n", "no events in it (file ends early, at byte 2: read up to there)"),
        ("t.json", b'{"a": 1}', "no traceEvents in it"),
        ("t.json", b'{"traceEvents": []}', "no events in it"),
        ("t.json", b'{"traceEvents": {"a": 1}}', "no traceEvents in it"),
        ("t.json", b'"text"', "not a JSON trace"),
        ("t.json", b"[1, 2, 3]", "no events in it"),
        ("t.json", JPEG, "not a JSON trace"),
        ("t.json.gz", JPEG, "not a JSON trace"),
        ("t.json.gz", gzip.compress(JPEG), "not a JSON trace"),
        ("t.json.gz", b"\x1f\x8b", "empty file"),
        ("t.json", STEP[:40], "not a JSON trace (broken before any event, byte 40)"),
        ("t.npz", b"PK\x03\x04 and then nothing", "not a dpro trace (BadZipFile)"),
    ],
)
def test_one_unusable_file_is_one_line(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {reason}"


def stored(path: Path, side: dict[str, object] | None = None, **arrays: object) -> Path:
    """A trace as ``save`` writes it, with some of its parts replaced."""
    kineto.read(syn.write(path.with_name("r0.json"), syn.ddp_cpu_step(0))).save(path)
    with np.load(path) as whole:
        parts = dict(whole)
    facts = json.loads(parts["side"].tobytes())
    for key, value in (side or {}).items():
        facts[key] = {**facts[key], **value} if isinstance(value, dict) and key == "meta" else value
    parts["side"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    for key, change in arrays.items():
        parts[key] = change(parts[key]) if callable(change) else change
    with path.open("wb") as file:
        np.savez_compressed(file, **parts)
    return path


def test_a_stored_trace_is_read_back(tmp_path: Path) -> None:
    assert len(RankTrace.load(stored(tmp_path / "t.npz"))) > 5
    unsigned = RankTrace.load(stored(tmp_path / "t.npz", start=lambda c: c.astype("u8")))
    assert unsigned.start.dtype == np.int64
    backward = RankTrace.load(stored(tmp_path / "t.npz", end=lambda c: c - 10**12))
    assert (backward.end == backward.start).all()
    assert backward.warnings[-1] == f"{len(backward)} event(s) that end before they start taken as 0 long"


@pytest.mark.parametrize(
    ("arrays", "side", "reason"),
    [
        *(({key: lambda c: c.astype("i8") * 0 - 5}, {}, f"'{key}' has a value out of range")
          for key in ("name", "kind", "resource", "step", "nbytes", "peer", "offset", "tensor", "link")),
        *(({key: lambda c: c.astype("i8") * 0 + 10**9}, {}, f"'{key}' has a value out of range")
          for key in ("name", "kind", "resource", "step", "peer", "tensor")),
        ({"end": lambda c: np.full_like(c, 2**63 - 1)}, {}, "'end' has a value out of range"),
        ({"start": lambda c: c[:5]}, {}, "'name' has shape"),
        ({"start": lambda c: np.stack([c, c])}, {}, "'start' has 2 dimensions"),
        ({"start": lambda c: c * 1.5}, {}, "'start' is of float64, not of whole numbers"),
        ({"start": lambda c: c.astype("U3")}, {}, "'start' is of <U3"),
        ({"start": np.array(5)}, {}, "'start' has 0 dimensions"),
        ({"start": np.array([{"a": 1}], dtype=object)}, {}, ""),
        ({"step_bounds": np.array([1, 2])}, {}, "step bounds of int64 and shape (2,)"),
        ({"step_bounds": lambda b: b[:, ::-1]}, {}, "steps overlap"),
        ({"step_bounds": np.array([[-(2**62), 2**62]])}, {}, "step bounds out of range"),
        ({}, {"names": []}, "'name' has a value out of range"),
        ({}, {"resources": [1] * 99}, "resources: wrong type"),
        ({}, {"warnings": "abc"}, "warnings: wrong type"),
        ({}, {"collectives": {"999999": {"name": "x"}}}, "a collective's row"),
        ({}, {"tensors": [{"name": "w", "shape": [1], "dtype": "f", "nbytes": -5}]}, "a tensor's bytes"),
        ({}, {"meta": {"rank": 10**12}}, "the rank or the world size"),
        ({}, {"meta": {"unprofiled_step_ns": [None]}}, "the un-profiled steps"),
        ({}, {"meta": {"contention": {"wall_ns": "x"}}}, "the CPU times"),
        ({}, {"meta": {"event_overhead_ns": float("nan")}}, "the cost of recording an event"),
    ],
)  # fmt: skip
def test_a_stored_trace_that_contradicts_itself(
    tmp_path: Path, arrays: dict[str, object], side: dict[str, object], reason: str
) -> None:
    path = stored(tmp_path / "t.npz", side, **arrays)
    with pytest.raises(TraceError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: not a dpro trace (") and reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "claimed", "kept_mib", "reason"),
    [
        ("start", 1 << 43, 0, "start.npy claims more than is stored of it"),
        ("start", 1 << 30, 2049, "2049 MiB of arrays, more than 2048"),
        ("side", 300 << 20, 300, "300 MiB of names, more than 256"),
    ],
)
def test_an_archive_that_would_fill_the_memory_is_not_read(
    tmp_path: Path, name: str, claimed: int, kept_mib: int, reason: str
) -> None:
    path, header = tmp_path / "bomb.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (claimed,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.npy", header.getvalue())
    if kept_mib:  # only the directory of the archive says so: it is never read as far as that
        content = bytearray(path.read_bytes())
        at = content.rindex(b"PK\x01\x02") + 24
        content[at : at + 4] = (kept_mib << 20).to_bytes(4, "little")
        path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: not a dpro trace ({reason})"


def test_missing_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file or directory"):
        load(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("no trace")
    with pytest.raises(TraceError, match=r"no trace files in it \(\*.json, \*.json.gz, \*.npz, \*.xplane.pb\)"):
        load(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = syn.write(tmp_path / "rank0.json", syn.gpu_step())
    path.chmod(0)
    with pytest.raises(TraceError, match="cannot be read"):
        load(path)


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_cut_in_the_middle_is_read_as_far_as_it_goes(tmp_path: Path, compress: bool) -> None:
    # half of the records survive; the cut is inside the last of them
    content = gzip.compress(STEP)[:-120] if compress else STEP[: STEP.index(b"aten::b") + 20]
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    [trace] = load(path)
    assert "aten::a" in trace.names
    assert any(line.startswith("file ends early, at byte ") for line in trace.warnings)


def test_ranks_are_sorted_and_other_files_counted(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        syn.write(tmp_path / f"trace_{rank}.json.gz", syn.gpu_step(), distributedInfo={"rank": rank, "world_size": 16})
    (tmp_path / "et_rank0.json.gz").write_bytes(gzip.compress(b'{"schema": "1.0.2", "nodes": []}'))
    (tmp_path / "readme\N{SUPERSCRIPT TWO}.txt").write_text("x")
    (tmp_path / "photo.json").write_bytes(JPEG)
    traces = load(tmp_path)
    assert [t.meta.rank for t in traces] == [0, 2, 10]
    assert traces[0].warnings[:4] == [
        "1 Chakra execution trace(s) beside the Kineto traces skipped",
        "1 file(s) that are no traces skipped",
        "skipped photo.json: not a JSON trace",
        "3 of 16 ranks are here",
    ]


def test_ranks_by_order_where_nothing_tells_them(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", "c.json"):
        syn.write(tmp_path / name, syn.gpu_step())
    traces = load(tmp_path)
    assert [(t.meta.rank, Path(t.meta.source).name) for t in traces] == [(0, "a.json"), (1, "b.json"), (2, "c.json")]
    assert all(any("taken as" in line and "by order" in line for line in t.warnings) for t in traces)


def test_a_rank_that_comes_twice_is_reported(tmp_path: Path) -> None:
    for name in ("x.json", "y.json"):
        syn.write(tmp_path / name, syn.gpu_step(), distributedInfo={"rank": 0})
    traces = load(tmp_path)
    assert [t.meta.rank for t in traces] == [0, 1]
    assert traces[0].warnings[0] == "rank 0 twice: y.json is numbered anew, x.json keeps it"


def test_only_broken_files(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_bytes(JPEG)
    with pytest.raises(TraceError, match=r"none of 2 files is a usable trace, first: .*a\.json: not a JSON trace"):
        load(tmp_path)


def test_run_folder_round_trip(tmp_path: Path) -> None:
    run = RunFolder.new(tmp_path / "dpro_runs")
    assert not run.path.exists()  # made on first write
    for rank in (1, 0):
        info = {"rank": rank, "world_size": 2}
        trace = kineto.read(syn.write(tmp_path / f"r{rank}.json", syn.ddp_cpu_step(rank), distributedInfo=info))
        run.save_trace(rank, trace)
    run.save_meta({"version": 1})
    assert json.loads(run.meta_file.read_text()) == {"version": 1}
    run.plan_file.write_text("{}")
    traces = load(run.path)
    assert [t.meta.rank for t in traces] == [0, 1]
    original = kineto.read(tmp_path / "r1.json")
    for key, column in original.columns.items():
        assert (traces[1].columns[key] == column).all(), key
    assert traces[1].collectives == original.collectives
    assert RunFolder.new(tmp_path / "dpro_runs").path != run.path


def test_run_folder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    run.save_trace(0, b"x" * 600)
    monkeypatch.setattr(store, "SIZE_CAP_BYTES", 1000)
    with pytest.raises(TraceError, match="would grow past"):
        run.save_trace(1, b"x" * 600)
    assert not run.trace_file(1).exists()
    assert run.size_bytes() == 600


def test_a_run_folder_without_traces_says_so(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.save_meta({"verdict": "KEPT"})
    for file in (run.outcome_file, run.plan_file, run.timeline_file, tmp_path / "demo.json"):
        file.write_text("{}")
    run.page_file.write_text("<!doctype html>")
    with pytest.raises(TraceError, match="no traces in it: the job of this run folder was not captured"):
        load(tmp_path)
    run.outcome_file.unlink()  # somebody's folder
    with pytest.raises(TraceError, match="no trace files in it"):
        load(tmp_path)
