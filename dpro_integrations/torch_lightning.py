"""Gradient accumulation under Lightning: a ``training_step`` over a part of its batch at a time.

Knows Lightning's module and trainer; what parts are, and whether they give the batch's gradient, is in ``torch_micro``.
Lightning calls the training step inside DDP's forward. All parts but the last have their backward pass right there,
where DDP's reducer expects none and leaves their gradients alone; the last one's loss goes back to the trainer. The
trainer would clear the gradients only then: that is done before the first part's backward pass instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

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
    cleared = False

    def optimizer_zero_grad(*args: Any, **more: Any) -> None:
        nonlocal cleared
        if not cleared:
            zero_grad(*args, **more)
        cleared = False

    def training_step(batch: Any, *rest: Any, **more: Any) -> Any:
        if state.watched:
            state.seen = (lambda _, part: _silent(module, lambda: original(part, *rest, **more))), batch
        nonlocal cleared
        cleared, parts = False, state.parts
        if parts < 2 or samples(batch) % parts:
            return original(batch, *rest, **more)
        zero_grad(module.current_epoch, rest[0] if rest else 0, module.trainer.optimizers[0])
        cleared = True
        before: Any = 0
        for number in range(parts - 1):
            loss = _loss(original(part_of(batch, number, parts), *rest, **more)) / parts
            loss.backward()
            before = before + loss.detach()
        last = original(part_of(batch, parts - 1, parts), *rest, **more)
        whole = _loss(last) / parts + before
        return {**last, "loss": whole} if isinstance(last, dict) else whole

    undone = [
        put_on(module, name, StandIn(module, name, call))
        for name, call in (("training_step", training_step), ("optimizer_zero_grad", optimizer_zero_grad))
    ]

    def undo() -> None:
        for one in undone:
            one()

    return undo


def _loss(returned: Any) -> torch.Tensor:
    """What a training step returned, or has under ``loss``.

    Raises:
        RuntimeError: there is none.
    """
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, torch.Tensor):
        raise RuntimeError("the training step returned no loss")
    return loss


def _silent(module: Any, call: Callable[[], Any]) -> torch.Tensor:
    """The loss of a call that must leave no trace in the job's log."""
    with ExitStack() as undo:
        for name in ("log", "log_dict"):
            undo.callback(put_on(module, name, lambda *_, **__: None))
        return _loss(call())
