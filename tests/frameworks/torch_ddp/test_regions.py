"""Submodules compiled in a running DDP job: same training within rounding, one line where the compiler can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.launch import Ranks, Result

JOBS = "tests.frameworks.torch_ddp.region_jobs"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("inductor"))


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
