"""Activation by environment for Horovod: ``DPRO=apply horovodrun … train.py`` on an unchanged script.

``autoload`` calls :func:`attach` when the job imports ``horovod.torch``. What Horovod reads from the environment
stays as the job has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def attach(module: ModuleType) -> None:
    """Tune the first ``DistributedOptimizer`` that the job makes.

    Args:
        module: ``horovod.torch.optimizer``.
    """
    # every optimizer's class is made from this one's dictionary
    wrapper: Any = module._DistributedOptimizer
    construct = wrapper.__init__
    watch: _Watch | None = None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal watch
        construct(self, *args, **kwargs)
        try:
            if watch is None:
                watch = _Watch(self, restore)
            else:
                watch.second_optimizer()
        except Exception as error:  # the job comes first
            restore()
            _say(error)

    def restore() -> None:
        if wrapper.__init__ is __init__:
            wrapper.__init__ = construct

    __init__.__wrapped__ = construct  # type: ignore[attr-defined]  # inspect.signature sees the real one
    wrapper.__init__ = __init__


class _Watch:
    """From the optimizer to the end of its tuning."""

    def __init__(self, optimizer: Any, restore: Callable[[], None]) -> None:
        from dpro_integrations.horovod_steps import Steps

        self._optimizer = optimizer
        self._restore = restore
        self._tuner: Any = None
        self._over = False
        self._steps = Steps(optimizer, self._stepped, self._joining)

    def second_optimizer(self) -> None:
        """One tuner can't tell the all-reduces of two optimizers apart."""
        reason = "the job has two Horovod optimizers; give one to dpro_integrations.horovod_torch.autotune()"
        if self._tuner is not None:
            self._tuner.fail(reason)
        elif not self._over:
            self._stop()
            _say(reason)

    def _stepped(self) -> None:
        try:
            if self._tuner is None and not self._begin():
                self._stop()
                return
            self._tuner.step()
            if self._tuner.outcome is not None:
                self._stop()
        except Exception as error:  # the job comes first
            self._stop()
            _say(error)

    def _joining(self) -> None:
        if self._tuner is not None:
            self._tuner.close()
        self._stop()

    def _begin(self) -> bool:
        """At the end of the first step: all ranks are there then, or will be soon."""
        from dpro_integrations import horovod_torch

        if horovod_torch.is_tuned(self._optimizer):  # the job has a call of its own
            return False
        self._tuner = horovod_torch.make_tuner(self._optimizer)
        return self._tuner is not None

    def _stop(self) -> None:
        """Take back every patch, let go of the job's objects."""
        self._over = True
        self._restore()
        self._steps.stop()
        self._tuner = self._optimizer = None


def _say(reason: str | BaseException) -> None:
    from dpro_integrations.base import step_aside

    rank = os.environ.get("HOROVOD_RANK", "0")
    step_aside(reason, int(rank) if rank.isdecimal() else 0)
