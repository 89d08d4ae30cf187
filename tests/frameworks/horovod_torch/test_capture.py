"""A real two-process Horovod job is captured: what went together is known on every rank, and replays as it ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.graph.assemble import assemble, assemble_steps
from dpro.graph.horovod import with_responses
from dpro.trace import horovod_wire
from dpro.trace.horovod import GROUP
from dpro.trace.model import RankTrace
from dpro.trace.store import load
from tests.frameworks.horovod_torch.conftest import HorovodRanks
from tests.replays import typical_error

TARGET = "tests.frameworks.horovod_torch.capture_jobs:captured"


def contents(trace: RankTrace) -> list[list[set[str]]]:
    """Names in every response, by step."""
    out: list[list[set[str]]] = [[] for _ in range(trace.steps)]
    for row, facts in sorted(trace.collectives.items()):
        assert facts.group == GROUP
        out[trace.step[row]].append({trace.tensors[t].name for t in facts.tensors})
    return out


@pytest.mark.parametrize(("timeline", "grouped"), [(True, False), (False, False), (False, True)])
def test_captured(ranks: HorovodRanks, tmp_path: Path, timeline: bool, grouped: bool) -> None:
    env = {"HOROVOD_TIMELINE": "DYNAMIC"} if timeline else {}
    done = ranks.run(TARGET, tmp_path / "log", env=env, into=str(tmp_path), grouped=grouped).ok()
    assert [value["clean"] for value in done.values] == [True, True]
    raw = [RankTrace.load(file) for file in sorted(tmp_path.glob("rank*.npz"))]
    assert [bool(trace.collectives) for trace in raw] == [timeline, False]
    told = with_responses(raw)
    names = {tensor.name for tensor in told[0].tensors}
    assert len(names) == 16
    first, second = map(contents, told)
    assert first == second
    for step in first:
        assert sorted(name for response in step for name in response) == sorted(names)
    if timeline:  # the bytes on the wire tell the same
        alone = RankTrace.load(tmp_path / "rank0.npz")
        alone.collectives = {}
        assert contents(horovod_wire.with_responses(alone, 2)) == first
    for trace in told:  # a replay is less what recording cost, and the captured step it is held against is not
        trace.meta.event_overhead_ns = 0.0
    # steps of 30 ms on shared cores: where a response ends is read off the wire, up to a wake-up late
    assert typical_error(assemble_steps(told)) < 0.15
    graph = assemble(load(tmp_path))  # untold traces: the graph finds out by itself
    assert sorted(t for bucket in graph.buckets for t in bucket.tensors) == list(range(16))
    assert not [line for line in graph.warnings if "cycle" in line or "could not be told" in line]
