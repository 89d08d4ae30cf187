"""Activation by environment: ``DPRO=apply torchrun … train.py`` on an unchanged script.

Imported by a ``.pth`` file when Python starts and ``DPRO`` is set. It imports no framework: it
waits for the job to import ``torch.nn.parallel.distributed``, then watches the constructor of
``DistributedDataParallel`` and the optimizers' steps. For Horovod see ``horovod_autoload``.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dpro.settings import active
from dpro_integrations.watch import Watch, watch_first


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; lets the others find and load ``module``, then calls ``attach`` with it."""

    def __init__(self, module: str, attach: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._attach = attach
        self._looking = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self._module or self._looking:
            return None
        self._looking = True
        try:
            others = (f.find_spec(fullname, path, target) for f in list(sys.meta_path) if hasattr(f, "find_spec"))
            spec = next((found for found in others if found is not None), None)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # not before: a job that only asks whether there is such a module may import it later
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            execute(module)
            try:
                self._attach(module)
            except Exception as error:  # the job comes first
                _say(error)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _attach(module: ModuleType) -> None:
    """Tune the first DDP wrapper that the job makes, at the steps of the optimizer that trains it."""
    watch_first(module.DistributedDataParallel, _Watch)


class _Watch(Watch):
    another = "the job has two DDP models; give one to dpro_integrations.torch_ddp.autotune()"

    def __init__(self, ddp: Any, restore: Callable[[], None]) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        super().__init__(ddp, restore)
        self._optimizer: Any = None
        self._handle = register_optimizer_step_post_hook(torch.compiler.disable(self._stepped))

    @staticmethod
    def say(reason: str | BaseException) -> None:
        _say(reason)

    def _counts(self, *told: Any) -> bool:
        """The first optimizer that holds a parameter of the model counts the iterations."""
        optimizer = told[0]
        if self._optimizer is None:
            own = {id(p) for p in self.made.module.parameters()}
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                self._optimizer = optimizer
        return optimizer is self._optimizer

    def _make(self) -> Any:
        from dpro_integrations import torch_ddp

        # the job may have a callback or a call of its own
        return None if torch_ddp.is_tuned(self.made) else torch_ddp.make_tuner(self.made)

    def _unhook(self, made: Any) -> None:
        from dpro_integrations.torch_forward import before_next_forward

        before_next_forward(made, self._handle.remove)
        self._optimizer = None


def _say(reason: str | BaseException) -> None:
    from dpro_integrations.base import step_aside
    from dpro_integrations.torch_ddp import job_rank

    step_aside(reason, job_rank())


def _attach_horovod(module: ModuleType) -> None:
    from dpro_integrations import horovod_autoload

    horovod_autoload.attach(module)


def _attach_keras(module: ModuleType) -> None:
    from dpro_integrations import keras_autoload

    keras_autoload.attach(module)


def _attach_keras_byteps(module: ModuleType) -> None:
    from dpro_integrations import keras_autoload

    keras_autoload.attach_byteps(module)


def _attach_mxnet(module: ModuleType) -> None:
    from dpro_integrations import mxnet_autoload

    mxnet_autoload.attach(module)


def _attach_mxnet_byteps(module: ModuleType) -> None:
    from dpro_integrations import mxnet_autoload

    mxnet_autoload.attach_byteps(module)


_TARGETS = {
    "torch.nn.parallel.distributed": _attach,
    "horovod.torch.optimizer": _attach_horovod,
    "horovod._keras": _attach_keras,
    "byteps._keras": _attach_keras_byteps,
    "horovod.mxnet": _attach_mxnet,
    "byteps.mxnet": _attach_mxnet_byteps,
}

if active():  # the .pth file knows fewer words for "off" than we do
    for _name, _how in _TARGETS.items():
        if _name in sys.modules:
            _how(sys.modules[_name])
        else:
            sys.meta_path.insert(0, _Finder(_name, _how))
