"""Kineto files small enough to know every answer, and files nobody can use."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def event(name: str, start_us: float, end_us: float, category: str = "cpu_op", **more: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": start_us,
        "dur": end_us - start_us,
        **more,
    }


def step_of_100_us(path: Path, second_us: int = 50, rank: int = 0) -> Path:
    """One step: first 40 µs, 10 µs of nothing, second (50 µs unless told), both on one host thread."""
    begin = 1_000
    end = begin + 50 + second_us
    events = [
        event("ProfilerStep#3", begin, end, "user_annotation"),
        event("aten::first", begin, begin + 40),
        event("aten::second", begin + 50, end),
    ]
    document = {"distributedInfo": {"rank": rank, "world_size": 1}, "traceEvents": events}
    text = json.dumps(document)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


JPEG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffdb004300") + bytes(range(256)) * 4

#: name -> content; none of them holds an event
USELESS: dict[str, bytes] = {
    "empty.json": b"",
    "bracket.json": b"[",
    "brackets.json": b"[]",
    "wrong.json": b'{"a": 1}',
    "number.json": b"42",
    "words.json": b"this is not a trace",
    "no_events.json": b'{"traceEvents": []}',
    "strange_events.json": b'{"traceEvents": [1, null, "x", {"ph": 7}]}',
    "photo.jpg": JPEG,
    "photo.json": JPEG,
    "photo.json.gz": JPEG,
    "empty.json.gz": gzip.compress(b""),
    "cut_at_once.json.gz": gzip.compress(b'{"traceEvents": []}')[:12],
    "not.npz": b"PK\x03\x04 not a zip",
}
