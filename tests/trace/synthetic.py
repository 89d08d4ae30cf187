"""Small Kineto files written by hand: every time in them is chosen, so every answer can be worked out.

Times are µs from the start of the trace; the file's epoch is added when it is written.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

#: µs since 1970, as Kineto stamps: a float of this size has no nanoseconds left
EPOCH_US = 1_712_195_495_507_809
MAIN, AUTOGRAD, GLOO_A, GLOO_B = 100, 101, 201, 202
Event = dict[str, Any]


def event(cat: str, name: str, tid: int, start: float, end: float, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": args}


def op(name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> Event:
    return event("cpu_op", name, tid, start, end, **args)


def mark(name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> Event:
    return event("user_annotation", name, tid, start, end, **args)


def call(name: str, start: float, end: float, correlation: int, tid: int = MAIN) -> Event:
    return event("cuda_runtime", name, tid, start, end, correlation=correlation)


def kernel(name: str, start: float, end: float, correlation: int, stream: int = 7, **args: Any) -> Event:
    return event("kernel", name, stream, start, end, correlation=correlation, stream=stream, device=0, **args)


def launched(name: str, at: float, start: float, end: float, correlation: int, **args: Any) -> list[Event]:
    """A kernel and its 10 µs launch call."""
    tid = args.pop("tid", MAIN)
    return [
        call("cudaLaunchKernel", at, at + 10, correlation, tid=tid),
        kernel(name, start, end, correlation, **args),
    ]


def document(events: list[Event], style: str = "float", **header: Any) -> dict[str, Any]:
    """``style``: how times are written, by vintage: ``integer`` µs, ``float`` µs, ``base`` (float µs after
    baseTimeNanoseconds), ``ns`` (float µs with displayTimeUnit ns)."""
    out: dict[str, Any] = {"schemaVersion": 1, **header}
    epoch = EPOCH_US
    if style == "base":
        out["baseTimeNanoseconds"] = (EPOCH_US - 1_000_000) * 1000
        epoch = 1_000_000
    if style == "ns":
        out["displayTimeUnit"] = "ns"
    written = []
    for entry in events:
        ts: Any = (
            epoch + entry["ts"]
            if style == "integer"
            else Literal(f"{epoch + int(entry['ts'])}.{_thousandths(entry['ts'])}")
        )
        dur: Any = entry["dur"] if style == "integer" else Literal(f"{entry['dur']:.3f}")
        written.append({**entry, "ts": ts, "dur": dur})
    out["traceEvents"] = written
    return out


class Literal(float):
    """A number that is written with exactly the digits given (json writes floats by ``__repr__``)."""

    def __new__(cls, digits: str) -> Literal:
        made = super().__new__(cls, digits)
        made.digits = digits  # type: ignore[attr-defined]
        return made

    def __repr__(self) -> str:
        return str(self.digits)  # type: ignore[attr-defined]


def _thousandths(ts: float) -> str:
    return f"{round((ts - int(ts)) * 1000):03d}"


def dumps(doc: Any) -> str:
    """JSON with :class:`Literal` digits kept (the pure-Python encoder calls ``__repr__`` of subclasses)."""
    if isinstance(doc, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {dumps(v)}" for k, v in doc.items()) + "}"
    if isinstance(doc, list):
        return "[" + ",\n ".join(map(dumps, doc)) + "]"
    return repr(doc) if isinstance(doc, Literal) else json.dumps(doc)


def write(path: Path, events: list[Event], style: str = "float", **header: Any) -> Path:
    text = dumps(document(events, style, **header)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def gpu_step() -> list[Event]:
    """One step of 1,000 µs: two kernels in a row, a device synchronise that waits for them, an op after it.

    k1 runs 70-270, k2 270-470; cudaDeviceSynchronize is called at 200, returns at 480.
    """
    return [
        mark("ProfilerStep#0", 0, 1000),
        op("aten::a", 0, 100),
        *launched("k1", 50, 70, 270, 1),
        op("aten::b", 100, 150),
        *launched("k2", 120, 270, 470, 2),
        call("cudaDeviceSynchronize", 200, 480, 3),
        op("aten::c", 500, 600),
    ]


def ddp_cpu_step(rank: int, begin: float = 0, view: bool = False) -> list[Event]:
    """One step of 950 µs of a gloo DDP job: gradients 0, 1 in the first bucket, 2 in the second.

    Rank 1's forward takes 50 µs longer, so it arrives last: its calls return at 380 and 575. Both
    all-reduces end at 600 and 800 on both ranks; rank 0 goes on after 5 and 3 µs, rank 1 after 6 and 4.
    """
    late = 50 * rank
    evaluate = "autograd::engine::evaluate_function: "
    accumulate = evaluate + "torch::autograd::AccumulateGrad"
    use = "aten::as_strided" if view else "torch.distributed.ddp.reducer::copy_bucket_to_grad"
    first, second = 605 + rank, 803 + rank
    events = [
        mark("ProfilerStep#0", 0, 950),
        op("aten::linear", 0, 100 + late),
        op(evaluate + "XBackward", 100 + late, 200 + late),
        op(accumulate, 200 + late, 210 + late),
        op(evaluate + "YBackward", 210 + late, 300 + late),
        op(accumulate, 300 + late, 340 + late),
        op("c10d::allreduce_", 310 + late, 330 + late),
        mark("gloo:all_reduce", 335 + late, 600, tid=GLOO_A),
        op(evaluate + "ZBackward", 340 + late, 500 + late),
        op(accumulate, 500 + late, 530 + late),
        op("c10d::allreduce_", 505 + late, 525 + late),
        mark("gloo:all_reduce", 530 + late, 800, tid=GLOO_B),
        op(use, first, first + 10),
        op(use, first + 10, first + 20),
        op(use, second, second + 10),
        mark("Optimizer.step#SGD.step", 820, 900),
        op("aten::add_", 830, 890),
    ]
    return [{**e, "ts": e["ts"] + begin} for e in events]
