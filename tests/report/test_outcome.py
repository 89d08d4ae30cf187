"""What the tuner left behind, read back; and files that are something else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dpro.errors import TraceError
from dpro.report.outcome import StoredOutcome, read_outcome
from dpro.report.table import ArmRow

ROWS = [
    ArmRow("your settings", 98.0, 100.0, 1.5, 1.0),
    ArmRow("6 buckets", 79.0, 80.0, 0.5, 1.25, "in force"),
    ArmRow("not reached", 85.0),
]
KEPT: dict[str, Any] = {"verdict": "KEPT", "reason": "faster by 10 %"}


def test_rows_come_back_as_the_job_had_them(tmp_path: Path) -> None:
    stored = {**KEPT, "arms": [{"name": "your settings"}], "rows": [asdict(row) for row in ROWS]}
    (tmp_path / "outcome.json").write_text(json.dumps(stored))
    assert read_outcome(tmp_path) == StoredOutcome("KEPT", "faster by 10 %", ROWS)


def test_an_outcome_without_rows_still_has_its_verdict(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps(KEPT))
    assert read_outcome(tmp_path) == StoredOutcome("KEPT", "faster by 10 %", [])


def test_no_outcome_is_none(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[]", "{}", '{"verdict": 1}'),
        *(json.dumps({**KEPT, "rows": rows}) for rows in (1, [1], [{}], [{"name": "x", "ratio": "fast"}])),
        json.dumps({**KEPT, "rows": [{"name": "x", "colour": 1}]}),
    ],
)
def test_another_file_of_that_name_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "outcome.json").write_text(text)
    with pytest.raises(TraceError, match=r"outcome\.json: not an outcome"):
        read_outcome(tmp_path)
