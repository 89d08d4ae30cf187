"""The contract between the tuner and a framework. The tuner knows adapters only by this file."""

from __future__ import annotations

from enum import Enum
from typing import Protocol, runtime_checkable

from dpro.plan import Plan
from dpro.trace.model import RankTrace
from dpro.trace.regions import Region


class Knob(Enum):
    """A setting an adapter can change in the running job, or where it says so when one is started."""

    BUCKET_LIST = "bucket_list"  # DDP: one cap per bucket
    BUCKET_CAP = "bucket_cap"  # DDP: one cap for all buckets
    BUCKET_VIEW = "bucket_view"  # DDP: gradients as views of their bucket
    BATCHED_COPY = "batched_copy"  # DDP: gradients copied into their bucket together
    COMPRESSION = "compression"  # DDP: gradients cross the wire in 16 bit; lossy
    GROUPS = "groups"  # Horovod: explicit tensor groups
    PARTITIONS = "partitions"  # BytePS: into what parts each gradient is cut
    PARTITION_BOUND = "partition_bound"  # BytePS: one bound for all gradients
    PARTITION_BYTES = "partition_bytes"  # the same, read when a job starts
    IN_FLIGHT = "in_flight"  # BytePS: how many bytes are on their way at once, in what order and parts
    CYCLE_TIME = "cycle_time"  # Horovod: how often its thread goes round; read when a job starts
    COMPILE_REGIONS = "compile_regions"  # Keras: layers that XLA compiles; DDP: submodules, by inductor
    RECOMPUTE = "recompute"  # blocks whose forward pass runs again before their backward pass
    ACCUMULATE = "accumulate"  # into how many micro-batches each rank cuts its batch
    BATCH_SHARES = "batch_shares"  # how many samples of a global batch each rank takes
    PLACEMENT = "placement"  # Keras in one process: on which device each layer runs, and in what order


class Exchange(Protocol):
    """How ranks agree. Not a collective: a rank that is missing delays the others, never hangs them.

    Keys are used once. Everything ends within the time given or raises :class:`TimeoutError`.
    """

    rank: int
    world_size: int

    def post(self, key: str, blob: bytes) -> None:
        """Leave this rank's contribution under ``key``."""

    def collect(self, key: str, timeout_s: float) -> list[bytes]:
        """Every rank's contribution, by rank.

        Raises:
            TimeoutError: naming the ranks that did not post.
            RankLeft: a rank said goodbye (:meth:`leave`) before it posted.
        """

    def agree(self, key: str, proposal: str) -> str:
        """The first proposal under ``key`` wins; every rank gets that one, at once."""

    def wait(self, key: str, timeout_s: float) -> str:
        """The agreed proposal under ``key``; raises as :meth:`collect` does, for rank 0."""

    def leave(self) -> None:
        """Say that this rank takes part no more."""


class RankLeft(Exception):
    """Another rank ended its training (or stepped out of the tuning) first."""


@runtime_checkable
class Adapter(Protocol):
    """What the tuner may ask of a job. Every method is called between two optimizer steps."""

    name: str
    exchange: Exchange

    def capabilities(self) -> set[Knob]:
        """What can be applied here; empty means observe only, ``why_not()`` says why."""

    def why_not(self) -> str:
        """One clause: why :meth:`capabilities` is empty ('' if it is not)."""

    def obstacle(self) -> str:
        """One clause: why this rank must stop tuning at once ('' if it need not).

        Asked after every step, so it must be cheap. For states in which ranks no longer step
        together (uneven inputs): the rank leaves without a further meeting.
        """

    def fingerprint(self) -> dict[str, str]:
        """Model, world and framework: a plan is applied only where this is equal."""

    def start_capture(self) -> None:
        """Attach the profiler and hooks.

        Raises:
            RuntimeError: it cannot be done now (the user's own profiler is running, …).
        """

    def mark_step(self) -> None:
        """A step ended while capturing; the next one starts."""

    def stop_capture(self) -> RankTrace:
        """Detach everything and return what was seen.

        Raises:
            RuntimeError: the capture is unusable (it was taken over by the user's profiler, …).
        """

    def abort_capture(self) -> None:
        """Detach everything, keep nothing. Never raises, safe at any time."""

    def prepare(self, plan: Plan) -> None:
        """Check that :meth:`apply` will work, changing nothing but what :meth:`revert` goes back to.

        Raises:
            PlanError: the plan does not fit this job.
        """

    def apply(self, plan: Plan) -> None:
        """Put the plan in force; raises before it changes anything, or completes."""

    def revert(self) -> None:
        """Back to the settings before the first :meth:`prepare`. Does nothing if there was none since.

        Where this rank's :meth:`apply` failed, those of other ranks may have worked: afterwards the
        ranks must be alike in every respect that their collectives depend on.
        """

    def checksum(self) -> str:
        """Digest of a sample of the parameters, equal across ranks in a healthy job ('' unknown)."""

    def close(self) -> None:
        """Undo every hook and patch. Never raises, safe to call twice."""


@runtime_checkable
class RegionTimer(Protocol):
    """An adapter that can say what :attr:`Knob.COMPILE_REGIONS` is worth here."""

    def time_regions(self, trace: RankTrace, budget_s: float) -> list[Region]:
        """Time regions of the model with and without, away from the training, in about ``budget_s`` seconds.

        On one rank, between two steps: nothing that the other ranks take part in.

        Args:
            trace: what this rank captured: where the time goes.
        """


@runtime_checkable
class MemoryMeter(Protocol):
    """An adapter whose capture can tell what takes memory (:mod:`dpro.trace.memory`)."""

    def meter_memory(self) -> None:
        """Have the captures from now on tell it."""


@runtime_checkable
class RecordsUnderPlan(Protocol):
    """An adapter whose library can be recorded only under settings that all ranks share (BytePS)."""

    def plan_to_record(self) -> Plan | None:
        """What to :meth:`Adapter.apply` some steps before :meth:`Adapter.start_capture`; None: nothing is needed.

        It is as near to the job's own settings as can be, and reverted after the capture.

        Raises:
            RuntimeError: nothing can be recorded here.
        """


@runtime_checkable
class Rehearses(Protocol):
    """An adapter whose first capture tells more of itself than of the job, so that one goes before whose trace is
    thrown away.

    What a framework's profiler holds on to lies scattered between a step's tensors, so that each captured step takes
    fresh memory from the system (a fourth of a step's time in Keras). The second capture finds it there.
    """

    def start_rehearsal(self) -> None:
        """As :meth:`Adapter.start_capture`, under the job's own settings; :meth:`Adapter.abort_capture` ends it."""
