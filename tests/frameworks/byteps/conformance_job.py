"""All checks of the adapter contract in one process, one after another: a BytePS job takes seconds to start."""

from __future__ import annotations

from typing import Any

from dpro_integrations import byteps_partitions
from tests.frameworks.conformance import run_check

CHECKS = (
    "check_identity", "check_capture", "check_abort", "check_apply", "check_foreign", "check_weights",
    "check_weights_untouched",
)  # fmt: skip


def all_checks(subject: str) -> dict[str, Any]:
    # every check has a job of its own, with bounds that nobody else uses
    byteps_partitions.MOST_BOUNDS, byteps_partitions.MOST_GRADIENTS = 40, 64
    return {check: run_check(subject, check) for check in CHECKS}
