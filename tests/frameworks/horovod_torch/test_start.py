"""A plan's cycle time and the environment, in processes with Horovod."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.horovod_torch.conftest import HorovodRanks

JOBS = "tests.frameworks.horovod_torch.start_jobs"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "6.0"),
        ({"HOROVOD_CYCLE_TIME": "2"}, "2"),  # the job's own stays
        ({"HOROVOD_ELASTIC": "1"}, None),
        ({"HOROVOD_AUTOTUNE": "1"}, None),
        ({"HOROVOD_FUSION_THRESHOLD": "1048576"}, None),
        ({"HOROVOD_SIZE": "3"}, None),  # the plan is for two ranks
        ({"DPRO": "suggest"}, None),
        ({"DPRO_PLAN": "/nowhere.json"}, None),
    ],
    ids=str,
)
def test_the_environment_before_init(
    ranks: HorovodRanks, tmp_path: Path, env: dict[str, str], expected: str | None
) -> None:
    found = ranks.run(f"{JOBS}:environment", tmp_path, env={"HOROVOD_SIZE": "2"} | env).ok()
    assert [value["cycle_time"] for value in found.values] == [expected] * 2


@pytest.mark.parametrize(
    ("started", "groups", "says"),
    [
        ("6", True, "started with the plan's cycle time, 6 ms"),
        ("6.0", False, "started with the plan's cycle time, 6 ms"),
        ("7", True, "HOROVOD_CYCLE_TIME=6 (this one has 7)"),
        ("", False, "(this one has none)"),
    ],
)
def test_what_is_left_of_a_plan(ranks: HorovodRanks, tmp_path: Path, started: str, groups: bool, says: str) -> None:
    """Whatever the job was started with, it is tuned; what was predicted of both together is no prediction now."""
    for value in ranks.run(f"{JOBS}:left", tmp_path, started=started, groups=groups).ok().values:
        assert value["left"] == (["tensor_groups"] if groups else None)
        assert not value["predicted"]
        assert says in value["says"]
