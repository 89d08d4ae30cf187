"""What a benchmark asks of a training loop, whatever library synchronises it; no framework here.

The loops themselves are in ``loops_torch``, ``loops_keras`` and ``loops_mxnet``: how a job is made, stepped, tuned by
dpro and put under a plan. Which one a matrix means is in :mod:`benchmarks.comms`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dpro.adapter import Adapter, RecordsUnderPlan, Rehearses
from dpro.plan import Plan
from dpro.tuner import Tuner

#: Learning rate so small that noise trained for hundreds of steps stays finite.
RATE, MOMENTUM = 1e-4, 0.9
#: How long ranks may wait for each other at the start, s.
MEET_S = 60.0
_READY_STEPS = 2
#: Steps under a plan before a capture that needs one.
_SETTLE_STEPS = 2


class Loop(Protocol):
    """A job of one rank, with an adapter of dpro's for captures and plans without a tuner.

    A class of it is called with the model's name, the seed of this rank's batch, and whether compute is emulated.
    """

    rank: int
    #: Whether :meth:`step` returns before all of the step's work is done. A capture starts with none left over, so its
    #: first step would look shorter than any: the times of captured steps are then those in the trace.
    runs_behind: bool

    @property
    def adapter(self) -> Adapter:
        """Of the job as it is now."""

    def step(self) -> None:
        """One training step, optimizer included."""

    def ready(self) -> list[tuple[str, int]]:
        """(name, bytes) of every gradient, in the order in which a step makes them ready; trains a step or a few."""

    def prepare(self, plans: Sequence[Plan]) -> None:
        """Do what is slow the first time that a plan is put in force. On all ranks with the same plans."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        """A tuner that moves on at every :meth:`step`."""

    def close(self) -> None:
        """Leave the job; a collective."""


def put(adapter: Adapter, plan: Plan | None) -> None:
    """Put ``plan`` in force, None: the job's own settings."""
    adapter.revert()
    if plan is not None:
        adapter.apply(plan)


def settle_capture(adapter: Adapter, step: Callable[[], None]) -> bool:
    """Put in force what the library can be recorded under, as the tuner does; whether there is such a thing."""
    plan = adapter.plan_to_record() if isinstance(adapter, RecordsUnderPlan) else None
    if plan is None:
        return False
    put(adapter, plan)
    for _ in range(_SETTLE_STEPS):
        step()
    return True


def rehearse(adapter: Adapter, step: Callable[[], None], steps: int) -> None:
    """Capture ``steps`` steps and throw them away, as the tuner does before its capture, where that is needed."""
    if isinstance(adapter, Rehearses):
        adapter.start_rehearsal()
        for _ in range(steps):
            step()
            adapter.mark_step()
        adapter.abort_capture()


def captured_ready(adapter: Adapter, step: Callable[[], None]) -> list[tuple[str, int]]:
    """:meth:`Loop.ready` as a capture saw it, where a framework has no hook for each gradient."""

    def asked() -> None:
        step()
        adapter.obstacle()  # after every step, as the tuner does

    asked()
    asked()
    settled = settle_capture(adapter, asked)
    adapter.start_capture()
    try:
        for _ in range(_READY_STEPS):
            asked()
            adapter.mark_step()
        tensors = adapter.stop_capture().tensors
    except BaseException:
        adapter.abort_capture()
        raise
    if settled:
        put(adapter, None)
    # what was not seen to be handed in comes last
    return [(t.name, t.nbytes) for t in sorted(tensors, key=lambda t: (t.ready < 0, t.ready))]
