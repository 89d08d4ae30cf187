"""``dpro optimize --passes fused_partition``: a what-if that writes no plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.cost.sync import SyncModel
from dpro.trace.store import RunFolder
from tests.cli.test_cli import ask, run
from tests.graph.ps_jobs import layout, model, ps_graph, traces


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Two gradients of 8 MiB in one part each, 8.5 ms a message: cut, their pulls go beside their pushes."""
    where = layout(1)
    costs = model(where, SyncModel(100_000.0, 1.0))
    graph = ps_graph([8 << 20] * 2, 64 << 20, where, costs, fwd_ns=8_000_000, bwd_ns=[1_000_000] * 2)
    (trace,) = traces([graph] * 2)
    folder = RunFolder(tmp_path / "run")
    folder.save_trace(0, trace)
    return folder.path


def test_groups_are_shown_and_no_plan_is(capture: Path) -> None:
    answer = ask("optimize", capture, "--passes", "fused_partition")
    assert answer["plan"] is None
    assert answer["predicted_ms"] < 0.95 * answer["baseline_ms"]
    (candidate,) = answer["candidates"]
    assert candidate["plan"] is None
    assert candidate["predicted_ms"] == answer["predicted_ms"]
    assert sorted(name for group in candidate["groups"] for name in group) == ["p0", "p1"]
    assert "a what-if" in run("optimize", capture, "--passes", "fused_partition")[0]


@pytest.mark.parametrize(
    "more", [["--passes", "fused_partition,in_flight"], ["--passes", "fused_partition", "-o", "x"]]
)
def test_it_goes_alone_and_writes_nothing(capture: Path, more: list[str]) -> None:
    assert "is a what-if" in run("optimize", capture, *more, code=2)[1]
