"""The installed torch still leaves the events that the graph of a gloo DDP job is read from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpro.graph.assemble import assemble, assemble_steps
from dpro.graph.graph import OpKind
from dpro.trace.store import load
from tests.frameworks.launch import clean_environment
from tests.replays import typical_error

pytest.importorskip("torch")
JOB = Path(__file__).with_name("gloo_job.py")


@pytest.mark.parametrize("kind", ["copy", "view", "closure"])
def test_buckets_waits_and_step_time_of_a_real_job(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(JOB), str(tmp_path), kind], env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    traces = load(tmp_path)
    assert [t.steps for t in traces] == [3, 3]
    graph = assemble(traces)
    assert len(graph.tensors) == 12  # a weight and a bias for each of 6 layers
    assert sorted(t for b in graph.buckets for t in b.tensors) == list(range(12))
    # as many buckets as calls the profiler saw in a step, each one op for both ranks
    calls = sum(trace.names[n] == "c10d::allreduce_" for trace in traces[:1] for n in trace.name[trace.step == 1])
    assert len(graph.buckets) == calls == 3
    edges = {tuple(edge) for edge in graph.edges().tolist()}
    for bucket in graph.buckets:
        [op] = bucket.ops
        assert OpKind(graph.column("kind")[op]) == OpKind.COLLECTIVE
        for rank in range(2):
            assert any((graph.out_op[rank, t], op) in edges for t in bucket.tensors)
            assert any((op, graph.in_op[rank, t]) in edges for t in bucket.tensors)
    kinds = {graph.name_of(op): OpKind(kind) for op, kind in enumerate(graph.column("kind").tolist())}
    if kind != "view":  # the gradients' way back is no part of the optimizer, wherever the step began
        assert kinds["torch.distributed.ddp.reducer::copy_bucket_to_grad"] == OpKind.IN
    steps = assemble_steps(traces)
    assert typical_error(steps) < 0.05
    for step in steps:
        assert not [line for line in step.warnings if "began after its first use" in line or "cycle" in line]
