"""Real two-process jobs over their memory budget: made to fit by what leaves the result as it is, or left alone."""

from __future__ import annotations

from tests.frameworks.over_budget import FitsItsBudget


class TestMemory(FitsItsBudget):
    jobs = "tests.frameworks.torch_ddp.memory_jobs"
