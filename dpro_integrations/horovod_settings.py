"""What Horovod itself was set to by the environment, whichever framework it serves. Imports none of them."""

from __future__ import annotations

import os
from dataclasses import replace

from dpro.settings import Settings

#: Defaults of HOROVOD_CYCLE_TIME, ms, and HOROVOD_FUSION_THRESHOLD, bytes (``common/operations.cc``).
_CYCLE_MS, _FUSION_BYTES = 1.0, 128 << 20


def library_settings() -> dict[str, int]:
    """For ``graph_info`` of a trace: ``cycle_ns``, and ``fusion_bytes``, 0 if groups go alone.

    With HOROVOD_DISABLE_GROUP_FUSION a gradient in no group is one of its own, too (``EnqueueTensorAllreduces``).
    """
    alone = os.environ.get("HOROVOD_DISABLE_GROUP_FUSION", "0").lower() not in ("", "0", "false")
    fusion_bytes = 0 if alone else int(_number("HOROVOD_FUSION_THRESHOLD", _FUSION_BYTES))
    return {"cycle_ns": round(_number("HOROVOD_CYCLE_TIME", _CYCLE_MS) * 1e6), "fusion_bytes": fusion_bytes}


def patient(settings: Settings) -> Settings:
    """Never so patient that Horovod ends the job for a stall: a rank waits for 3 of each at one meeting."""
    limit_s = _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) / 8
    if limit_s <= 0:  # it never does
        return settings
    return replace(settings, timeout_s=min(settings.timeout_s, limit_s), search_s=min(settings.search_s, limit_s))


def _number(name: str, otherwise: float) -> float:
    try:
        return float(os.environ.get(name, otherwise))
    except ValueError:
        return otherwise
