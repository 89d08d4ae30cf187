"""Layers compiled by XLA in a running job: same training within rounding, one line where XLA can't."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.frameworks.horovod_torch.conftest import HorovodRanks

JOBS = "tests.frameworks.horovod_keras.region_jobs"


@pytest.mark.parametrize(
    ("kind", "names", "groups"),
    [("norms", ["a", "b", "bn", "ln"], True), ("own layer", ["twice", "b"], False)],
    ids=["norms, groups as well", "a layer of the users"],
)
def test_weights_are_close_after_50_steps(
    ranks: HorovodRanks, tmp_path: Path, kind: str, names: list[str], groups: bool
) -> None:
    without = ranks.run(f"{JOBS}:regions", tmp_path / "without", tune="", kind=kind, names=names).ok().values
    found = ranks.run(f"{JOBS}:regions", tmp_path / "with", tune="plan", kind=kind, names=names, groups=groups).ok()
    for value, other in zip(found.values, without, strict=True):
        assert value["verdict"] == "KEPT", found.logs
        assert value["wrapped"] == sorted(names)
        assert len(value["scopes"]) == 2  # forward and backward
        assert other["scopes"] == []
        for name, numbers in other["numbers"].items():
            apart = np.linalg.norm(np.subtract(value["numbers"][name], numbers))
            assert apart <= 1e-5 * max(np.linalg.norm(numbers), 1e-3), name
    # each rank compiles for itself, and they stay together
    assert found.values[0]["weights"] == found.values[1]["weights"]


def test_rolled_back_the_layers_are_their_own_again(ranks: HorovodRanks, tmp_path: Path) -> None:
    found = ranks.run(f"{JOBS}:regions", tmp_path, tune="plan", kind="norms", names=["a", "bn"], kept=False).ok()
    for value in found.values:
        assert value["verdict"] == "ROLLED_BACK"
        assert value["wrapped"] == value["scopes"] == []


@pytest.mark.parametrize(
    ("kind", "names", "says"),
    [
        ("lstm", ["lstm"], "XLA compiles nothing of layer 'lstm'"),
        ("lstm", ["lstm/lstm_cell"], "layer 'lstm/lstm_cell' is not called on its own in training"),
        ("dropout", ["a", "drop"], "layer 'drop' draws random numbers"),
        ("norms", ["a", "nowhere"], "the model has no layer 'nowhere'"),
    ],
)
def test_what_xla_refuses_changes_nothing(
    ranks: HorovodRanks, tmp_path: Path, kind: str, names: list[str], says: str
) -> None:
    found = ranks.run(f"{JOBS}:regions", tmp_path, tune="plan", kind=kind, names=names).ok()
    for value in found.values:
        assert value["verdict"] == "STEPPED_ASIDE"
        assert value["wrapped"] == value["scopes"] == []
    (line,) = found.lines("stepped aside")
    assert says in line
    assert line.endswith("nothing was changed")
    assert "Traceback" not in "".join(found.logs)


def test_only_training_is_compiled(ranks: HorovodRanks, tmp_path: Path) -> None:
    for value in ranks.run(f"{JOBS}:evaluated", tmp_path, tune="plan").ok().values:
        assert value["verdict"] == "KEPT"
        assert value["same"]


def test_regions_are_timed_beside_the_training_and_compiled_where_the_search_says_so(
    ranks: HorovodRanks, tmp_path: Path
) -> None:
    without, suggested, applied = (
        ranks.run(f"{JOBS}:searched", tmp_path / (mode or "without"), mode=mode).ok()
        for mode in ("", "suggest", "apply")
    )
    for value, other in zip(suggested.values, without.values, strict=True):
        assert value["verdict"] == "SUGGESTED", suggested.logs
        # moving averages too: all that was timed left no trace
        assert value["numbers"] == other["numbers"]
        assert value["wrapped"] == []
    for found in (suggested, applied):
        assert found.values[1]["timed"] == []  # rank 0 alone
        assert sorted(found.values[0]["timed"]) == [["bn"], ["bn", "ln"], ["ln"]]
        assert all(ns > 0 for pair in found.values[0]["ns"] for ns in pair)
    for value, other in zip(applied.values, without.values, strict=True):
        assert value["verdict"] == "KEPT", applied.logs
        assert set(value["wrapped"]) <= {"bn", "ln"}
        assert value["wrapped"]
        for name, numbers in other["numbers"].items():
            apart = np.linalg.norm(np.subtract(value["numbers"][name], numbers))
            assert apart <= 1e-5 * max(np.linalg.norm(numbers), 1e-3), name


def test_what_is_shorter_than_a_call_is_split_alike(ranks: HorovodRanks, tmp_path: Path) -> None:
    (value,) = ranks.run(f"{JOBS}:split", tmp_path, ranks=1).ok().values
    # less the empty call; forward of 2, or longer than both, is noise: a third of 90 and 60, 90 and 50, and of 3 each
    assert value["times"] == [[30, 70, 20, 40], [30, 60, 20, 40], [30, 60, 16, 34], [1, 2, 1, 2]]
