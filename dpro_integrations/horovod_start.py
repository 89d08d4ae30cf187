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


def start_with_plan() -> None:
    """Before ``hvd.init()``: the cycle time of the plan in ``DPRO_PLAN``, unless the job sets its own."""
    with contextlib.suppress(DproError):  # the tuner will say it
        settings = Settings.from_env()
        # an elastic job would start Horovod with it again, and again
        mine = _CYCLE_TIME in os.environ or os.environ.get("HOROVOD_ELASTIC", "0") != "0"
        if settings.plan and settings.mode == "apply" and not mine:
            cycle_ms = Plan.load(Path(settings.plan)).cycle_time
            if cycle_ms is not None:
                os.environ[_CYCLE_TIME] = str(cycle_ms)


def started_with(plan: Plan | None) -> Plan | None:
    """``plan`` less the cycle time with which the job was started; None where nothing else is in it.

    Raises:
        DproError: the job was started with another one.
    """
    if plan is None or plan.cycle_time is None:
        return plan
    try:
        same = float(os.environ.get(_CYCLE_TIME, "nan")) == plan.cycle_time
    except ValueError:
        same = False
    if not same:
        raise DproError(
            f"the plan's cycle time takes effect when the job is started, with {_CYCLE_TIME}={plan.cycle_time:g} "
            f"(this one has {os.environ.get(_CYCLE_TIME) or 'none'}); under horovodrun DPRO_PLAN sets it"
        )
    rest = replace(plan, cycle_time=None)
    return rest if rest.settings() else None
