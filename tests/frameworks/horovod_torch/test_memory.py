"""Real two-process Horovod jobs over their memory budget: made to fit, with the same bits, or left alone."""

from __future__ import annotations

from tests.frameworks.over_budget import FitsItsBudget


class TestMemory(FitsItsBudget):
    jobs = "tests.frameworks.horovod_torch.memory_jobs"
