"""A real two-process Keras job is captured: its ops, what waits for what, when gradients were handed in and used."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dpro.trace.horovod import SUBMIT, WAIT, spans
from dpro.trace.model import EventKind, RankTrace
from tests.frameworks.horovod_torch.conftest import HorovodRanks

#: Clocks of two threads' events, read one after the other.
TOLERANCE_NS = 2_000
#: A node that takes whichever of its inputs comes.
MERGE = re.compile(r"/(output|branch_executed)/_\d+$")
TARGET = "tests.frameworks.horovod_keras.capture_jobs:captured"


def ops_of(trace: RankTrace, step: int) -> dict[str, list[tuple[int, int]]]:
    """Node -> start and end of each of its ops in ``step``; micro-batches have one each."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in np.flatnonzero((trace.kind == EventKind.CPU_OP) & (trace.step == step)):
        found.setdefault(trace.names[trace.name[row]], []).append((int(trace.start[row]), int(trace.end[row])))
    return found


@pytest.mark.parametrize("how", ["fit", "loop", "accumulated"])
def test_captured(ranks: HorovodRanks, tmp_path: Path, how: str) -> None:
    done = ranks.run(TARGET, tmp_path / "log", into=str(tmp_path), how=how).ok()
    assert [value["steps"] for value in done.values] == [14, 14]
    traces = [RankTrace.load(file) for file in sorted(tmp_path.glob("rank*.npz"))]
    for trace, value in zip(traces, done.values, strict=True):
        assert [tensor.name for tensor in trace.tensors] == value["variables"]
        assert sorted(tensor.ready for tensor in trace.tensors) == list(range(len(trace.tensors)))
        submitted, waited = spans(trace, SUBMIT), spans(trace, WAIT)
        for number in range(len(trace.tensors)):
            assert len(submitted[number][0]) == len(waited[number][0]) == 3
            # used only after it was handed in, and within the step
            assert (waited[number][0] == submitted[number][1]).all()
            assert (waited[number][1] <= trace.step_bounds[:, 1]).all()
        _check_graph(trace)
        assert 0 <= trace.meta.event_overhead_ns < 100_000
        # Horovod's threads were told from those that compute
        assert trace.meta.contention["others_cpu_ns"] > 0 < trace.meta.contention["main_cpu_ns"]
        assert 0 < trace.meta.contention["idle_share"] < 0.5
        assert not [line for line in trace.warnings if "wire" not in line], trace.warnings
        assert ((trace.kind == EventKind.SEND) & (trace.step >= 0)).any()


def _check_graph(trace: RankTrace) -> None:
    """Ops are nodes of the graph, and none began before what it depends on had ended."""
    dataflow = trace.meta.extra["dataflow"]
    for step in range(trace.steps):
        ops = ops_of(trace, step)
        known = [name for name in ops if name in dataflow]
        assert len(known) > 0.5 * len(ops)
        early = [
            (name, before)
            for name in known
            for before in dataflow[name]
            if before in ops and ops[name][0][0] < ops[before][0][1] - TOLERANCE_NS and not MERGE.search(name)
        ]
        assert not early, early[:5]
