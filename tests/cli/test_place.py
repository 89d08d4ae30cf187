"""``dpro place`` and ``dpro optimize --strategy``: figures by hand, one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro import cli_place
from dpro.graph.graph import TensorInfo
from dpro.plan import Plan
from dpro.replay.engine import replay
from tests.cli.test_cli import ask, one_line, run, shell
from tests.passes.memory_graphs import chain_graph, chain_profile
from tests.report import perfetto_check

#: Two branches of 40 ms forward and 60 ms backward between two ops that take next to nothing: 200 ms on one device.
_LINE = "{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size=1000.0, parameter_size={}\n"
_LAYERS = [
    ("node1", "Input", 900.0, 0.0, 0.0), ("node2", "Conv2d(1, 2)", 40.0, 60.0, 400.0),
    ("node3", "Conv2d(1, 2)", 40.0, 60.0, 400.0), ("node4", "Add", 0.0, 0.0, 0.0),
]  # fmt: skip
GRAPH = "".join(_LINE.format(*layer) for layer in _LAYERS)
GRAPH += "".join(f"\tnode{a} -- node{b}\n" for a, b in [(1, 2), (1, 3), (2, 4), (3, 4)])
CLUSTER = """\
devices: [{type: a, count: 2, memory_gb: 1}]
links: {within: {gb_per_s: 1, latency_us: 10}}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    graph, cluster = tmp_path / "branches.graph.txt", tmp_path / "two.yaml"
    graph.write_text(GRAPH)
    cluster.write_text(CLUSTER)
    return graph, cluster


