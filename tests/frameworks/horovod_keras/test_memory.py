"""Blocks recomputed in a running Keras job: same weights to the last bit, less memory, one line where it can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.horovod_torch.conftest import HorovodRanks

JOBS = "tests.frameworks.horovod_keras.memory_jobs"


@pytest.mark.parametrize(
    ("kind", "blocks", "groups"),
    [("conv", ["stem", "sum0..sum1", "head"], False), ("dense", ["a..b", "bn", "c..head"], True)],
    ids=["branches and norms", "dropout beside it, groups as well"],
)
def test_same_weights_after_50_steps(
    ranks: HorovodRanks, tmp_path: Path, kind: str, blocks: list[str], groups: bool
) -> None:
    """Moving averages and the optimizer's state as well, though batch norm's layers run twice."""
    without = ranks.run(f"{JOBS}:recomputed", tmp_path / "without", tune="", kind=kind).ok().values
    found = ranks.run(f"{JOBS}:recomputed", tmp_path / "with", tune="plan", kind=kind, blocks=blocks, groups=groups)
    for value, other in zip(found.ok().values, without, strict=True):
        assert value["verdict"] == "KEPT", found.logs
        assert value["patched"] == ["_run_internal_graph"] and value["same"]
        assert value["state"] == other["state"]
        assert value["history"] == other["history"]
    assert found.values[0]["weights"] == found.values[1]["weights"]


def test_rolled_back_nothing_is_left(ranks: HorovodRanks, tmp_path: Path) -> None:
    without = ranks.run(f"{JOBS}:recomputed", tmp_path / "without", tune="", kind="conv").ok().values
    found = ranks.run(f"{JOBS}:recomputed", tmp_path, tune="plan", kind="conv", blocks=["sum0..sum2"], kept=False).ok()
    for value, other in zip(found.values, without, strict=True):
        assert value["verdict"] == "ROLLED_BACK" and value["patched"] == []
        assert value["state"] == other["state"]


@pytest.mark.parametrize(
    ("kind", "block", "says"),
    [
        ("dense", "b..drop", "block 'b..drop' can't be recomputed: it draws random numbers"),
        ("counting", "odd", "can't be recomputed: it runs AssignAddVariableOp, which leaves something behind"),
        ("costly", "odd", "block 'odd' can't be recomputed: layer 'odd' adds to the loss"),
        ("regular", "a..odd", "block 'a..odd' can't be recomputed: layer 'odd' adds to the loss"),
        ("masked", "words", "block 'words' can't be recomputed: a mask goes in or out"),
        ("twice", "a", "the model has no block 'a'"),
        ("plain", "nowhere", "the model has no block 'nowhere'"),
        ("plain", "b..a", "the model has no block 'b..a'"),
    ],
)
def test_what_must_not_run_twice_changes_nothing(
    ranks: HorovodRanks, tmp_path: Path, kind: str, block: str, says: str
) -> None:
    found = ranks.run(f"{JOBS}:recomputed", tmp_path, tune="plan", kind=kind, blocks=[block]).ok()
    for value in found.values:
        assert value["verdict"] == "STEPPED_ASIDE" and value["patched"] == []
    (line,) = found.lines("stepped aside")
    assert says in line and line.endswith("nothing was changed")
    assert "Traceback" not in "".join(found.logs)


def test_tensorflow_runs_it_twice(ranks: HorovodRanks, tmp_path: Path) -> None:
    """Convolutions and norms in the graph that TensorFlow's optimiser leaves: 4 and 3, those of the blocks again."""
    (value,) = ranks.run(f"{JOBS}:forward_ops", tmp_path, ranks=1).ok().values
    assert value["counts"] == [[4, 3], [7, 6], [8, 6], [8, 6]]
    assert value["same"] == [True] * 4  # the head too, whose weights are updated first
    none = "the model has no block"
    assert value["said"] == [
        f"{none} 'nowhere'", f"{none} 'sum1..sum0'", f"{none} 'sum0..sum9'",
        "block 'sum1' has a layer that another block has as well", f"{none} ''", f"{none} 'image'",
    ]  # fmt: skip
    assert value["patched"] == []


def test_no_weight_is_updated_before_its_second_pass_has_read_it(ranks: HorovodRanks, tmp_path: Path) -> None:
    """TensorFlow's optimiser drops that order where only the step's own dependencies say so."""
    (value,) = ranks.run(f"{JOBS}:updates_that_wait", tmp_path, ranks=1).ok().values
    assert len(value["waits"]) == 4 and all(waits == [True] for waits in value["waits"].values()), value["waits"]


def test_units_are_what_lies_between_two_cuts(ranks: HorovodRanks, tmp_path: Path) -> None:
    (conv,) = ranks.run(f"{JOBS}:unit_names", tmp_path, ranks=1, kind="conv").ok().values
    sums = [[f"sum{k}", [f"conv{k}", f"norm{k}", f"relu{k}", f"sum{k}"], ""] for k in range(3)]
    assert conv["units"] == [["stem", ["image", "stem"], ""], *sums, ["head", ["flat", "head"], ""]]


def test_memory_of_a_chain_by_hand(ranks: HorovodRanks, tmp_path: Path) -> None:
    """Four layers of tanh: each keeps its result, for the next layer's and its own backward pass."""
    (value,) = ranks.run(f"{JOBS}:by_hand", tmp_path, ranks=1).ok().values
    assert value["kept"] == {f"l{k}": 1.0 for k in range(4)} and value["outputs"] == [1.0] * 4
    assert value["order"] == [[1, 2, 12], [3, 4, 11], [5, 6, 10], [7, 8, 9]] and value["refused"] == [""] * 4
    # inputs, targets and four results, and at least a gradient
    assert 7 < value["peak"] < 10


@pytest.mark.timeout(240)
@pytest.mark.parametrize("alone", [False, True], ids=["two ranks", "one process"])
def test_made_to_fit(ranks: HorovodRanks, tmp_path: Path, alone: bool) -> None:
    """Between the least and what it takes: layers are recomputed, the measured peak is below, and as predicted."""
    given: dict[str, Any] = {"ranks": 1, "alone": True} if alone else {}
    plain = ranks.run(f"{JOBS}:over_budget", tmp_path / "plain", **given).ok()
    looked_at = ranks.run(f"{JOBS}:over_budget", tmp_path / "observe", budget=1 << 40, mode="observe", **given).ok()
    assert looked_at.values[0]["patched"] == []
    budget = round(0.85 * looked_at.values[0]["peak"])
    found = ranks.run(f"{JOBS}:over_budget", tmp_path / "tight", budget=budget, **given).ok()
    first = found.values[0]
    assert first["verdict"] == "KEPT" and "it fits" in first["reason"], (first["reason"], found.logs)
    assert first["plan"]["recompute"] and all(value["patched"] for value in found.values)
    assert not any("drop" in name for name in first["plan"]["recompute"])
    [measured] = first["measured"]
    # TensorFlow makes no result anew that the backward pass does not need, such as a block's last
    assert measured <= budget and 0.98 * measured <= first["predicted_bytes"] <= 1.06 * measured
    for made in (looked_at, found):
        assert [value["state"] for value in made.values] == [value["state"] for value in plain.values]


def test_cannot_be_made_to_fit(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = ranks.run(f"{JOBS}:over_budget", tmp_path, budget=1000).ok()
    first = found.values[0]
    assert first["verdict"] == "NO_BETTER_PLAN" and "fits" in first["reason"] and first["patched"] == []
