"""Submodules compiled in a running Horovod job, whose optimizer does not know the model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.frameworks.horovod_torch.conftest import HorovodRanks

JOB = "tests.frameworks.horovod_torch.region_jobs:regions"
#: Kept from run to run: what inductor has to compile first takes it half a minute of CPU time.
ENV = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "dpro-tests-inductor")}


@pytest.mark.parametrize("groups", [None, [["head.bias", "head.weight"]]], ids=["regions alone", "groups as well"])
def test_weights_are_close_after_50_steps(ranks: HorovodRanks, tmp_path: Path, groups: list[list[str]] | None) -> None:
    names = ["blocks.0", "blocks.2"]
    run = {"names": names, "groups": groups, "env": ENV, "timeout_s": 170.0}
    without = ranks.run(JOB, tmp_path / "without", tune="", **run).ok()
    found = ranks.run(JOB, tmp_path / "with", tune="plan", **run).ok()
    for value, other in zip(found.values, without.values, strict=True):
        assert value["verdict"] == "KEPT", found.logs
        assert value["compiled"] == names
        assert value["allowed"]
        assert other["compiled"] == []
        for name, numbers in other["numbers"].items():
            apart = np.linalg.norm(np.subtract(value["numbers"][name], numbers))
            assert apart <= 1e-5 * max(float(np.linalg.norm(numbers)), 1e-3), name
    learned = [{n: v for n, v in one["numbers"].items() if n.endswith(("weight", "bias"))} for one in found.values]
    assert learned[0] == learned[1]
