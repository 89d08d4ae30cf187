"""The pass of docs/own-pass.md: as long as the page says, installed as a package, on the graph of a real job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpro.graph.assemble import assemble
from dpro.graph.graph import OpKind
from dpro.passes import registry
from dpro.replay.engine import replay
from dpro.trace.store import load
from tests.frameworks.launch import clean_environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/own-pass.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's package, as pip would leave it."""
    [code], [table] = blocks("python"), blocks("toml")
    site = tmp_path / "site"
    info = site / "fused_optimizer-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "fused_optimizer.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fused_optimizer\nVersion: 1.0\n")
    heading, entry = table.strip().splitlines()
    group = re.fullmatch(r'\[project\.entry-points\."(.+)"\]', heading)
    assert group is not None
    (info / "entry_points.txt").write_text(f"[{group[1]}]\n{entry.replace(chr(34), '')}\n")
    return site


def test_it_is_forty_lines_at_most() -> None:
    assert len(blocks("python")[0].splitlines()) <= 40


def test_found_applied_to_a_real_graph_and_undone(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    job, traces = Path(__file__).parents[1] / "graph/gloo_job.py", tmp_path / "traces"
    traces.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(job)]
    done = subprocess.run([*command, str(traces), "copy"], env=clean_environment(), capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]

    monkeypatch.syspath_prepend(str(package))
    assert "fused_optimizer" in registry.names() and not registry.built_in("fused_optimizer")
    edit = registry.find("fused_optimizer")
    graph = assemble(load(traces))
    update = np.flatnonzero(graph.column("kind") == OpKind.UPDATE)
    gaps, before = graph.column("gap").copy(), replay(graph)
    assert gaps[update].sum() > 0
    assert [*edit.candidates(graph)] == [0.0, 0.5]
    assert edit.cost(graph, 0.0) == -gaps[update].sum() == 2 * edit.cost(graph, 0.5)
    mark = edit.apply(graph, 0.0)
    assert not graph.column("gap")[update].any()
    # the optimizer ends the step on every rank: what is gone of the slower one's gaps is gone of the step
    saved_ns = [gaps[[op for op in update if graph.column("rank")[op] == rank]].sum() for rank in range(2)]
    assert min(saved_ns) <= before.makespan_ns - replay(graph).makespan_ns <= max(saved_ns)
    graph.undo(mark)
    assert np.array_equal(graph.column("gap"), gaps)
    assert replay(graph).makespan_ns == before.makespan_ns

    # and by the command, beside the search
    env = clean_environment(DPRO_DEBUG="")
    env["PYTHONPATH"] = f"{package}:{ROOT / 'core'}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "dpro", "optimize", str(traces), "--passes", "tensor_fusion,fused_optimizer"]
    done = subprocess.run([*command, "--json"], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    names = [row["name"] for row in answer["whatifs"]]
    assert names == ["fused_optimizer 0.0", "fused_optimizer 0.5"]
    assert answer["whatifs"][0]["predicted_ms"] <= answer["whatifs"][1]["predicted_ms"] < answer["baseline_ms"]
    assert all("fused" not in candidate["name"] for candidate in answer["candidates"])
    table = subprocess.run(command, env=env, capture_output=True, timeout=60, text=True)
    assert "fused_optimizer 0.0, a what-if" in table.stdout
