import json
from pathlib import Path
from typing import Any

import pytest

from dpro.errors import TraceError
from dpro.trace import model_graph
from dpro.trace.model_graph import ModelGraph, Role, read

GRAPHS = Path(__file__).resolve().parents[3] / "shared" / "graphs"
needs_graphs = pytest.mark.skipif(not GRAPHS.exists(), reason="public graphs (../shared/graphs) are not here")


def layer(name: str, words: str, forward_ms: float, backward_ms: float, activation: str, parameters: float) -> str:
    return (
        f"{name} -- {words} -- forward_compute_time={forward_ms:.3f}, backward_compute_time={backward_ms:.3f}, "
        f"activation_size={activation}, parameter_size={parameters:.3f}\n"
    )


LAYERS = (
    layer("node1", "Input", 5.0, 0.0, "0.000", 0.0)
    + layer("node2", "Conv2d(3, 8, kernel_size=(3, 3))", 1.5, 2.5, "4000.000", 1000.0)
    + layer("node3", "Split()", 0.25, 0.5, "[100.0; 200.0]", 0.0)
    + "\tnode1 -- node2\n\tnode2 -- node3\n"
)


def written(tmp_path: Path, text: str, name: str = "net.graph.txt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def edges(model: ModelGraph) -> set[tuple[str, str, int, bool]]:
    names = [op.name for op in model.ops]
    return {(names[t.producer], names[c], t.nbytes, t.batched) for t in model.tensors for c in t.consumers}


def test_layers_become_a_training_step(tmp_path: Path) -> None:
    model = read(written(tmp_path, LAYERS))
    assert model.name == "net"
    assert [(op.name, op.role, op.time_ns) for op in model.ops] == [
        ("node1", Role.FORWARD, 0),  # loading a batch is the host's work
        ("node2/variable", Role.VARIABLE, 0),
        ("node2", Role.FORWARD, 1_500_000),
        ("node3", Role.FORWARD, 250_000),
        ("node3/backward", Role.BACKWARD, 500_000),
        ("node2/backward", Role.BACKWARD, 2_500_000),
        ("node2/update", Role.UPDATE, 0),
    ]
    assert [op.type for op in model.ops if op.role is Role.BACKWARD] == ["Split", "Conv2d"]
    assert [op.kept_bytes for op in model.ops] == [0, 1000, 0, 0, 0, 0, 0]
    assert edges(model) == {
        ("node2/backward", "node2/update", 1000, False),
        ("node2/variable", "node2", 1000, False),
        ("node2/variable", "node2/backward", 1000, False),
        ("node2/variable", "node2/update", 1000, False),
        ("node1", "node2", 0, True),
        ("node1", "node2/backward", 0, True),
        ("node2", "node3", 4000, True),
        ("node2", "node2/backward", 4000, True),
        ("node2", "node3/backward", 4000, True),
        ("node3", "node3/backward", 300, True),
        ("node3/backward", "node2/backward", 4000, True),
    }
    assert any("2 backward ops" in line for line in model.said)


def operators() -> dict[str, Any]:
    def node(number: int, name: str, ms: float, size: float = 0.0, backward: bool = False) -> dict[str, Any]:
        return {"id": number, "name": name, "fpgaLatency": ms, "size": size, "isBackwardNode": backward}

    return {
        "nodes": [
            node(1, "W", 0.0, 64.0),
            node(2, "Block/MatMul_3", 1.0, 9.0),
            node(3, "Block_Grad/MatMulGrad_0", 2.0, 0.0, True),
            node(4, "SGDOptimizer_W", 0.5, 0.0, True),
        ],
        "edges": [
            {"sourceId": source, "destId": reader, "size": nbytes, "cost": 9.9}
            for source, reader, nbytes in [(1, 2, 64.0), (2, 3, 8.0), (3, 4, 64.0), (1, 4, 64.0)]
        ],
    }


def test_operators_have_roles_by_what_they_are(tmp_path: Path) -> None:
    model = read(written(tmp_path, json.dumps(operators()), "ops.json"))
    assert [(op.name, op.type, op.role, op.time_ns, op.kept_bytes, op.partner) for op in model.ops] == [
        ("W", "Variable", Role.VARIABLE, 0, 64, -1),
        ("Block/MatMul_3", "MatMul", Role.FORWARD, 1_000_000, 0, -1),
        ("Block_Grad/MatMulGrad_0", "MatMulGrad", Role.BACKWARD, 2_000_000, 0, -1),
        ("SGDOptimizer_W", "Update", Role.UPDATE, 500_000, 0, 0),
    ]
    assert edges(model) == {
        ("W", "Block/MatMul_3", 64, False),
        ("W", "SGDOptimizer_W", 64, False),
        ("Block/MatMul_3", "Block_Grad/MatMulGrad_0", 8, True),
        ("Block_Grad/MatMulGrad_0", "SGDOptimizer_W", 64, False),
    }
    assert model.said == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Block/MatMul13", "MatMul"), ("Conv2d_7", "Conv2d"), ("Conv12", "Conv"), ("Conv2d12", "Conv2d")],
)
def test_the_number_of_an_operator_is_no_part_of_its_type(tmp_path: Path, name: str, kind: str) -> None:
    raw = operators()
    raw["nodes"][1]["name"] = name
    model = read(written(tmp_path, json.dumps(raw), "ops.json"))
    assert {op.name: op.type for op in model.ops}[name] == kind


