"""What one rank does about a plan's cycle time; Horovod itself need not run for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dpro.plan import Plan
from dpro_integrations.horovod_start import start_with_plan, started_with
from tests.frameworks.horovod_torch.jobs import GROUPS


def environment() -> dict[str, Any]:
    """The cycle time that ``hvd.init()`` would find."""
    plan = Path("at_start.json").resolve()
    Plan(fingerprint={"world_size": "2"}, cycle_time=6.0).save(plan)
    os.environ.setdefault("DPRO_PLAN", str(plan))
    start_with_plan()
    return {"cycle_time": os.environ.get("HOROVOD_CYCLE_TIME")}


def left(started: str, groups: bool) -> dict[str, Any]:
    """What is left to put in force of a plan in a job that was ``started`` with a cycle time."""
    if started:
        os.environ["HOROVOD_CYCLE_TIME"] = started
    groups_of_plan = GROUPS if groups else None
    plan, says = started_with(Plan(cycle_time=6.0, tensor_groups=groups_of_plan, predicted_ms=8.0, baseline_ms=9.0))
    return {
        "left": sorted(plan.settings()) if plan else None,
        "predicted": bool(plan and (plan.predicted_ms or plan.baseline_ms)),
        "says": says,
    }