def test_two_branches_on_two_devices(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Whole branches, or halves of the batch: 100 ms and some transfers of a microsecond and ten."""
    graph, cluster = files
    found = ask("place", graph, "--cluster", cluster, "--perfetto", tmp_path / "gantt.json")
    assert found["baselines"]["single device"] == pytest.approx(200, abs=0.1)
    assert 100 <= found["makespan_ms"] < 100.2 and found["fits"]
    assert set(found["placement"].values()) == {"a-0", "a-1"} and found["seconds"] > 0
    assert set(found["order"]) == set(found["placement"])
    assert any("3 backward ops" in line for line in found["warnings"])
    bars = [event for event in perfetto_check.load(tmp_path / "gantt.json") if event.get("ph") == "X"]
    assert {"node2@0", "node3@1", "transfer"} & {bar["name"] for bar in bars}
    assert "100." in run("place", graph, "--cluster", cluster)[0]


@pytest.mark.parametrize("strategy", ["heterog", "disco"])
def test_the_other_strategies(files: tuple[Path, Path], strategy: str) -> None:
    graph, cluster = files
    found = ask("place", graph, "--cluster", cluster, "--strategy", strategy, "--seconds", 2)
    assert found["makespan_ms"] <= min(ms for ms in found["baselines"].values() if ms is not None) < 101
    assert found["placement"] if strategy == "heterog" else found["fusions"]["reduces"]


def test_a_plan_of_a_graph(files: tuple[Path, Path], tmp_path: Path) -> None:
    """One copy of the model, a branch on each device."""
    graph, cluster = files
    out = tmp_path / "plan.json"
    found = ask("optimize", graph, "--strategy", "fastt", "--cluster", cluster, "-o", out)
    assert found["baseline_ms"] == pytest.approx(200, abs=0.1) and 100 <= found["predicted_ms"] < 100.2
    plan = Plan.load(out)
    assert plan.placement and plan.placement["node2"] != plan.placement["node3"] and set(plan.order or ()) >= {"node2"}


def test_a_plan_promises_only_what_a_plan_can_say(tmp_path: Path) -> None:
    """Three layers in a row: cutting them would halve the step, but a plan has a device for each layer and no more."""
    graph, cluster, out = tmp_path / "row.graph.txt", tmp_path / "two.yaml", tmp_path / "plan.json"
    layers = [(f"node{k}", "Conv2d(1, 2)", 40.0, 60.0, 400.0) for k in range(3)]
    graph.write_text("".join(_LINE.format(*layer) for layer in layers) + "\tnode0 -- node1\n\tnode1 -- node2\n")
    cluster.write_text(CLUSTER)
    assert ask("place", graph, "--cluster", cluster)["makespan_ms"] < 200
    found = ask("optimize", graph, "--strategy", "fastt", "--cluster", cluster, "-o", out)
    assert found["predicted_ms"] == found["baseline_ms"] == pytest.approx(300, abs=0.1)
    assert set(Plan.load(out).placement or ()) == {"node0", "node1", "node2"}


def test_backward_ops_stay_with_their_layers(files: tuple[Path, Path]) -> None:
    model, devices = cli_place.read(files[0]), cli_place.load(files[1])
    placed = cli_place.ask("fastt", model, devices, by_layer=True).placement
    assert {placed[name] for name in ("node2", "node3")} == {"a-0", "a-1"}
    assert all(placed[name] == placed[f"{name}/backward"] for name in ("node2", "node3"))


def test_disco_waits_for_the_slowest_device(files: tuple[Path, Path]) -> None:
    graph, cluster = files
    all_alike = ask("place", graph, "--cluster", cluster, "--strategy", "disco", "--seconds", 1)
    cluster.write_text(
        CLUSTER.replace("count: 2", "count: 1").replace("}]", "}, {type: b}]") + "types: {b: {default: .1}}"
    )
    slow = ask("place", graph, "--cluster", cluster, "--strategy", "disco", "--seconds", 1)
    assert slow["makespan_ms"] == pytest.approx(10 * all_alike["makespan_ms"], rel=0.01)


def test_a_step_of_no_time(files: tuple[Path, Path]) -> None:
    """HeteroG's rewards and proportions are ratios of times."""
    graph, cluster = files
    graph.write_text(_LINE.format("node1", "Input", 0.0, 0.0, 0.0))
    assert ask("place", graph, "--cluster", cluster, "--strategy", "heterog", "--seconds", 1)["makespan_ms"] < 0.1


def test_a_plan_for_too_little_memory_is_not_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    graph, cluster = files
    cluster.write_text(CLUSTER.replace("memory_gb: 1", "memory_gb: 0.0000001"))
    out = tmp_path / "plan.json"
    result = shell("optimize", graph, "--strategy", "fastt", "--cluster", cluster, "-o", out)
    assert result.returncode == 2 and "fits the memory of two.yaml's devices" in one_line(result.stderr)
    assert not out.exists()


def test_a_plan_of_a_captured_model() -> None:
    """What DisCo fuses of units becomes groups of their gradients, and submodules to compile."""
    graph = chain_graph(chain_profile([100, 200], [10, 20]), [3, 4], [5, 6])
    graph.tensors = [TensorInfo(f"net.{k}.{name}", 100) for k in range(2) for name in ("weight", "bias")]
    model = cli_place.model_of(graph, "net")
    reduces = [["net.1/backward/all-reduce", "net.0/backward/all-reduce"]]
    found = cli_place.Answer(
        "", 1.0, {}, graph, replay(graph), 0.0, 1, fusions={"ops": [["net.0", "net.1"]], "reduces": reduces}
    )
    assert cli_place.settings_of(found, model, graph) == {
        "tensor_groups": [["net.1.weight", "net.1.bias", "net.0.weight", "net.0.bias"]],
        "compile_regions": ["net.0", "net.1"],
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["place", "{graph}", "--cluster", "{cluster}", "--strategy", "magic"], "there are fastt, heterog, disco"),
        (["place", "{graph}", "--cluster", "{graph}"], "branches.graph.txt: not YAML"),
        (["place", "{cluster}", "--cluster", "{cluster}"], "two.yaml: neither a layer profile"),
        (["place", "{missing}", "--cluster", "{cluster}"], "missing: No such file"),
        (["place", "{graph}", "--cluster", "{cluster}", "--batch", "0"], "above 0"),
        (["place", "{graph}", "--cluster", "{cluster}", "--batch", "inf"], "at most 1e+06"),
        (["place", "{graph}", "--cluster", "{cluster}", "--strategy", "disco", "--seed", "-1"], "not below 0"),
        (["optimize", "{graph}", "--strategy", "fastt"], "say which"),
        (
            ["optimize", "{graph}", "--strategy", "heterog", "--cluster", "{cluster}", "-o", "p.json"],
            "nothing that a job",
        ),
    ],
)
def test_what_is_wrong_is_one_line(files: tuple[Path, Path], tmp_path: Path, words: list[str], said: str) -> None:
    graph, cluster = files
    named = {"graph": graph, "cluster": cluster, "missing": tmp_path / "missing"}
    result = shell(*(word.format(**named) for word in words))
    assert result.returncode == 2 and said in one_line(result.stderr), result
