"""A strict reader of Chrome trace JSON: fails on whatever Perfetto drops, misplaces or refuses."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """Parse the file and hold it to the format; returns its events."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(raw.decode("utf-8"), parse_constant=_refuse)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    named_processes: dict[int, str] = {}
    named_threads: dict[tuple[int, int], str] = {}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[tuple[str, str, int], dict[str, Event]] = defaultdict(dict)
    last = -math.inf
    for event in events:
        assert event["ph"] in ("X", "M", "s", "f"), event
        assert type(event["pid"]) is int and event["pid"] > 0 and type(event["tid"]) is int, event
        assert isinstance(event["name"], str) and event["name"], event
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in named_processes
                named_processes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                assert track not in named_threads
                named_threads[track] = event["args"]["name"]
            continue
        assert math.isfinite(event["ts"]) and event["ts"] >= last, f"out of order: {event}"
        last = event["ts"]
        if event["ph"] == "X":
            assert math.isfinite(event["dur"]) and event["dur"] >= 0, event
            begin, length = _ns(event["ts"]), _ns(event["dur"])
            slices[track].append((begin, begin + length))
        else:
            key = (event["cat"], event["name"], event["id"])
            assert event["ph"] not in flows[key], f"flow {key} twice"
            assert event["ph"] == "s" or "s" in flows[key], f"flow {key} ends before it starts, if only in the file"
            flows[key][event["ph"]] = event
    assert set(named_threads) == set(slices), "a track without a name, or a name without a track"
    assert set(named_processes) >= {pid for pid, _ in slices}
    assert len(set(named_processes.values())) == len(named_processes)
    for track, bars in slices.items():
        _assert_nested(bars, named_threads[track])
    for key, ends in flows.items():
        assert set(ends) == {"s", "f"}, f"flow {key} has one end only"
        assert ends["s"]["ts"] <= ends["f"]["ts"], f"flow {key} runs back in time"
        for end in ends.values():
            at = _ns(end["ts"])
            bars = slices[(end["pid"], end["tid"])]
            assert any(begin <= at <= finish for begin, finish in bars), f"flow {key} binds to no slice"
    return events


def _assert_nested(bars: list[tuple[int, int]], name: str) -> None:
    open_ends: list[int] = []
    for begin, end in bars:  # file order is the order a viewer pushes them in
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{name}: {begin}..{end} leaves its parent at {open_ends[-1]}"
        open_ends.append(end)


def _ns(us: float) -> int:
    ns = round(us * 1000)
    assert abs(us * 1000 - ns) < 1e-3 * max(1, abs(ns) * 1e-6), f"{us} µs is not a whole number of ns"
    return ns


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
