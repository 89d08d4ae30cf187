"""A plan's cycle time and the environment, in processes with Horovod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.horovod_torch.conftest import HorovodRanks

JOBS = "tests.frameworks.horovod_torch.start_jobs"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "6.0"),
        ({"HOROVOD_CYCLE_TIME": "2"}, "2"),  # the job's own stays
        ({"HOROVOD_ELASTIC": "1"}, None),
        ({"DPRO": "suggest"}, None),
        ({"DPRO_PLAN": "/nowhere.json"}, None),
    ],
    ids=str,
)
def test_the_environment_before_init(
    ranks: HorovodRanks, tmp_path: Path, env: dict[str, str], expected: str | None
) -> None:
    found = ranks.run(f"{JOBS}:environment", tmp_path, env=env).ok()
    assert [value["cycle_time"] for value in found.values] == [expected] * 2


@pytest.mark.parametrize(
    ("started", "groups", "expected"),
    [
        ("6", True, {"left": ["tensor_groups"], "refused": ""}),
        ("6.0", False, {"left": None, "refused": ""}),
        ("7", True, {"left": None, "refused": "HOROVOD_CYCLE_TIME=6 (this one has 7)"}),
        ("", True, {"left": None, "refused": "(this one has none)"}),
        ("often", True, {"left": None, "refused": "(this one has often)"}),
    ],
)
def test_what_is_left_of_a_plan(
    ranks: HorovodRanks, tmp_path: Path, started: str, groups: bool, expected: dict[str, Any]
) -> None:
    for value in ranks.run(f"{JOBS}:left", tmp_path, started=started, groups=groups).ok().values:
        assert value["left"] == expected["left"]
        assert expected["refused"] in value["refused"] and bool(value["refused"]) == bool(expected["refused"])
