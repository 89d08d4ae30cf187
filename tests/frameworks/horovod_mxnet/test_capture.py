"""A real two-process Gluon job is captured: the graph's own names, what went together, and it replays as it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpro.graph.assemble import assemble, assemble_steps
from dpro.graph.horovod import with_responses
from dpro.trace.horovod import SUBMIT, WAIT, spans
from dpro.trace.model import EventKind, RankTrace
from dpro.trace.store import load
from tests.frameworks.horovod_torch.conftest import HorovodRanks
from tests.replays import typical_error

TARGET = "tests.frameworks.horovod_mxnet.capture_jobs:captured"
STEPS = 3
CNN = {
    "cnn_first_weight", "cnn_first_bias", "cnn_norm_gamma", "cnn_norm_beta", "cnn_second_weight", "cnn_second_bias",
    "cnn_hidden_weight", "cnn_hidden_bias", "cnn_out_weight", "cnn_out_bias",
}  # fmt: skip


def captured(ranks: HorovodRanks, folder: Path, **arguments: Any) -> list[RankTrace]:
    ranks.run(TARGET, folder / "log", into=str(folder), steps=STEPS, **arguments).ok()
    return [RankTrace.load(file) for file in sorted(folder.glob("rank*.npz"))]


def test_a_small_cnn(ranks: HorovodRanks, tmp_path: Path) -> None:
    raw = captured(ranks, tmp_path)
    for trace in raw:
        assert {tensor.name for tensor in trace.tensors} == CNN
        assert sorted(tensor.ready for tensor in trace.tensors) == list(range(len(CNN)))
        flow = trace.meta.extra["dataflow"]
        ops = trace.kind == EventKind.CPU_OP
        names = [trace.names[i] for i in trace.name[ops]]
        # by the net's own definition
        assert names.count("cnn_first_fwd") == names.count("cnn_first_fwd_backward") == STEPS
        assert "cnn_first_fwd_backward" in flow["horovod_allreduce/cnn_first_weight"]
        assert not [name for name in names if name.startswith("dpro/") or name == "horovod_allreduce"]
        for name in (SUBMIT, WAIT):
            assert [len(starts) for starts, _ in spans(trace, name).values()] == [STEPS] * len(CNN)
        for number, tensor in enumerate(trace.tensors):
            (starts, ends), (waits, used) = spans(trace, SUBMIT)[number], spans(trace, WAIT)[number]
            producer = f"{tensor.name.rsplit('_', 1)[0]}_fwd_backward"
            computed = trace.end[ops & (trace.name == trace.names.index(producer))]
            assert np.all(computed <= starts + 1000) and np.all(starts <= ends), tensor.name
            assert np.array_equal(ends, waits) and np.all(waits <= used)
            users = [name for name, needs in flow.items() if f"horovod_allreduce/{tensor.name}" in needs]
            assert len(users) == 1 and users[0].endswith("_update")
            assert np.all(used <= trace.start[ops & (trace.name == trace.names.index(users[0]))])
            # and who reads what it writes waits for it, in the next pass
            assert users[0] in flow[producer.removesuffix("_backward")]
    # the order in which backward passes the layers, by hand
    order = [tensor.name for tensor in sorted(raw[0].tensors, key=lambda tensor: tensor.ready)]
    layers = list(dict.fromkeys(name.rsplit("_", 1)[0] for name in order))
    assert layers == ["cnn_out", "cnn_hidden", "cnn_second", "cnn_norm", "cnn_first"]


def test_a_capture_becomes_a_graph_that_replays_as_it_ran(ranks: HorovodRanks, tmp_path: Path) -> None:
    raw = captured(ranks, tmp_path, net="wide")
    told = with_responses(raw)
    names = {tensor.name for tensor in raw[0].tensors}
    assert len(names) == 16
    for trace in told:
        went = [trace.tensors[t].name for facts in trace.collectives.values() for t in facts.tensors]
        assert sorted(went) == sorted([*names] * STEPS)
        trace.meta.event_overhead_ns = 0.0
    # steps of 30 ms on cores that others use as well: where a response ends is read off the wire, up to a wake-up late
    assert typical_error(assemble_steps(told)) < 0.15
    graph = assemble(load(tmp_path))
    assert sorted(t for bucket in graph.buckets for t in bucket.tensors) == list(range(16))


@pytest.mark.parametrize(
    "arguments",
    [
        {"flags": {"hybrid": False}},
        {"flags": {"static_alloc": True, "static_shape": True}},
        {"num_groups": 2, "compression_fp16": True},
        {"optimizer": "adam"},
    ],
    ids=["imperative", "static shapes", "own groups, compressed", "an update for every parameter"],
)
def test_kinds_of_jobs(ranks: HorovodRanks, tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Every gradient is handed in and used once a step, after an op of the backward pass that was seen."""
    for trace in captured(ranks, tmp_path, net="mlp", **arguments):
        flow = trace.meta.extra["dataflow"]
        ran = {trace.names[i] for i in trace.name[trace.kind == EventKind.CPU_OP]}
        assert {len(starts) for starts, _ in spans(trace, SUBMIT).values()} == {STEPS}
        assert {len(starts) for starts, _ in spans(trace, WAIT).values()} == {STEPS}
        assert len(spans(trace, WAIT)) == len(trace.tensors) == 10
        assert "ImperativeBulk" not in ran and not [name for name in ran if name.startswith("[")]
        carriers = {name for name in flow if name.startswith("horovod_allreduce/")}
        assert carriers <= ran and all(set(flow[name]) & ran for name in carriers)
        fp16 = "compression_fp16" in arguments
        assert {tensor.dtype for tensor in trace.tensors} == {"float16" if fp16 else "float32"}
