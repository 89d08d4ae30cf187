"""Activation by environment for Gluon: ``DPRO=apply horovodrun … train.py`` on an unchanged script.

``autoload`` calls :func:`attach` when the job imports ``horovod.mxnet``, which is before Horovod reads its settings
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
    """Tune the first ``DistributedTrainer`` that the job makes; start Horovod as the plan given has it.

    Args:
        module: ``horovod.mxnet``.
    """
    from dpro_integrations import mxnet_profiler

    start_with_plan()
    mxnet_profiler.watch()
    watch_first(module.DistributedTrainer, _Watch)


def attach_byteps(module: ModuleType) -> None:
    """The same for BytePS.

    Args:
        module: ``byteps.mxnet``.
    """
    from dpro_integrations import byteps_start, mxnet_profiler

    byteps_start.start_with_plan()
    mxnet_profiler.watch()
    watch_first(module.DistributedTrainer, _BytePSWatch)


class _Watch(Watch):
    another = "the job has two Horovod trainers; give one to dpro_integrations.mxnet.autotune()"

    def __init__(self, trainer: Any, restore: Callable[[], None]) -> None:
        from dpro_integrations.mxnet import library
        from dpro_integrations.mxnet_steps import Steps

        super().__init__(trainer, restore)
        self._steps = Steps(trainer, self._stepped, self._ending, library(trainer).MODULES)

    @staticmethod
    def say(reason: str | BaseException) -> None:
        from dpro_integrations.base import step_aside

        rank = os.environ.get("HOROVOD_RANK", "0")
        step_aside(reason, int(rank) if rank.isdecimal() else 0)

    def _ending(self) -> None:
        if self._tuner is not None:
            self._tuner.close()
        self._stop()

    def _make(self) -> Any:
        from dpro_integrations import mxnet

        # the job may have a call or a handler of its own
        return None if mxnet.is_tuned(self.made) else mxnet.make_tuner(self.made)

    def _unhook(self, made: Any) -> None:
        from dpro_integrations import mxnet_profiler

        self._steps.stop()
        mxnet_profiler.unwatch()


class _BytePSWatch(_Watch):
    another = "the job has two BytePS trainers; give one to dpro_integrations.mxnet.autotune()"

    @staticmethod
    def say(reason: str | BaseException) -> None:
        from dpro_integrations.base import step_aside

        rank = os.environ.get("DMLC_WORKER_ID", "0")
        step_aside(reason, int(rank) if rank.isdecimal() else 0)
