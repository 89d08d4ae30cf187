"""The end of every step of a Horovod optimizer, and ``hvd.join()``. Knows nothing of tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from dpro_integrations.base import before_call


class Steps:
    """Calls ``action`` once after each step of ``optimizer``, until :meth:`stop`.

    Args:
        optimizer: made by ``hvd.DistributedOptimizer``.
        action: may call :meth:`stop`.
        joining: called when the job calls ``hvd.join()``, before this rank joins: its data have ended, and the
            steps of other ranks may go on without it. Must not raise.

    A ``DistributedOptimizer`` is an optimizer within an optimizer: torch runs its hooks for both, so that
    one step has two ends. The first one after a begin counts: the update is made by then.
    """

    def __init__(self, optimizer: Any, action: Callable[[], None], joining: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._action = action
        self._open = False
        # what the job compiles must not have our calls compiled into it
        self._handles = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._begin)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._end)),
        ]
        self._unpatch = before_call("join", (mpi_ops, hvd), joining)

    def stop(self) -> None:
        """No more calls; the hooks themselves go when the next gradient is there.

        We may be called by such a hook, and torch walks the live dictionary of them.
        """
        self._action = _nothing
        self._unpatch()
        handles, self._handles = self._handles, []
        parameter = next(
            (p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad), None
        )
        if parameter is None:
            return

        def once(_: torch.Tensor) -> None:
            own.remove()
            for handle in handles:
                handle.remove()

        own = parameter.register_post_accumulate_grad_hook(once)

    def _begin(self, *_: Any) -> None:
        self._open = True

    def _end(self, *_: Any) -> None:
        if self._open:
            self._open = False
            self._action()


def _nothing() -> None:
    pass
