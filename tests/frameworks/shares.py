"""Ranks that share each batch, as tests, for every adapter whose jobs go through ``torch_micro``.

A framework's test module names the jobs that run on every rank, and provides a ``ranks`` fixture::

    class TestShares(SharesBatches):
        jobs = "tests.frameworks.torch_ddp.share_jobs"

``dealt`` and ``slow_rank`` return what :func:`~tests.frameworks.torch_ddp.share_jobs.dealt_out` and ``found`` do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.launch import Ranks


class SharesBatches:
    """The tests; the reference is one device that trains with the whole batches."""

    jobs: str

    def test_unequal_shares_train_alike(self, ranks: Ranks, tmp_path: Path) -> None:
        """Equal, 12 : 4, 1 : 15 and equal again, two steps each: one device's weights, and no more of it afterwards."""
        found = ranks.run(f"{self.jobs}:dealt", tmp_path).ok()
        assert [value["sizes"] for value in found.values] == [[8, 8, 12, 12, 1, 1, 8, 8], [8, 8, 4, 4, 15, 15, 8, 8]]
        for value in found.values:
            assert value["weights"] == pytest.approx(value["alone"], abs=1e-6)
            assert [error.split(" samples ")[0] for error in value["errors"]] == ["9 + 9", "16 + 0", "8 + 4 + 4"]
        one, other = (value["weights"] for value in found.values)
        assert one == other

    def test_a_slow_rank_gets_less(self, ranks: Ranks, tmp_path: Path) -> None:
        """Captured, planned, put in force and kept in the running job; the same training."""
        found = ranks.run(f"{self.jobs}:slow_rank", tmp_path).ok()
        first, second = found.values
        assert first["verdict"] == "KEPT", first
        shares = first["plan"]["batch_shares"]
        assert sum(shares) == 64 and shares == second["plan"]["batch_shares"]
        assert shares[1] < 26, shares
        assert [first["sizes"][-1], second["sizes"][-1]] == shares
        for value in found.values:
            assert value["weights"] == pytest.approx(value["alone"], abs=2e-5)

    def test_batch_norm_is_found_out(self, ranks: Ranks, tmp_path: Path) -> None:
        """Whose gradients are not those of its samples: no shares are offered, and the job is told why."""
        found = ranks.run(f"{self.jobs}:slow_rank", tmp_path, norm=True).ok()
        assert all(set(value["sizes"]) == {32} for value in found.values)
        assert any("shares" in line and "gradients" in line for line in found.values[0]["warnings"])
