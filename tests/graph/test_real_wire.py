"""Messages of a real gloo DDP job: all attributed, all rings recognised, and replayed like the collectives they are."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from dpro.graph.assemble import assemble_steps
from dpro.graph.graph import Graph, OpKind
from dpro.replay import oracle
from dpro.replay.engine import replay
from dpro.trace import wire
from dpro.trace.model import RankTrace
from tests.frameworks.launch import clean_environment

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(bool(wire.supported()), reason=wire.supported() or "the wire can be traced here")
JOB = Path(__file__).with_name("wire_job.py")
LAYERS, LAYER_BYTES = 4, 4 << 20


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_real_job_replays_alike_by_message_and_by_collective(tmp_path: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(JOB), str(tmp_path)], env=clean_environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    traces = [RankTrace.load(path) for path in sorted(tmp_path.glob("*.npz"))]
    whole, parts = assemble_steps(traces), assemble_steps(traces, messages=True)
    facts = parts[0].info["messages"]
    assert facts["matched_share"] > 0.999
    assert facts["attributed_share"] > 0.99
    sent = {link["sender"]: link["nbytes"] for link in facts["links"]}
    assert len(sent) == ranks
    for nbytes in sent.values():  # each rank sends 2 (n-1)/n of every gradient in every step, and headers
        assert nbytes == pytest.approx(len(parts) * LAYERS * LAYER_BYTES * 2 * (ranks - 1) / ranks, rel=0.001)
    ratios = [replay(b).makespan_ns / replay(a).makespan_ns for a, b in zip(whole, parts, strict=True)]
    assert statistics.median(ratios) == pytest.approx(1, rel=0.05)
    for b in parts:
        assert not [line for line in b.warnings if "cycle" in line]
        steps = {b.name_of(op).split(" part")[0][-1] for bucket in b.buckets for op in bucket.ops if _sends(b, op)}
        assert steps == {str(step) for step in range(2 * (ranks - 1))}
        assert all(len(bucket.ops) > 1 for bucket in b.buckets)
    played = replay(parts[-1])
    assert played.end.tolist() == oracle.replay_arrays(parts[-1].arrays()).end.tolist()


def _sends(graph: Graph, op: int) -> bool:
    return bool(graph.column("kind")[op] == OpKind.SEND)
