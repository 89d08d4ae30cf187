"""Real two-process jobs over their memory budget: made to fit by what leaves the result as it is, or left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.launch import Ranks

JOB = "tests.frameworks.torch_ddp.jobs:over_budget"


def test_made_to_fit(ranks: Ranks, tmp_path: Path) -> None:
    """Seven tenths of what it takes: blocks are recomputed, the measured peak is below, and as predicted."""
    plain = ranks.run(JOB, tmp_path / "plain").ok()
    roomy = ranks.run(JOB, tmp_path / "roomy", budget=1 << 40).ok()
    assert roomy.values[0]["forwards"] == 0 and "recompute" not in roomy.values[0]["plan"]
    peak = roomy.values[0]["peak"]
    budget = round(0.7 * peak)
    found = ranks.run(JOB, tmp_path / "tight", budget=budget).ok()
    first = found.values[0]
    assert first["verdict"] == "KEPT" and "it fits" in first["reason"], first
    assert first["plan"]["recompute"] and {value["forwards"] > 0 for value in found.values} == {True}
    [measured] = first["measured"]
    assert measured <= budget and measured == pytest.approx(first["predicted_bytes"], rel=0.02)
    assert [value["weights"] for value in found.values] == [value["weights"] for value in plain.values]


def test_cannot_be_made_to_fit(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(JOB, tmp_path / "plain", steps=20).ok()
    found = ranks.run(JOB, tmp_path / "with", steps=20, budget=1000).ok()
    first = found.values[0]
    assert first["verdict"] == "NO_BETTER_PLAN" and "fits" in first["reason"] and first["forwards"] == 0
    assert [value["weights"] for value in found.values] == [value["weights"] for value in plain.values]


def test_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    """Seven tenths of what it takes: batches are cut. Same weights but for
    rounding, same loss."""
    plain = ranks.run(JOB, tmp_path / "roomy", parts=True, dropout=0.0, budget=1 << 40).ok()
    peak = plain.values[0]["peak"]
    found = ranks.run(JOB, tmp_path / "tight", parts=True, dropout=0.0, budget=round(0.7 * peak)).ok()
    first = found.values[0]
    assert first["verdict"] == "KEPT", first
    assert first["plan"]["accumulate"] > 1
    [measured] = first["measured"]
    assert measured <= 0.7 * peak and measured == pytest.approx(first["predicted_bytes"], rel=0.05)
    for with_dpro, without in zip(found.values, plain.values, strict=True):
        assert with_dpro["values"] == pytest.approx(without["values"], abs=1e-4, rel=1e-5)
        assert with_dpro["losses"] == pytest.approx(without["losses"], rel=1e-5)


def test_dropout_draws_otherwise_for_parts(ranks: Ranks, tmp_path: Path) -> None:
    """Batches that may not be cut are not, and the job is told why."""
    found = ranks.run(JOB, tmp_path, parts=True, dropout=0.1, steps=20, budget=1000).ok()
    first = found.values[0]
    assert first["verdict"] == "NO_BETTER_PLAN" and any("dropout" in line for line in first["warnings"])
