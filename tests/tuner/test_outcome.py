"""Which plan is recommended for a job that is started anew."""

from __future__ import annotations

import pytest

from dpro.outcome import Outcome, Verdict
from dpro.plan import Plan
from dpro.planning import Planned
from dpro.verdict import Comparison

GROUPED = Plan(cycle_time=4.0, tensor_groups=[["a"]], predicted_ms=90.0, baseline_ms=100.0)
ALONE = Plan(cycle_time=8.0, predicted_ms=92.0, baseline_ms=100.0)


@pytest.mark.parametrize(
    ("verdict", "ratio", "expected"),
    [
        (Verdict.NO_BETTER_PLAN, None, "grouped"),
        (Verdict.ROLLED_BACK, 0.99, "alone"),  # groups were tried and were no help
        (Verdict.KEPT, 0.95, "grouped"),
        (Verdict.KEPT, 0.89, None),  # this job is faster than that one would be
    ],
)
def test_only_what_beats_the_job_as_it_is(verdict: Verdict, ratio: float | None, expected: str | None) -> None:
    outcome = Outcome(verdict, "", 100, comparison=None if ratio is None else Comparison(ratio, 0.01, True))
    assert outcome.at_start() is None
    outcome.planned = Planned([100.0], 100.0, None, at_start=[("grouped", GROUPED), ("alone", ALONE)])
    found = outcome.at_start()
    assert (found[0] if found else None) == expected
