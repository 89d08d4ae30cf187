"""Activation by environment for Horovod: ``DPRO=apply horovodrun … train.py`` on an unchanged script.

``autoload`` calls :func:`attach` when the job imports ``horovod.torch``, which is before Horovod reads its settings
from the environment: a plan's cycle time is put there, where the job has none of its own. All else stays as the job
has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dpro_integrations.horovod_start import start_with_plan
from dpro_integrations.watch import Watch, watch_first


def attach(module: ModuleType) -> None:
    """Tune the first ``DistributedOptimizer`` that the job makes; start Horovod as the plan given has it.

    Args:
        module: ``horovod.torch.optimizer``.
    """
    start_with_plan()
    # every optimizer's class is made from this one's dictionary
    watch_first(module._DistributedOptimizer, _Watch)


class _Watch(Watch):
    another = "the job has two Horovod optimizers; give one to dpro_integrations.horovod_torch.autotune()"

    def __init__(self, optimizer: Any, restore: Callable[[], None]) -> None:
        from dpro_integrations.horovod_steps import Steps

        super().__init__(optimizer, restore)
        self._steps = Steps(optimizer, self._stepped, self._joining)

    @staticmethod
    def say(reason: str | BaseException) -> None:
        from dpro_integrations.base import step_aside

        rank = os.environ.get("HOROVOD_RANK", "0")
        step_aside(reason, int(rank) if rank.isdecimal() else 0)

    def _joining(self) -> None:
        if self._tuner is not None:
            self._tuner.close()
        self._stop()

    def _make(self) -> Any:
        from dpro_integrations import horovod_torch

        # the job may have a call of its own
        return None if horovod_torch.is_tuned(self.made) else horovod_torch.make_tuner(self.made)

    def _unhook(self, made: Any) -> None:
        self._steps.stop()
