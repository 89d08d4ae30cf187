"""Gradient accumulation under Lightning: a ``training_step`` over a part of its batch at a time.

Knows Lightning's module and trainer; what parts are, and whether they give the batch's gradient, is in ``torch_micro``.
Lightning calls the training step inside DDP's forward. All parts but the last have their backward pass right there,
where DDP's reducer expects none and leaves their gradients alone; the last one's loss goes back to the trainer. The
trainer would clear the gradients only then: that is done before the first part's backward pass instead. A batch of
which a part has no loss (``training_step`` gave None, Lightning's way to skip a batch) runs whole, as it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from dpro.session import Session
from dpro.settings import Settings
from dpro_integrations.base import put_on
from dpro_integrations.torch_forward import StandIn
from dpro_integrations.torch_micro import Cutting, part_of, samples

#: Where a loss is what its backward pass begins with.
_PLAIN = ("32-true", "64-true", "32", "64")


def why_whole(trainer: Any, module: Any) -> str:
    """Why this job's batches must not be cut; '' if they may."""
    if not module.automatic_optimization:
        return "it has its own optimization"
    if trainer.accumulate_grad_batches != 1:
        return "it accumulates gradients already"
    if str(trainer.precision) not in _PLAIN:
        return "its losses are scaled or cast"
    if any(type(part).__module__.startswith("torchmetrics") for part in module.modules()):
        return "its metrics count batches"
    return ""


def cut_training_step(module: Any, state: Cutting) -> Callable[[], None]:
    """Have ``module.training_step`` do as ``state`` says. Returns the undo."""
    original, zero_grad = module.training_step, module.optimizer_zero_grad
    cleared = told = False

    def optimizer_zero_grad(*args: Any, **more: Any) -> None:
        nonlocal cleared
        if not cleared:
            zero_grad(*args, **more)
        cleared = False

    def training_step(batch: Any, *rest: Any, **more: Any) -> Any:
        if state.watched:
            state.seen = (lambda _, part: _silent(module, lambda: original(part, *rest, **more))), batch
        nonlocal cleared, told
        cleared, parts = False, state.parts
        if parts >= 2 and not samples(batch) % parts:
            zero_grad(module.current_epoch, rest[0] if rest else 0, module.trainer.optimizers[0])
            cleared = True
            returned = _in_parts(lambda part: original(part, *rest, **more), batch, parts)
            if _loss(returned) is not None:
                return returned
            cleared = False  # what parts have left goes when the trainer clears the gradients, after the loss
            if not told:
                told = True
                line = "the training step gave no loss for a part of a batch: such batches run whole"
                Session(Settings(), module.global_rank).say(line, everywhere=True)
        return original(batch, *rest, **more)

    undone = [
        put_on(module, name, StandIn(module, name, call))
        for name, call in (("training_step", training_step), ("optimizer_zero_grad", optimizer_zero_grad))
    ]

    def undo() -> None:
        for one in undone:
            one()

    return undo


def _in_parts(step: Callable[[Any], Any], batch: Any, parts: int) -> Any:
    """What ``step`` returned for the last part, with the loss of them all; None as soon as a part has no loss."""
    before: Any = 0
    for number in range(parts):
        returned = step(part_of(batch, number, parts))
        loss = _loss(returned)
        if loss is None:
            return None
        loss = loss / parts
        if number < parts - 1:
            loss.backward()
            before = before + loss.detach()
    whole = loss + before
    return {**returned, "loss": whole} if isinstance(returned, Mapping) else whole


def _loss(returned: Any) -> torch.Tensor | None:
    """What a training step returned, or has under ``loss``; None: there is no loss."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    return loss if isinstance(loss, torch.Tensor) else None


def _silent(module: Any, call: Callable[[], Any]) -> torch.Tensor:
    """The loss of a call that must leave no trace in the job's log.

    Raises:
        RuntimeError: there is none.
    """
    with ExitStack() as undo:
        for name in ("log", "log_dict"):
            undo.callback(put_on(module, name, lambda *_, **__: None))
        loss = _loss(call())
    if loss is None:
        raise RuntimeError("the training step returned no loss")
    return loss
