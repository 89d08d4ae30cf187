"""Reads ``outcome.json``, which the tuner leaves in the run folder, back into the rows of its table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dpro.errors import TraceError
from dpro.report.table import ArmRow
from dpro.verdict import timing

FILE = "outcome.json"


@dataclass(frozen=True)
class StoredOutcome:
    """What became of a tuned job: one row per arm, the first being the user's own settings."""

    verdict: str
    reason: str
    arms: list[ArmRow]


def read_outcome(folder: Path) -> StoredOutcome | None:
    """The outcome kept in ``folder``; None where no tuner finished there.

    Raises:
        TraceError: the file is there and is not what the tuner writes.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        arms = [(str(arm["name"]), arm["predicted_ms"], [float(ms) for ms in arm["times_ms"]]) for arm in raw["arms"]]
        predicted = [raw.get("dpro/replayed_ms"), *(told for _, told, _ in arms[1:])]
        verdict, reason = str(raw["verdict"]), str(raw["reason"])
        return StoredOutcome(verdict, reason, _rows(arms, [None if p is None else float(p) for p in predicted]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(path, f"not an outcome of dpro ({type(error).__name__})") from error


def _rows(arms: list[tuple[str, float | None, list[float]]], predicted: list[float | None]) -> list[ArmRow]:
    base = timing(arms[0][2]).median_ms if arms else 0.0
    rows = []
    for (name, _, times_ms), told in zip(arms, predicted, strict=False):
        timed = timing(times_ms)
        if not timed.steps:
            rows.append(ArmRow(name, told))
            continue
        ratio = base / timed.median_ms if base and timed.median_ms else None
        rows.append(ArmRow(name, told, timed.median_ms, timed.error_ms, ratio))
    return rows
