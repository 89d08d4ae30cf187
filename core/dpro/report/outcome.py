"""Reads ``outcome.json``, which the tuner leaves in the run folder, back into the table that it showed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dpro.errors import TraceError
from dpro.report.table import ArmRow
from dpro.trace.store import RunFolder


@dataclass(frozen=True)
class StoredOutcome:
    """What became of a tuned job: the verdict and one row per arm, as the job's own table had them."""

    verdict: str
    reason: str
    rows: list[ArmRow]


def read_outcome(folder: Path) -> StoredOutcome | None:
    """The outcome kept in ``folder``; None where no tuner finished there.

    Raises:
        TraceError: the file is there and is not what the tuner writes.
    """
    path = RunFolder(folder).outcome_file
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return StoredOutcome(str(raw["verdict"]), str(raw["reason"]), [_row(**row) for row in raw.get("rows", [])])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(path, f"not an outcome of dpro ({type(error).__name__})") from error


def _row(name: object, mark: object = "", **times: float | None) -> ArmRow:
    return ArmRow(str(name), mark=str(mark), **{key: None if ms is None else float(ms) for key, ms in times.items()})
