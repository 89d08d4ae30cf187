"""Activation by environment: ``DPRO=apply torchrun … train.py`` on an unchanged script.

Imported by a ``.pth`` file when Python starts and ``DPRO`` is set. It imports no framework: it
waits for the job to import ``torch.nn.parallel.distributed``, then watches the constructor of
``DistributedDataParallel`` and the optimizers' steps. For Horovod see ``horovod_autoload``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dpro.settings import active


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; lets the real finder load ``module``, then calls ``attach`` with it."""

    def __init__(self, module: str, attach: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._attach = attach

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                self._attach(module)
            except Exception as error:  # the job comes first
                _say(error)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _attach(module: ModuleType) -> None:
    """Tune the first DDP wrapper that the job makes, at the steps of the optimizer that trains it."""
    wrapper: Any = module.DistributedDataParallel
    construct = wrapper.__init__
    watch: _Watch | None = None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal watch
        construct(self, *args, **kwargs)
        try:
            if watch is None:
                watch = _Watch(self, restore)
            elif watch.made is not self:  # it is, when we re-wrap
                watch.second_model()
        except Exception as error:  # the job comes first
            restore()
            _say(error)

    def restore() -> None:
        if wrapper.__init__ is __init__:
            wrapper.__init__ = construct

    __init__.__wrapped__ = construct  # type: ignore[attr-defined]  # inspect.signature sees the real one
    wrapper.__init__ = __init__


class _Watch:
    """From the wrapper to the end of its tuning."""

    def __init__(self, ddp: Any, restore: Callable[[], None]) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.made = ddp
        self._restore = restore
        self._tuner: Any = None
        self._optimizer: Any = None
        self._over = False
        self._handle = register_optimizer_step_post_hook(torch.compiler.disable(self._stepped))

    def second_model(self) -> None:
        """One tuner can't tell the all-reduces of two models apart."""
        reason = "the job has two DDP models; give one to dpro_integrations.torch_ddp.autotune()"
        if self._tuner is not None:
            self._tuner.fail(reason)
        elif not self._over:
            self._stop()
            _say(reason)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if self._over or (self._optimizer is not None and optimizer is not self._optimizer):
            return
        try:
            if self._optimizer is None and not self._begin(optimizer):
                return
            self._tuner.step()
            if self._tuner.outcome is not None:
                self._stop()
        except Exception as error:  # the job comes first
            self._stop()
            _say(error)

    def _begin(self, optimizer: Any) -> bool:
        """The first optimizer that holds a parameter of the model counts the iterations."""
        from dpro_integrations import torch_ddp

        own = {id(p) for p in self.made.module.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return False
        if torch_ddp.is_tuned(self.made):  # the job has a callback or a call of its own
            self._stop()
            return False
        self._optimizer = optimizer
        self._tuner = torch_ddp.make_tuner(self.made)
        if self._tuner is None:
            self._stop()
            return False
        return True

    def _stop(self) -> None:
        """Take back every patch, let go of the job's objects."""
        from dpro_integrations.torch_forward import before_next_forward

        self._over = True
        self._restore()
        before_next_forward(self.made, self._handle.remove)  # we may be in that hook just now
        self.made = self._tuner = self._optimizer = None


def _say(reason: str | BaseException) -> None:
    from dpro_integrations.base import step_aside
    from dpro_integrations.torch_ddp import job_rank

    step_aside(reason, job_rank())


def _attach_horovod(module: ModuleType) -> None:
    from dpro_integrations import horovod_autoload

    horovod_autoload.attach(module)


_TARGETS = {"torch.nn.parallel.distributed": _attach, "horovod.torch.optimizer": _attach_horovod}

if active():  # the .pth file knows fewer words for "off" than we do
    for _name, _how in _TARGETS.items():
        if _name in sys.modules:
            _how(sys.modules[_name])
        else:
            sys.meta_path.insert(0, _Finder(_name, _how))