def test_a_backward_pass_that_nothing_leads_to_is_joined_and_said(tmp_path: Path) -> None:
    raw = operators()
    raw["edges"].pop(1)
    model = read(written(tmp_path, json.dumps(raw), "ops.json"))
    assert ("Block/MatMul_3", "Block_Grad/MatMulGrad_0", 0, True) in edges(model)
    assert any("1 were added" in line for line in model.said)


def test_lines_of_no_known_form_are_counted(tmp_path: Path) -> None:
    cut = LAYERS.splitlines()
    cut[2] = cut[2][:60]  # node3 ends in the middle: it and its edge are gone
    model = read(written(tmp_path, "\n".join(cut)))
    assert "1 lines and 1 edges" in model.said[0]
    assert "node3" not in [op.name for op in model.ops]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\n", "empty"),
        ("hello", "neither"),
        ("node1 -- Conv2d(3", "no layer"),
        (LAYERS + "\tnode3 -- node2\n", "2 ops wait for themselves"),
        ('{"nodes": [', "not JSON"),
        ("{}", "no operator graph"),
        ('{"nodes": [], "edges": []}', "no operator in it"),
        ('{"nodes": 3, "edges": 4}', "no operator graph"),
        ('{"traceEvents": [{"ph": "X"}]}', "no operator graph"),
        ("{" * 100_000, "not JSON"),
    ],
    ids=lambda value: value[:12],
)
def test_a_wrong_file_is_one_line_with_the_file_and_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceError, match=reason) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_cycle_of_operators_is_named(tmp_path: Path) -> None:
    raw = operators()
    raw["edges"].append({"sourceId": 4, "destId": 2, "size": 1.0, "cost": 0.0})
    with pytest.raises(TraceError, match="3 ops wait for themselves"):
        read(written(tmp_path, json.dumps(raw), "ops.json"))


def test_numbers_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    raw = operators()
    raw["nodes"][1]["fpgaLatency"] = float("inf")
    raw["nodes"][2]["fpgaLatency"] = -1
    model = read(written(tmp_path, json.dumps(raw), "ops.json"))
    assert [op.name for op in model.ops] == ["W", "SGDOptimizer_W"]
    assert "2 nodes and 3 edges" in model.said[0]


def test_files_that_are_none_binary_or_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "none.txt")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\x00\xfe")
    with pytest.raises(TraceError, match="not text"):
        read(binary)
    monkeypatch.setattr(model_graph, "MAX_FILE_BYTES", 100)
    with pytest.raises(TraceError, match="not a model's graph"):
        read(written(tmp_path, LAYERS))


@needs_graphs
@pytest.mark.parametrize(
    ("name", "layers", "variables", "parameter_bytes"),
    [("vgg16", 41, 16, 553_430_176), ("alexnet", 23, 8, 244_403_360)],
)
def test_public_layers(name: str, layers: int, variables: int, parameter_bytes: int) -> None:
    """Counted with grep; the parameters are 138.36 and 61.10 million floats, as the models are known to have."""
    model = read(GRAPHS / "pipedream" / f"{name}.graph.txt")
    assert sum(op.role is Role.FORWARD for op in model.ops) == layers
    assert sum(op.role is Role.VARIABLE for op in model.ops) == variables
    assert sum(op.kept_bytes for op in model.ops) == parameter_bytes


@needs_graphs
def test_public_operators() -> None:
    raw = json.loads((GRAPHS / "dnn_partitioning" / "operator_bert_l-3_training.json").read_text())
    model = read(GRAPHS / "dnn_partitioning" / "operator_bert_l-3_training.json")
    assert len(model.ops) == len(raw["nodes"])
    assert sum(op.time_ns for op in model.ops) == pytest.approx(
        1e6 * sum(n["fpgaLatency"] for n in raw["nodes"]), rel=1e-6
    )
    assert all(
        model.ops[op.partner].role is Role.VARIABLE for op in model.ops if op.role is Role.UPDATE and op.partner >= 0
    )
