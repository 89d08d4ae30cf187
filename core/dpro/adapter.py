"""The contract between the tuner and a framework. The tuner knows adapters only by this file."""

from __future__ import annotations

from enum import Enum
from typing import Protocol, runtime_checkable

from dpro.plan import Plan
from dpro.trace.model import RankTrace


class Knob(Enum):
    """A setting an adapter can change in the running job."""

    BUCKET_LIST = "bucket_list"  # DDP: one cap per bucket
    BUCKET_CAP = "bucket_cap"  # DDP: one cap for all buckets
    GROUPS = "groups"  # Horovod: explicit tensor groups


@runtime_checkable
class Adapter(Protocol):
    """What the tuner may ask of a job. Every method is called between two optimizer steps.

    The exchange methods never hang: each ends within ``timeout_s`` or raises :class:`TimeoutError`.
    """

    name: str
    rank: int
    world_size: int

    def capabilities(self) -> set[Knob]:
        """What can be applied here; empty means observe only."""

    def fingerprint(self) -> dict[str, str]:
        """Model, world and framework: a plan is applied only where this is equal."""

    def current(self) -> Plan:
        """The settings in force now, as a plan (the baseline)."""

    def start_capture(self) -> None:
        """Attach the profiler and hooks.

        Raises:
            RuntimeError: it cannot be done now (the user's own profiler is running, …).
        """

    def mark_step(self) -> None:
        """A step ended (called while capturing)."""

    def stop_capture(self) -> RankTrace:
        """Detach everything and return what was seen."""

    def gather(self, key: str, blob: bytes, timeout_s: float) -> list[bytes] | None:
        """Every rank's blob on rank 0 (by rank), None elsewhere."""

    def broadcast(self, key: str, blob: bytes | None, timeout_s: float) -> bytes:
        """Rank 0's blob on every rank."""

    def agree(self, key: str, proposal: str) -> str:
        """First proposal under ``key`` wins; every rank gets the same answer, at once."""

    def apply(self, plan: Plan) -> None:
        """Put the plan in force; raises before it changes anything, or completes."""

    def revert(self) -> None:
        """Back to the settings before the first :meth:`apply`. Does nothing if none was applied."""

    def checksum(self) -> str:
        """Cheap digest of the parameters, equal across ranks in a healthy job ('' if unknown)."""

    def close(self) -> None:
        """Undo every hook and patch. Safe to call twice."""


