"""The speed benchmark's contract: one JSON document, and accounting that the kernel confirms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.replay_speed import ddp_graph
from dpro.graph.graph import OpKind
from dpro.replay.oracle import replay_arrays

ROOT = Path(__file__).resolve().parents[2]


def test_its_last_line_is_the_json_that_scripts_read() -> None:
    command = [sys.executable, "-m", "benchmarks.replay_speed", "--ops", "30000", "--repeats", "3", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ops"] == 30_000
    # The graph is made from a seed, so its makespan is a fact; the oracle's word for it.
    assert found["makespan_ns"] == replay_arrays(ddp_graph(30_000).arrays()).makespan_ns
    assert 0 < found["bytes_per_op"] < 300
    assert found["ops_per_s"] == pytest.approx(found["ops"] / found["seconds_median"], rel=1e-3)
    # What was counted is what the process grew by: within a third, since pages are 4 KiB.
    assert found["resident_growth_bytes_per_op"] == pytest.approx(found["replay_bytes_per_op"], rel=0.33)


def test_the_graph_has_the_shape_of_a_ddp_job() -> None:
    graph = ddp_graph(25_000, ranks=4)
    kinds, names = graph.column("kind"), graph.resource_names
    assert len(graph) == 25_000
    assert len(names) == 3 * 4 + 1  # host thread and two streams per rank, one ring
    assert {"rank3/cpu/main", "rank3/stream/7", "rank3/stream/20", "group/default"} <= set(names)
    edges = graph.edges()
    joined = ((kinds == OpKind.COLLECTIVE) & graph.column("alive")).nonzero()[0].tolist()
    arrivals = {op: sorted(graph.column("rank")[edges[edges[:, 1] == op, 0]].tolist()) for op in joined[:-1]}
    assert len(arrivals) > 20
    assert all(ranks == [0, 1, 2, 3] for ranks in arrivals.values())
