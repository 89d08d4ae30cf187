"""What came of the tuning of one job: the verdict, what was measured, and the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from dpro.plan import Plan
from dpro.trace.byteps import launch_bytes
from dpro.verdict import Comparison, Window

if TYPE_CHECKING:
    from dpro.planning import Planned


class Verdict(Enum):
    KEPT = "KEPT"
    ROLLED_BACK = "ROLLED BACK"
    NO_BETTER_PLAN = "NO BETTER PLAN"
    OBSERVED = "OBSERVED"
    SUGGESTED = "SUGGESTED"
    STEPPED_ASIDE = "STEPPED ASIDE"


@dataclass
class Arm:
    """One configuration measured in the job; ``plan`` is None for the user's own settings."""

    plan: Plan | None
    name: str
    predicted_ms: float | None = None
    #: the most that a rank had allocated at once, bytes; None: not measured
    peak_bytes: int | None = None
    windows: list[Window] = field(default_factory=list)

    def times_ms(self) -> list[float]:
        return [ms for window in self.windows for ms in window.times_ms]


@dataclass
class Outcome:
    """What came of it. Times are ms per optimizer step of the slowest rank; None = not reached."""

    verdict: Verdict
    reason: str
    steps: int
    baseline_ms: float | None = None
    replayed_ms: float | None = None
    predicted_ms: float | None = None
    measured_ms: float | None = None
    capture_overhead_pct: float | None = None
    comparison: Comparison | None = None
    plan: Plan | None = None
    arms: list[Arm] = field(default_factory=list)
    planned: Planned | None = None

    def at_start(self) -> tuple[str, Plan] | None:
        """Name and plan for a job that is started anew, if it should beat what this one came to."""
        if self.verdict is Verdict.KEPT and self.plan is not None and self.plan.partitions:
            if self.plan.in_flight_bytes is not None:
                return None  # nothing that a job is started with does that
            bound = launch_bytes(self.plan.partitions)
            started = Plan(
                fingerprint=self.plan.fingerprint,
                partition_bytes=bound,
                predicted_ms=self.measured_ms,
                baseline_ms=self.baseline_ms,
            )
            return f"BYTEPS_PARTITION_BYTES={bound}", started
        reached = self.comparison.ratio if self.comparison is not None and self.verdict is Verdict.KEPT else 1.0
        for name, plan in self.planned.at_start if self.planned is not None else []:
            if self.verdict is Verdict.ROLLED_BACK and plan.tensor_groups is not None:
                continue  # its groups were no help
            if (plan.predicted_ms or 0.0) < reached * (plan.baseline_ms or 0.0):
                return name, plan
        return None

    def metrics(self) -> dict[str, float]:
        """The figures that exist, for a metrics logger."""
        named = {
            "dpro/baseline_ms": self.baseline_ms,
            "dpro/replayed_ms": self.replayed_ms,
            "dpro/predicted_ms": self.predicted_ms,
            "dpro/measured_ms": self.measured_ms,
            "dpro/capture_overhead_pct": self.capture_overhead_pct,
            "dpro/kept": float(self.verdict is Verdict.KEPT),
        }
        return {key: float(value) for key, value in named.items() if value is not None}
