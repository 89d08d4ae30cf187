"""Profiles of TensorFlow and MXNet: written by hand, byte by byte, and by the frameworks themselves.

The frameworks are those of ``.venv-backends``; a test that needs one where it is not is skipped, with the reason.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-backends" / "bin" / "python"

# -- TensorFlow: XSpace, by hand -------------------------------------------------------------------


def varint(number: int) -> bytes:
    """A number as protobuf writes it; a negative one in 10 bytes."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def pb(number: int, value: int | str | bytes) -> bytes:
    """One field of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


@dataclass
class Plane:
    """An XPlane: events (name, start ns, end ns, stats) by thread, and names behind them, as written."""

    name: str = "/host:CPU"
    threads: dict[str, list[tuple[str, int, int, dict[str, int | str]]]] = field(default_factory=dict)
    base_ns: int = 0
    stats: dict[str, int | str] = field(default_factory=dict)

    def add(self, thread: str, name: str, start: int, end: int, **stats: int | str) -> Plane:
        self.threads.setdefault(thread, []).append((name, start, end, stats))
        return self

    def encode(self) -> bytes:
        kinds: dict[str, int] = {}
        stat_kinds: dict[str, int] = {}

        def told(stats: dict[str, int | str], number: int) -> bytes:
            kinds = [(stat_kinds.setdefault(key, len(stat_kinds) + 1), value) for key, value in stats.items()]
            every = [pb(1, kind) + pb(5 if isinstance(value, str) else 4, value) for kind, value in kinds]
            return b"".join(pb(number, stat) for stat in every)

        lines = b""
        for number, (thread, events) in enumerate(self.threads.items(), 1):
            line = pb(1, number) + pb(2, thread) + pb(3, self.base_ns)
            for name, start, end, stats in events:
                kind = kinds.setdefault(name, len(kinds) + 1)
                times = pb(2, (start - self.base_ns) * 1000) + pb(3, (end - start) * 1000)
                line += pb(4, pb(1, kind) + times + told(stats, 4))
            lines += pb(3, line)
        own = told(self.stats, 6)
        names = b"".join(pb(4, pb(1, k) + pb(2, pb(1, k) + pb(2, name))) for name, k in kinds.items())
        names += b"".join(pb(5, pb(1, k) + pb(2, pb(1, k) + pb(2, name))) for name, k in stat_kinds.items())
        return pb(2, self.name) + lines + names + own


def space(*planes: Plane) -> bytes:
    return b"".join(pb(1, plane.encode()) for plane in planes)


def executor_step(begin_us: int = 1_000, name: str = "train", step: int = 0) -> Plane:
    """One step of 100 µs as TensorFlow shows it: a op of 40, nothing for 10, an op of 50, in what wraps them."""
    begin = begin_us * 1000
    plane = Plane(base_ns=500)
    plane.add("python", name, begin, begin + 100_000, step_num=step)
    plane.add("python", "EagerExecute", begin + 1_000, begin + 99_000)
    compute = "tf_Compute/7"
    plane.add(compute, "ExecutorState::Process", begin, begin + 100_000, iter_num=0)
    plane.add(compute, "dense/MatMul:MatMul", begin, begin + 40_000)
    plane.add(compute, "ExecutorPropagateOutputs", begin + 40_000, begin + 41_000)
    plane.add(compute, "dense/BiasAdd:BiasAdd", begin + 50_000, begin + 100_000)
    return plane


# -- MXNet: Chrome events, by hand -----------------------------------------------------------------

MXNET_HEAD = [
    {"ph": "M", "args": {"name": name}, "pid": pid, "name": "process_name"}
    for pid, name in enumerate(["cpu/0", "cpu/1", "cpu pinned/", "cpu shared/"])
]
ENGINE = 6532965951047815250  # a hash of a thread, as long as they are


def mx_op(name: str, start_us: int, end_us: int, tid: int = ENGINE) -> list[dict[str, Any]]:
    """An op as MXNet writes it: B and E on its device, b and e in the domain of operators."""
    common = {"name": name, "cat": "operator", "tid": tid}
    domain = {**common, "id": tid, "pid": 3060606181218273969}
    return [
        {**common, "ph": "B", "ts": start_us, "pid": 0},
        {**common, "ph": "E", "ts": end_us, "pid": 0},
        {**domain, "ph": "b", "ts": start_us},
        {**domain, "ph": "e", "ts": end_us},
    ]


def mx_profile(path: Path, events: list[dict[str, Any]], close: str = '],"displayTimeUnit": "ms"}') -> Path:
    path.write_text('{"traceEvents": [' + ",\n".join(map(json.dumps, [*MXNET_HEAD, *events])) + close)
    return path


def mx_step(begin_us: int = 1_000) -> list[dict[str, Any]]:
    """A step of 100 µs: forward 40, nothing for 10, backward 30, update 20."""
    return [
        *mx_op("FullyConnected", begin_us, begin_us + 40),
        *mx_op("_backward_FullyConnected", begin_us + 50, begin_us + 80),
        *mx_op("sgd_update", begin_us + 80, begin_us + 100),
    ]


def mx_symbol(*nodes: tuple[str, str, list[int]]) -> str:
    """A symbol's JSON of (op, name, inputs by number)."""
    listed = [{"op": op, "name": name, "inputs": [[i, 0, 0] for i in inputs]} for op, name, inputs in nodes]
    return json.dumps({"nodes": listed, "arg_nodes": [], "heads": [[len(nodes) - 1, 0, 0]]})


# -- both, by themselves ---------------------------------------------------------------------------


@functools.cache
def real(framework: str, job: str, *arguments: str) -> Path:
    """The folder in which ``tests/trace/<job>`` left its files, run once in a process of ``.venv-backends``."""
    if not PYTHON.exists():
        pytest.skip("no .venv-backends: `make backends` makes it")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "DPRO", "TF_"))}
    environment |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    folder = Path(tempfile.mkdtemp(prefix=f"dpro-{framework}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [PYTHON, ROOT / "tests" / "trace" / job, folder, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    if f"No module named '{framework}'" in done.stderr:
        pytest.skip(f"no {framework} in .venv-backends")
    assert not done.returncode, done.stderr[-3000:]
    return folder


def facts(folder: Path) -> dict[str, Any]:
    """What the job itself noted."""
    noted: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return noted
