"""Horovod's cycle time, which takes effect when a job is started.

It is read in ``hvd.init()``. In a running job ``hvd.shutdown()`` and ``hvd.init()`` would have it read again, but
Horovod 0.28.1 must not be started twice with it: once a variable is fixed, the default that the next start writes first
lands on the fusion threshold (1 MB from then on) or, with both fixed, outside of an empty vector
(``BayesianParameter::SetValue`` in ``common/parameter_manager.cc``; a crash). So it is set before the first start or
not at all. The threshold is left alone: ranks on which it differs would fuse differently, and hang.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from dpro.errors import DproError
from dpro.plan import Plan
from dpro.settings import Settings

_CYCLE_TIME = "HOROVOD_CYCLE_TIME"


def switched_on(variable: str) -> bool:
    """As Horovod reads its switches: a number over 0."""
    value = os.environ.get(variable, "0")
    return value.isdecimal() and int(value) > 0


def start_with_plan() -> None:
    """Before ``hvd.init()``: the cycle time of the plan in ``DPRO_PLAN``, unless the job has a say in it.

    It has with a cycle time or a threshold of its own, and where Horovod is started again (elastic) or tunes itself.
    The model is not known yet; the plan's world size must be the job's.
    """
    with contextlib.suppress(DproError):  # the tuner will say it
        settings = Settings.from_env()
        own = any(name in os.environ for name in (_CYCLE_TIME, "HOROVOD_FUSION_THRESHOLD"))
        if own or switched_on("HOROVOD_ELASTIC") or switched_on("HOROVOD_AUTOTUNE"):
            return
        if not settings.plan or settings.mode != "apply":
            return
        plan = Plan.load(Path(settings.plan))
        ranks = os.environ.get("HOROVOD_SIZE")
        if plan.cycle_time is not None and plan.fingerprint.get("world_size", ranks) == ranks:
            os.environ[_CYCLE_TIME] = str(plan.cycle_time)


def started_with(plan: Plan | None) -> tuple[Plan | None, str]:
    """``plan`` less its cycle time, None where nothing else is in it; and what is to be said of the cycle time.

    What was predicted of both together is left out as well.
    """
    if plan is None or plan.cycle_time is None:
        return plan, ""
    found = os.environ.get(_CYCLE_TIME) or "none"
    note = f"the job was started with the plan's cycle time, {plan.cycle_time:g} ms"
    if found not in (str(plan.cycle_time), f"{plan.cycle_time:g}"):
        note = (
            f"the plan's cycle time takes effect when a job is started, by {_CYCLE_TIME}={plan.cycle_time:g} "
            f"(this one has {found}); DPRO=apply sets it where the job has none"
        )
    rest = replace(plan, cycle_time=None, predicted_ms=None, baseline_ms=None)
    return (rest if rest.settings() else None), note
