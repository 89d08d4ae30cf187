"""Graphs of TensorFlow and MXNet as dependencies between nodes, worked out by hand; TensorFlow's held against a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import TraceError
from dpro.trace import dataflow, xplane
from dpro.trace.dataflow import Node
from tests.trace.engine_files import mx_symbol, pb, real


@pytest.mark.parametrize(
    ("written", "node"),
    [("a/b", "a/b"), ("^a/b", "a/b"), ("a/b:0", "a/b"), ("a/b:output:2", "a/b"), ("", "")],
)
def test_names_of_inputs_become_names_of_nodes(written: str, node: str) -> None:
    assert dataflow.normalise(written) == node


# -- GraphDef ----------------------------------------------------------------------------------------


def node(name: str, op: str, *inputs: str, calls: str = "") -> bytes:
    attribute = pb(5, pb(1, "f") + pb(2, pb(10, pb(1, calls)))) if calls else b""
    # attributes that are of no interest: a number, a tensor's content
    other = pb(5, pb(1, "T") + pb(2, pb(6, 1))) + pb(5, pb(1, "value") + pb(2, pb(8, b"\x08\x01\xff\xff")))
    return pb(1, name) + pb(2, op) + b"".join(pb(3, i) for i in inputs) + attribute + other


def function(name: str, takes: list[str], gives: dict[str, str], *nodes: bytes, keeps: tuple[str, ...] = ()) -> bytes:
    signature = pb(1, name) + b"".join(pb(2, pb(1, a)) for a in takes) + b"".join(pb(3, pb(1, r)) for r in gives)
    returns = b"".join(pb(4, pb(1, key) + pb(2, value)) for key, value in gives.items())
    kept = b"".join(pb(6, pb(1, key) + pb(2, key)) for key in keeps)
    return pb(1, signature) + b"".join(pb(3, n) for n in nodes) + returns + kept


def graph(*nodes: bytes, functions: tuple[bytes, ...] = ()) -> bytes:
    return b"".join(pb(1, n) for n in nodes) + pb(2, b"".join(pb(1, f) for f in functions)) + pb(4, pb(1, 1286))


def test_inputs_and_control_inputs() -> None:
    blob = graph(
        node("x", "Placeholder"),
        node("w", "ReadVariableOp", "handle", "^x"),
        node("y", "MatMul", "x", "w:0"),
        node("z", "AddN", "y:1", "y", "^w"),
    )
    assert dataflow.graph_def(blob) == {"x": [], "w": ["handle", "x"], "y": ["x", "w"], "z": ["y", "w"]}


#: f(a, b) = (a + b, relu(a + b)), and an assignment that nothing returns
INNER = function(
    "f",
    ["a", "b"],
    {"sum": "add:z:0", "relu": "act:activations:0"},
    node("act", "Relu", "add:z:0"),
    node("add", "AddV2", "a", "b"),
    node("note", "AssignVariableOp", "b"),
    node("free", "Const"),
    keeps=("note",),
)


@pytest.mark.parametrize("op", ["PartitionedCall", "StatefulPartitionedCall", "f"])
def test_the_body_of_a_function_takes_the_place_of_its_call(op: str) -> None:
    blob = graph(
        node("p", "Placeholder"),
        node("gate", "NoOp"),
        node("scope/call", op, "p", "q:2", "^gate", calls="f"),
        node("q", "Split", "p"),
        node("first", "Neg", "scope/call"),
        node("second", "Neg", "scope/call:1"),
        node("after", "NoOp", "^scope/call"),
        functions=(INNER,),
    )
    assert dataflow.graph_def(blob) == {
        "p": [],
        "gate": [],
        "q": ["p"],
        "scope/call": ["scope/call/add", "scope/call/act", "scope/call/note"],
        "scope/call/act": ["scope/call/add"],
        "scope/call/add": ["gate", "p", "q"],
        "scope/call/note": ["gate", "q"],
        "scope/call/free": ["gate"],
        "first": ["scope/call/add"],
        "second": ["scope/call/act"],
        "after": ["scope/call"],
    }


def test_functions_in_functions_and_one_that_hands_on_what_it_is_given() -> None:
    same = function("same", ["t"], {"out": "t"})
    outer = function(
        "outer",
        ["v"],
        {"r": "again:output:0"},
        node("inner", "PartitionedCall", "v", "v", calls="f"),
        node("again", "PartitionedCall", "inner:output:1", calls="same"),
    )
    blob = graph(
        node("x", "Placeholder"),
        node("c", "PartitionedCall", "x", calls="outer"),
        node("y", "Neg", "c"),
        functions=(same, outer, INNER),
    )
    found = dataflow.graph_def(blob)
    assert found["y"] == ["c/inner/act"]
    assert found["c"] == ["c/inner/act"]
    assert found["c/inner/add"] == ["x"]
    assert found["c/again"] == ["c/inner/act"]


def test_a_function_that_calls_itself_ends() -> None:
    twice = function("g", ["t"], {"o": "a:0"}, node("a", "g", "b:0"), node("b", "g", "t"))
    found = dataflow.graph_def(graph(node("x", "Placeholder"), node("c", "g", "x"), functions=(twice,)))
    assert "c" in found and len(found) < 100_000


def test_text_and_bytes_say_the_same() -> None:
    text = """
    # made by hand
    node { name: "x" op: "Placeholder" attr { key: "T" value { type: DT_FLOAT } } }
    node {
      name: 'say/\\"hi\\"'  op: "MatMul"
      input: "x:0" input: "^w\\303\\251"
      attr { key: "content" value { tensor { tensor_content: "name: \\"no\\" { \\001\\377" } } }
    }
    versions { producer: 1286 }
    """
    expected = {"x": [], 'say/"hi"': ["x", "wé"]}
    assert dataflow.graph_def(text) == dataflow.graph_def(text.encode()) == expected


@pytest.mark.parametrize("blob", [b"", b"{}", b"no graph", bytes(100), pb(2, b""), b"node {", b"node { name: 3 }"])
def test_what_is_no_graph(blob: bytes) -> None:
    with pytest.raises(TraceError, match=r"^g\.pb: no node of a TensorFlow graph in it"):
        dataflow.graph_def(blob, "g.pb")


@settings(deadline=None)
@given(st.data())
def test_broken_graphs_never_raise_anything_else(data: st.DataObject) -> None:
    blob = bytearray(graph(node("c", "PartitionedCall", "x", "y", calls="f"), functions=(INNER,)))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    for some in (bytes(blob), bytes(blob[: data.draw(st.integers(0, len(blob)))])):
        try:
            assert dataflow.graph_def(some)
        except TraceError as error:
            assert "\n" not in str(error)


def test_real_ops_ran_after_what_the_graph_says_they_wait_for() -> None:
    folder = real("tensorflow", "tensorflow_job.py")
    graphs = [dataflow.graph_def(path.read_bytes()) for path in sorted(folder.glob("graph_*.pb"))]
    for path, found in zip(sorted(folder.glob("graph_*.pb")), graphs, strict=True):
        assert dataflow.graph_def(path.with_suffix(".pbtxt").read_text()) == found
    depends = max(graphs, key=len)
    trace = xplane.read(folder / "job.xplane.pb")
    held = 0
    for step in range(trace.steps):
        rows = np.flatnonzero(trace.step == step).tolist()
        row_of = {trace.names[trace.name[row]]: row for row in rows}
        for name, row in row_of.items():
            for before in depends.get(name, []):
                if before in row_of:
                    held += 1
                    assert trace.end[row_of[before]] <= trace.start[row], (before, name)
        ran = set(row_of) - {"train"}
        assert len(ran & set(depends)) >= 0.9 * len(ran), sorted(ran - set(depends))
    assert held > 50


def test_a_real_concrete_function_has_its_calls_inlined() -> None:
    folder = real("tensorflow", "tensorflow_job.py")
    found = dataflow.graph_def((folder / "concrete.pb").read_bytes())
    assert all(before in found for inputs in found.values() for before in inputs)


# -- symbols -----------------------------------------------------------------------------------------

#: data → conv → relu → (fc, fc2) → add
SYMBOL = mx_symbol(
    ("null", "data", []),
    ("null", "w", []),
    ("Convolution", "conv", [0, 1]),
    ("Activation", "relu", [2]),
    ("FullyConnected", "fc", [3, 1]),
    ("FullyConnected", "fc2", [3, 1]),
    ("elemwise_add", "add", [4, 5]),
)


def test_a_symbol() -> None:
    assert dataflow.symbol(SYMBOL) == {
        "data": [],
        "w": [],
        "conv": ["data", "w"],
        "relu": ["conv"],
        "fc": ["relu", "w"],
        "fc2": ["relu", "w"],
        "add": ["fc", "fc2"],
    }
    old = json.dumps({"nodes": [{"op": "null", "name": "x"}, {"op": "exp", "name": "y", "inputs": [[0, 0]]}]})
    assert dataflow.symbol(old) == {"x": [], "y": ["x"]}


def test_the_gradient_of_a_symbol() -> None:
    gradient = dataflow.with_backward(dataflow.symbol_nodes(SYMBOL))[7:]
    assert gradient == [
        Node("add_backward", "", ["add"]),
        Node("fc2_backward", "_backward_FullyConnected", ["add_backward", "fc2"]),
        Node("fc_backward", "_backward_FullyConnected", ["add_backward", "fc"]),
        Node("relu_backward", "_backward_Activation", ["fc_backward", "fc2_backward", "relu"]),
        Node("conv_backward", "_backward_Convolution", ["relu_backward", "conv"]),
    ]


def test_a_gradient_of_two_ops() -> None:
    text = mx_symbol(("null", "w", []), ("relu", "r", [0]), ("transpose", "t", [0]), ("batch_dot", "dot", [1, 2]))
    assert dataflow.with_backward(dataflow.symbol_nodes(text))[4:] == [
        Node("dot_backward_lhs", "batch_dot", ["dot"]),
        Node("dot_backward_rhs", "batch_dot", ["dot"]),
        Node("t_backward", "transpose", ["dot_backward_rhs", "t"]),
        Node("r_backward", "_backward_relu", ["dot_backward_lhs", "r"]),
    ]


def test_what_is_made_of_data_alone_has_no_gradient() -> None:
    text = mx_symbol(
        ("null", "data0", []), ("Cast", "cast", [0]), ("null", "weight", []), ("FullyConnected", "fc", [1, 2])
    )
    names = [n.name for n in dataflow.with_backward(dataflow.symbol_nodes(text))]
    assert names == ["data0", "cast", "weight", "fc", "fc_backward"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ("[1]", "no nodes in it"),
        ("{}", "no nodes in it"),
        ('{"nodes": []}', "no nodes in it"),
        ('{"nodes": [1]}', "node 0 has no name or no op"),
        ('{"nodes": [{"op": "exp", "name": "a", "inputs": [[0, 0, 0]]}]}', "an input of node 0 is no node before it"),
        ('{"nodes": [{"op": "exp", "name": "a", "inputs": [["x"]]}]}', "an input of node 0 is no node before it"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_what_is_no_symbol(text: str, reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        dataflow.symbol(text, "net.json")
    assert str(caught.value) == f"net.json: not a symbol: {reason}"
