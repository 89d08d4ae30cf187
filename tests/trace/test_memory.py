"""Allocations into segments: every byte by hand, and what a stored profile may not be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dpro.trace import kineto
from dpro.trace.memory import (
    AFTER,
    BACKWARD,
    BEFORE,
    FORWARD,
    Held,
    Mark,
    MemoryProfile,
    block_name,
    dump,
    load,
    load_micro,
    marks_of,
    profile,
)
from tests.trace.synthetic import document, mark, op

#: One unit: forward at 10, over at 20, backward at 30, which is over at 40; the step is 0 to 50.
MARKS = [Mark(10, f"{FORWARD}0"), Mark(20, f"{AFTER}0", (0xB,)), Mark(30, f"{BACKWARD}0"), Mark(40, "end")]
EVENTS = [
    (-5, 0xF, 7),  # of before the step, freed in its first segment
    (5, 0xF, -7),
    (11, 0xA, 100),  # saved for the backward pass
    (12, 0xC, 40),  # lives in the forward pass only
    (13, 0xB, 30),  # the output; 170 at once
    (14, 0xC, -40),
    (31, 0xD, 60),  # a gradient, which stays
    (32, 0xE, 20),  # 80 more than at 30
    (33, 0xE, -20),
    (34, 0xB, -30),
    (35, 0xA, -100),
    (60, 0xD, -60),  # in the next step
]


def measured() -> MemoryProfile:
    return profile(EVENTS, MARKS, (0, 50), 1000, [("net.0", False, "")])


def test_segments() -> None:
    found = measured()
    assert found.rise == (0, 170, 0, 80, 0)
    assert found.kept == (0, 0, 0, 60, 0)
    assert sorted(found.held, key=lambda h: (h.made, h.nbytes)) == [
        Held(BEFORE, 0, 7), Held(1, 3, 30, output=0), Held(1, 3, 100), Held(3, 5, 60)
    ]  # fmt: skip
    [unit] = found.units
    assert (unit.forward, unit.after, unit.backward, unit.refused) == (1, 2, 3, "")


def test_marks_say_what_may_not_run_twice() -> None:
    units = [("a", False, ""), ("b", True, ""), ("c", True, "it is compiled")]
    marks = [Mark(1, f"{FORWARD}0"), Mark(2, f"{AFTER}0"), Mark(3, f"{FORWARD}1"), Mark(4, f"{AFTER}1")]
    marks += [Mark(5, f"{FORWARD}1"), Mark(6, f"{AFTER}1"), Mark(7, f"{BACKWARD}1")]
    found = profile([], marks, (0, 9), 0, units).units
    assert [unit.refused for unit in found] == [
        "it has no backward pass",
        "it is not called once a step",
        "it is compiled",
    ]


def test_blocks_by_name() -> None:
    names = [("net.0", False, ""), ("net.1", True, ""), ("net.2", True, ""), ("head", False, ""), ("x", False, "no")]
    marks = [Mark(10 * n + k, f"{kind}{n}") for n in range(5) for k, kind in enumerate((FORWARD, AFTER, BACKWARD))]
    found = profile([], marks, (0, 99), 0, names)
    block = found.block(block_name(found.units, 0, 2))
    assert block is not None and block.name == "net.0..2" and (block.first, block.last) == (0, 2)
    assert (block.forward, block.after, block.first_backward, block.backward) == (1, 8, 3, 9)
    assert found.block("head") is not None
    # units that do not follow each other, that may not run twice, in the wrong order, or that there are not
    for wrong in ("net.2..head", "x", "net.2..0", "net.0..9", "net", ""):
        assert found.block(wrong) is None


def test_round_trip() -> None:
    assert load(json.loads(json.dumps(dump(measured())))) == measured()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base_bytes", -1), ("base_bytes", "1"), ("base_bytes", True), ("rise", []), ("rise", [1]), ("rise", None),
        ("kept", [0, 0, 0, 0, 1.5]), ("held", [[1, 2, 3]]), ("held", [[2, 1, 3, -1]]), ("held", [[1, 6, 3, -1]]),
        ("held", [[1, 2, 3, 1]]), ("held", "1"), ("units", [{"name": "a"}]), ("units", [1]), ("units", None),
    ],
)  # fmt: skip
def test_what_is_no_profile(key: str, value: Any) -> None:
    told = copy.deepcopy(dump(measured()))
    told[key] = value
    assert load(told) is None
    assert load([told]) is None


def test_micro_times() -> None:
    assert load_micro({"1": 100, "2": 60}) == {1: 100, 2: 60}
    assert load_micro({"1": 100, "x": 60}) == {1: 100}
    assert load_micro({"1": "100"}) == load_micro({"1": 0}) == load_micro(None) == {}


def test_from_a_profiler_s_file(tmp_path: Path) -> None:
    """Allocations and marks come out on the same clock, whatever the file's is."""
    events = [
        mark("ProfilerStep#0", 0, 100),
        mark(f"{FORWARD}0", 10, 11),
        mark(f"{AFTER}0", 20, 21),
        op("autograd::engine::evaluate_function: AddBackward0", 29, 40),
        mark(f"{BACKWARD}0", 30, 31),
    ]
    written = document(events, "base")
    begin_us = written["baseTimeNanoseconds"] // 1000
    [step] = [e for e in written["traceEvents"] if e["name"] == "ProfilerStep#0"]
    for at, nbytes in ((12.5, 64), (32.0, -64)):
        args = {"Device Type": 0, "Addr": 4096, "Bytes": nbytes}
        written["traceEvents"].append({"ph": "i", "name": "[memory]", "ts": f"@{step['ts'] + at:.3f}@", "args": args})
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(written).replace('"@', "").replace('@"', ""))
    allocations: list[kineto.Allocation] = []
    trace = kineto.read(path, allocations)
    begin, end = trace.step_bounds[0].tolist()
    assert [(at - begin, *rest) for at, *rest in allocations] == [(12_500, 0, 4096, 64), (32_000, 0, 4096, -64)]
    marks = marks_of(trace, begin, end)
    assert [at - begin for at, _ in marks] == [10_000, 20_000, 30_000, 40_000]
    assert [label for _, label in marks][:3] == [f"{FORWARD}0", f"{AFTER}0", f"{BACKWARD}0"]
    assert begin_us  # the file has a clock of its own
    assert kineto.read(path).names == trace.names
