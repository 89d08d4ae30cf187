"""A captured step as a model to place, by hand."""

from __future__ import annotations

import pytest

from dpro.errors import DproError
from dpro.graph.graph import Graph, TensorInfo
from dpro.graph.model_of import model_of
from dpro.trace.model_graph import Role
from tests.passes.memory_graphs import MS, chain_graph, chain_profile


def test_units_in_a_row() -> None:
    """Two layers of 3 and 4 ms forward, 5 and 6 ms backward, that hand on 10 and 20 bytes; 1 ms of update."""
    graph = chain_graph(chain_profile([100, 200], [10, 20]), [3, 4], [5, 6], ranks=2)
    graph.tensors = [TensorInfo("net.0.weight", 300), TensorInfo("net.0.bias", 100), TensorInfo("other.weight", 7)]
    model = model_of(graph, "net")
    told = {op.name: (op.role, op.time_ns) for op in model.ops}
    assert told == {
        "net.0/variable": (Role.VARIABLE, 0), "net.0": (Role.FORWARD, 3 * MS), "net.1": (Role.FORWARD, 4 * MS),
        "net.1/backward": (Role.BACKWARD, 6 * MS), "net.0/backward": (Role.BACKWARD, 5 * MS),
        "net.0/update": (Role.UPDATE, MS),
    }  # fmt: skip
    assert next(op for op in model.ops if op.role is Role.VARIABLE).kept_bytes == 400
    name = [op.name for op in model.ops]
    edges = {(name[t.producer], name[user]): (t.nbytes, t.batched) for t in model.tensors for user in t.consumers}
    assert edges == {
        ("net.0/variable", "net.0"): (400, False), ("net.0/variable", "net.0/backward"): (400, False),
        ("net.0/variable", "net.0/update"): (400, False), ("net.0/backward", "net.0/update"): (400, False),
        ("net.0", "net.1"): (10, True), ("net.0", "net.0/backward"): (10, True),
        ("net.0", "net.1/backward"): (10, True),
        ("net.1", "net.1/backward"): (20, True), ("net.1/backward", "net.0/backward"): (10, True),
    }  # fmt: skip
    assert "2 units" in model.said[0]


def test_parameters_of_keras_are_a_units_too() -> None:
    graph = chain_graph(chain_profile([100, 200], [10, 20]), [3, 4], [5, 6])
    graph.tensors = [TensorInfo("net.0/kernel", 300), TensorInfo("net.0/bias", 100), TensorInfo("net.01/kernel", 7)]
    model = model_of(graph, "net")
    assert [op.kept_bytes for op in model.ops if op.role is Role.VARIABLE] == [400]


def test_a_capture_that_does_not_tell() -> None:
    with pytest.raises(DproError, match="memory_bytes"):
        model_of(Graph(), "net")
