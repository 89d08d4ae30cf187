"""BytePS' bound on partitions when a job is started: ``BYTEPS_PARTITION_BYTES``, which it reads in ``bps.init()``.

A plan that was kept in a running job has its bound there by names of dpro's, with buffers of their own. A job that is
started with it needs neither. So a plan that says how a job is to be started (``at_start.json``) sets the variable,
where the job has no say in it; any other is tried in the running job.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from dpro.errors import DproError
from dpro.plan import Plan
from dpro.settings import Settings

BYTES = "BYTEPS_PARTITION_BYTES"


def start_with_plan() -> None:
    """Before ``bps.init()``: the bound of the plan in ``DPRO_PLAN``, unless the job has one of its own.

    The model is not known yet; the plan's world size must be the job's.
    """
    with contextlib.suppress(DproError):  # the tuner will say it
        settings = Settings.from_env()
        if BYTES in os.environ or not settings.plan or settings.mode != "apply":
            return
        plan = Plan.load(Path(settings.plan))
        workers = os.environ.get("DMLC_NUM_WORKER")
        if plan.partition_bytes is not None and plan.fingerprint.get("world_size", workers) == workers:
            os.environ[BYTES] = str(plan.partition_bytes)


def started_with(plan: Plan | None) -> tuple[Plan | None, str]:
    """``plan`` less what takes effect at a start, None where nothing else is in it; and what is to be said of that."""
    if plan is None or plan.partition_bytes is None:
        return plan, ""
    if os.environ.get(BYTES) == str(plan.partition_bytes):
        return None, f"the job was started with the plan's partitions, {BYTES}={plan.partition_bytes}"
    note = (
        f"the plan's partitions take effect when a job is started, by {BYTES}={plan.partition_bytes} (this one has "
        f"{os.environ.get(BYTES) or 'none'}); DPRO=apply sets it where the job has none"
    )
    rest = replace(plan, partition_bytes=None)
    return (rest if rest.settings() else None), note
