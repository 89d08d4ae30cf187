"""What the adapters of Gluon jobs share, whichever library synchronises: a capture's way, plan against job."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from mxnet import autograd

from dpro.adapter import Exchange
from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.trace.model import RankTrace
from dpro_integrations.mxnet_engine import read
from dpro_integrations.mxnet_steps import reduced

if TYPE_CHECKING:
    from dpro_integrations.mxnet_capture import StepCapture


class GluonAdapter:
    """Base of :class:`dpro.adapter.Adapter` implementations.

    Args:
        trainer: it stays the same object whatever is applied.
        exchange: how this job's ranks agree.
    """

    _capture: StepCapture | None = None

    def __init__(self, trainer: Any, exchange: Exchange) -> None:
        self.exchange = exchange
        self._trainer = trainer
        self._reduced = self._now()
        self._seen_at = time.monotonic()
        self._longest_s = 0.0

    # -- for subclasses ------------------------------------------------------------------------

    def _framework(self) -> str:
        """Names and versions, for a fingerprint."""
        raise NotImplementedError

    def _new_capture(self, usual_s: float) -> StepCapture:
        raise NotImplementedError

    # -- the contract, as far as it is the same ------------------------------------------------

    def obstacle(self) -> str:
        now = time.monotonic()
        self._longest_s, self._seen_at = max(self._longest_s, now - self._seen_at), now
        return "" if self._now() == self._reduced else "the job changed which parameters it trains"

    def fingerprint(self) -> dict[str, str]:
        shapes = [(p.name, tuple(p.shape), str(p.dtype)) for _, p in reduced(self._trainer)]
        return {
            "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            "world_size": str(self.exchange.world_size),
            "framework": self._framework(),
        }

    def start_capture(self) -> None:
        self._capture = self._new_capture(self._longest_s)

    def mark_step(self) -> None:
        if self._capture is not None:
            self._capture.mark_step()

    def stop_capture(self) -> RankTrace:
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("no capture is running")
        try:
            return capture.finish()
        except BaseException:
            capture.abort()
            raise

    def abort_capture(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.abort()

    def checksum(self) -> str:
        """Over up to 64 values of every parameter: cheap, and any lost update moves it."""
        digest = hashlib.sha256()
        with autograd.pause():
            picked = []
            for _, parameter in reduced(self._trainer):
                flat = parameter.list_data()[0].reshape((-1,))
                picked.append(flat[:: max(1, flat.size // 64)][:64])
            for values in picked:
                digest.update(read(values).tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        self.abort_capture()

    # -- parts ---------------------------------------------------------------------------------

    def _places(self) -> dict[str, int]:
        """Name of a gradient's parameter -> its place in the trainer."""
        return {parameter.name: place for place, parameter in reduced(self._trainer)}

    def _now(self) -> list[int]:
        return [place for place, _ in reduced(self._trainer)]

    def _check_fit(self, plan: Plan, settings: set[str]) -> None:
        """Refuse a plan of another job, or one with more than ``settings``.

        Raises:
            PlanError: model, world or framework differ; a setting that can't be changed here.
        """
        fitting = self.fingerprint()
        for key, value in plan.fingerprint.items():
            if fitting.get(key) != value:
                raise PlanError(f"the plan is for another job: {key} is {fitting.get(key)}, the plan's {value}")
        foreign = sorted(set(plan.settings()) - settings)
        if foreign:
            raise PlanError(f"there is no setting for {foreign[0]!r} that dpro changes in a running job of this kind")
