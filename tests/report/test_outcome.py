"""What the tuner left behind, read back; and files that are something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpro.errors import TraceError
from dpro.report.outcome import read_outcome
from dpro.report.table import ArmRow

KEPT: dict[str, Any] = {
    "verdict": "KEPT",
    "reason": "faster by 10 %",
    "dpro/replayed_ms": 98.0,
    "arms": [
        {"name": "your settings", "predicted_ms": None, "times_ms": [100.0, 99.0, 101.0]},
        {"name": "6 buckets", "predicted_ms": 79.0, "times_ms": [80.0]},
        {"name": "not reached", "predicted_ms": 85.0, "times_ms": []},
    ],
}


def test_rows_of_the_arms(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps(KEPT))
    got = read_outcome(tmp_path)
    assert got is not None and (got.verdict, got.reason) == ("KEPT", "faster by 10 %")
    # standard error of the median of 99, 100, 101: 1.2533 · (1.4826 · 1) / √3
    assert got.arms[0] == ArmRow("your settings", 98.0, 100.0, pytest.approx(1.2533 * 1.4826 / 3**0.5), 1.0)
    assert got.arms[1] == ArmRow("6 buckets", 79.0, 80.0, 0.0, 1.25)
    assert got.arms[2] == ArmRow("not reached", 85.0)


def test_no_outcome_is_none(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"verdict": 1}', json.dumps({**KEPT, "arms": [{"name": 1}]})])
def test_another_file_of_that_name_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "outcome.json").write_text(text)
    with pytest.raises(TraceError, match=r"outcome\.json: not an outcome"):
        read_outcome(tmp_path)
