"""Jobs over their memory budget as tests, for every adapter that can have blocks recomputed.

A framework's test module names the jobs that run on every rank, and provides a ``ranks`` fixture that imported the
framework::

    class TestMemory(FitsItsBudget):
        jobs = "tests.frameworks.torch_ddp.memory_jobs"

``over_budget`` is as that one, ``to_and_fro`` and ``user_error`` take whether there are ``plans``; they return what
:func:`~tests.frameworks.torch_ddp.memory_jobs.trained`, ``switched`` and ``broken_off`` do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.launch import Ranks


def fits(first: dict[str, Any], budget: float, rel: float) -> None:
    """KEPT, the measured peak within the budget and as predicted."""
    assert first["verdict"] == "KEPT" and "it fits" in first["reason"], first
    [measured] = first["measured"]
    assert measured <= budget and measured == pytest.approx(first["predicted_bytes"], rel=rel)


class FitsItsBudget:
    """The tests; real jobs whose activations are most of their memory."""

    jobs: str

    def test_made_to_fit(self, ranks: Ranks, tmp_path: Path) -> None:
        """Seven tenths of what it takes: blocks are recomputed, the measured peak is below, and as predicted."""
        plain = ranks.run(f"{self.jobs}:over_budget", tmp_path / "plain").ok()
        roomy = ranks.run(f"{self.jobs}:over_budget", tmp_path / "roomy", budget=1 << 40).ok()
        assert roomy.values[0]["forwards"] == 0 and "recompute" not in roomy.values[0]["plan"]
        budget = round(0.7 * roomy.values[0]["peak"])
        found = ranks.run(f"{self.jobs}:over_budget", tmp_path / "tight", budget=budget).ok()
        fits(found.values[0], budget, rel=0.02)
        assert found.values[0]["plan"]["recompute"] and {value["forwards"] > 0 for value in found.values} == {True}
        assert [value["weights"] for value in found.values] == [value["weights"] for value in plain.values]

    def test_cannot_be_made_to_fit(self, ranks: Ranks, tmp_path: Path) -> None:
        plain = ranks.run(f"{self.jobs}:over_budget", tmp_path / "plain", steps=20).ok()
        found = ranks.run(f"{self.jobs}:over_budget", tmp_path / "with", steps=20, budget=1000).ok()
        first = found.values[0]
        assert first["verdict"] == "NO_BETTER_PLAN" and "fits" in first["reason"] and first["forwards"] == 0
        assert [value["weights"] for value in found.values] == [value["weights"] for value in plain.values]

    def test_micro_batches(self, ranks: Ranks, tmp_path: Path) -> None:
        """Seven tenths of what it takes: batches are cut. Same weights but for rounding, same loss."""
        job = f"{self.jobs}:over_budget"
        plain = ranks.run(job, tmp_path / "roomy", parts=True, dropout=0.0, budget=1 << 40).ok()
        budget = round(0.7 * plain.values[0]["peak"])
        found = ranks.run(job, tmp_path / "tight", parts=True, dropout=0.0, budget=budget).ok()
        fits(found.values[0], budget, rel=0.05)
        assert found.values[0]["plan"]["accumulate"] > 1
        for with_dpro, without in zip(found.values, plain.values, strict=True):
            assert with_dpro["values"] == pytest.approx(without["values"], abs=1e-4, rel=1e-5)
            assert with_dpro["losses"] == pytest.approx(without["losses"], rel=1e-5)

    def test_dropout_draws_otherwise_for_parts(self, ranks: Ranks, tmp_path: Path) -> None:
        """Batches that may not be cut are not, and the job is told why."""
        job = f"{self.jobs}:over_budget"
        found = ranks.run(job, tmp_path, parts=True, dropout=0.1, steps=20, budget=1000).ok()
        first = found.values[0]
        assert first["verdict"] == "NO_BETTER_PLAN" and any("dropout" in line for line in first["warnings"])

    def test_blocks_to_and_fro(self, ranks: Ranks, tmp_path: Path) -> None:
        """In mid-training, by the adapter; what doesn't fit changes nothing."""
        plain = ranks.run(f"{self.jobs}:to_and_fro", tmp_path / "plain", plans=False).ok()
        found = ranks.run(f"{self.jobs}:to_and_fro", tmp_path / "with", plans=True).ok()
        for value in found.values:
            assert value["in_force"] == [["1", "2.0"], ["0"], [], [], []]
            assert value["left"] == []
            assert [error.partition(" has ")[2] for error in value["errors"]] == [
                "no block '1.9'", "no block '1.9'", "no block '1.0..9'", "no block '1.0..9'",
            ]  # fmt: skip
        assert [value["weights"] for value in found.values] == [value["weights"] for value in plain.values]

    def test_a_users_error_between_parts(self, ranks: Ranks, tmp_path: Path) -> None:
        """A job that leaves a batch out, by its own exception, goes on as it would with whole batches."""
        plain = ranks.run(f"{self.jobs}:user_error", tmp_path / "plain", plans=False).ok()
        found = ranks.run(f"{self.jobs}:user_error", tmp_path / "with", plans=True).ok()
        for value, other in zip(found.values, plain.values, strict=True):
            assert value["skipped"] == other["skipped"] == 1
            for numbers, expected in zip(value["values"], other["values"], strict=True):
                assert numbers == pytest.approx(expected, abs=1e-6)
