"""Real two-process jobs over their memory budget: made to fit by what leaves the result as it is, or left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.launch import Ranks
from tests.frameworks.over_budget import FitsItsBudget, fits

JOBS = "tests.frameworks.torch_ddp.memory_jobs"


class TestMemory(FitsItsBudget):
    jobs = JOBS


def test_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    """Seven tenths of what it takes: batches are cut. Same weights but for rounding, same loss."""
    plain = ranks.run(f"{JOBS}:over_budget", tmp_path / "roomy", parts=True, dropout=0.0, budget=1 << 40).ok()
    peak = plain.values[0]["peak"]
    found = ranks.run(f"{JOBS}:over_budget", tmp_path / "tight", parts=True, dropout=0.0, budget=round(0.7 * peak)).ok()
    first = found.values[0]
    fits(first, 0.7 * peak, rel=0.05)
    assert first["plan"]["accumulate"] > 1
    for with_dpro, without in zip(found.values, plain.values, strict=True):
        assert with_dpro["values"] == pytest.approx(without["values"], abs=1e-4, rel=1e-5)
        assert with_dpro["losses"] == pytest.approx(without["losses"], rel=1e-5)


def test_dropout_draws_otherwise_for_parts(ranks: Ranks, tmp_path: Path) -> None:
    """Batches that may not be cut are not, and the job is told why."""
    found = ranks.run(f"{JOBS}:over_budget", tmp_path, parts=True, dropout=0.1, steps=20, budget=1000).ok()
    first = found.values[0]
    assert first["verdict"] == "NO_BETTER_PLAN" and any("dropout" in line for line in first["warnings"])
