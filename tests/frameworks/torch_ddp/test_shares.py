"""Real two-process jobs whose ranks share each batch: unequal shares, the training of one device."""

from __future__ import annotations

from tests.frameworks.shares import SharesBatches


class TestShares(SharesBatches):
    jobs = "tests.frameworks.torch_ddp.share_jobs"
