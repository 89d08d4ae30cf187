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
