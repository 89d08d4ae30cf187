"""Submodules compiled in a running DDP job: same training within rounding, one line where the compiler can't."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.launch import Ranks, Result

JOBS = "tests.frameworks.torch_ddp.region_jobs"


@pytest.fixture(scope="module")
def cache() -> str:
    """Kept from run to run: what inductor has to compile first takes it half a minute of CPU time."""
    return str(Path(tempfile.gettempdir()) / "dpro-tests-inductor")


def run(ranks: Ranks, folder: Path, cache: str, job: str = "regions", **arguments: Any) -> Result:
    env = {"TORCHINDUCTOR_CACHE_DIR": cache}
    return ranks.run(f"{JOBS}:{job}", folder, env=env, timeout_s=170, **arguments).ok()


def close(found: Result, without: Result) -> None:
    """Parameters and running statistics within 1e-5 of their size, after 50 steps."""
    for value, other in zip(found.values, without.values, strict=True):
        for name, numbers in other["numbers"].items():
            apart = np.linalg.norm(np.subtract(value["numbers"][name], numbers))
            assert apart <= 1e-5 * max(float(np.linalg.norm(numbers)), 1e-3), name
    # each rank compiles for itself, and they stay together (statistics are a rank's own until the next forward pass)
    learned = [{n: v for n, v in one["numbers"].items() if n.endswith(("weight", "bias"))} for one in found.values]
    assert learned[0] == learned[1]


@pytest.mark.parametrize("buckets", [True, False], ids=["buckets as well", "regions alone"])
def test_weights_are_close_after_50_steps(ranks: Ranks, tmp_path: Path, cache: str, buckets: bool) -> None:
    names = ["blocks.0", "blocks.1"]
    without = run(ranks, tmp_path / "without", cache, tune="", names=names)
    found = run(ranks, tmp_path / "with", cache, tune="plan", names=names, buckets=buckets)
    for value, other in zip(found.values, without.values, strict=True):
        assert value["verdict"] == "KEPT", found.logs
        assert value["compiled"] == names
        assert value["wrapped"] == [f"module.{name}" for name in names]
        assert other["compiled"] == other["wrapped"] == []
        assert (len(value["buckets"]) == 1) is not buckets
        assert value["config"] == []
    assert found.lines("not compiled") == []
    close(found, without)


def test_rolled_back_the_submodules_are_their_own_again(ranks: Ranks, tmp_path: Path, cache: str) -> None:
    for value in run(ranks, tmp_path, cache, tune="plan", names=["blocks.0", "blocks.2"], kept=False).values:
        assert value["verdict"] == "ROLLED_BACK"
        assert value["compiled"] == value["wrapped"] == []
        assert value["config"] == []


@pytest.mark.parametrize(
    ("fault", "compiled", "says"),
    [({"breaks": True}, ["blocks.0"], "data-dependent"), ({"wrong": True}, [], "compiled it has other results")],
    ids=["a break in the graph", "a compiler that is wrong"],
)
def test_what_the_compiler_can_not_do_right_goes_on_as_it_was(
    ranks: Ranks, tmp_path: Path, cache: str, fault: dict[str, bool], compiled: list[str], says: str
) -> None:
    names = ["blocks.0", "blocks.2"]
    without = run(ranks, tmp_path / "without", cache, tune="", names=names, breaks="breaks" in fault)
    found = run(ranks, tmp_path / "with", cache, tune="plan", names=names, **fault)
    for value in found.values:
        assert value["verdict"] == "KEPT", found.logs
        assert value["compiled"] == compiled
        assert value["config"] == []
    lines = found.lines("not compiled")
    assert len(lines) == 2  # each rank for itself, once
    assert all(says in line for line in lines), lines
    assert "Traceback" not in "".join(found.logs)
    close(found, without)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["nowhere"], "the model has no submodule 'nowhere'"),
        (["blocks", "blocks.0"], "submodule 'blocks.0' is in 'blocks', which is to be compiled as a whole"),
        ([""], "submodule '' is the whole model"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(
    ranks: Ranks, tmp_path: Path, cache: str, names: list[str], says: str
) -> None:
    found = run(ranks, tmp_path, cache, tune="plan", names=names)
    for value in found.values:
        assert value["verdict"] == "STEPPED_ASIDE"
        assert value["wrapped"] == []
    (line,) = found.lines("stepped aside")
    assert says in line
    assert line.endswith("nothing was changed")


def test_regions_are_timed_beside_the_training_and_compiled_where_the_search_says_so(
    ranks: Ranks, tmp_path: Path, cache: str
) -> None:
    without, suggested, applied = (
        run(ranks, tmp_path / (mode or "without"), cache, "searched", mode=mode) for mode in ("", "suggest", "apply")
    )
    for value, other in zip(suggested.values, without.values, strict=True):
        assert value["verdict"] in ("SUGGESTED", "NO_BETTER_PLAN"), suggested.logs
        # random numbers and running statistics too: all that was timed left no trace
        assert value["numbers"] == other["numbers"]
        assert value["compiled"] == []
    inner = ["norm.weight", "norm.bias", "wide.weight", "wide.bias", "narrow.weight", "narrow.bias"]
    for found in (suggested, applied):
        assert found.values[1]["timed"] == []  # rank 0 alone
        timed = sorted(found.values[0]["timed"])
        assert [one[0] for one in timed] == ["blocks.0", "blocks.1", "blocks.2"]
        assert timed[0][1:] == [f"blocks.0.{name}" for name in inner]
        assert timed[1][1:] == ["blocks.1.0.weight", "blocks.1.0.bias"]
        assert found.values[0]["kinds"] == 2  # the first block and the last compute alike
        assert all(ns > 0 for times in found.values[0]["ns"] for ns in times)
        ops = set(found.values[0]["ops"])
        assert {f"model/blocks.{at}/aten::linear" for at in range(3)} <= ops
        node = "autograd::engine::evaluate_function: TanhBackward0"
        assert {name for name in ops if name.endswith(node)} == {
            f"gradient_tape/model/blocks.{k}/{node}" for k in (0, 2)
        }
    for value in applied.values:
        assert value["verdict"] == "KEPT", applied.logs
        assert value["planned"]
        assert value["compiled"] == sorted(value["planned"])
    close(applied, without)
