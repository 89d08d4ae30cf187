"""What the adapters of torch jobs share, however a job synchronises: a capture's way, and plan against job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.trace.model import RankTrace

if TYPE_CHECKING:
    from dpro_integrations.torch_capture import StepCapture


class TorchAdapter:
    """Base of :class:`dpro.adapter.Adapter` implementations; a subclass starts ``_capture``."""

    _capture: StepCapture | None = None

    def fingerprint(self) -> dict[str, str]:
        raise NotImplementedError

    def _parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Name and parameter of every gradient that is synchronised."""
        raise NotImplementedError

    def mark_step(self) -> None:
        if self._capture is not None:
            self._capture.mark_step()

    def stop_capture(self) -> RankTrace:
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("no capture is running")
        return capture.finish()

    def abort_capture(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.abort()

    def checksum(self) -> str:
        """Over up to 64 values of every parameter: cheap, and any lost update moves it."""
        digest = hashlib.sha256()
        for _, parameter in self._parameters():
            flat = parameter.detach().flatten()
            picked = flat[:: max(1, flat.numel() // 64)][:64]
            digest.update(picked.float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def _model(self) -> str:
        """The model's part of a fingerprint: a hash of names, shapes and dtypes."""
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in self._parameters()]
        return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]

    def _check_fit(self, plan: Plan) -> None:
        """Refuse a plan of another job.

        Raises:
            PlanError: model, world or framework differ.
        """
        fitting = self.fingerprint()
        for key, value in plan.fingerprint.items():
            if fitting.get(key) != value:
                raise PlanError(f"the plan is for another job: {key} is {fitting.get(key)}, the plan's {value}")
