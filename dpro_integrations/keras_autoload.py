"""Activation by environment for Keras: ``DPRO=apply horovodrun … train.py`` (or ``bpslaunch``) on an unchanged script.

``autoload`` calls :func:`attach` when the job imports the library's Keras module, which is before the library reads its
settings from the environment: what a plan has for a job's start is put there, where the job has no say of its own. Then
the first model that trains with an optimizer of a ``DistributedOptimizer`` is tuned, in ``fit`` and in
``train_on_batch``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dpro_integrations import byteps_start
from dpro_integrations.horovod_start import start_with_plan
from dpro_integrations.watch import Watch


def attach(module: ModuleType) -> None:
    """Watch for the first model that trains; start Horovod as the plan given has it.

    Args:
        module: ``horovod._keras``.
    """
    start_with_plan()
    _watch_first(module.tf.keras.Model)


def attach_byteps(module: ModuleType) -> None:
    """The same for BytePS.

    Args:
        module: ``byteps._keras``.
    """
    byteps_start.start_with_plan()
    _watch_first(module.tf.keras.Model)


class _Watch(Watch):
    another = "the job trains two distributed models; give one to dpro_integrations.keras.autotune()"

    def __init__(self, model: Any, restore: Callable[[], None]) -> None:
        from dpro_integrations.keras import library, trace
        from dpro_integrations.keras_steps import StepCallback

        super().__init__(model, restore)
        self._tracing: Any = None if self._has_own() else trace(model)
        self.callback = StepCallback(self._stepped, self._skipped)
        self._unpatch = library(model).before_leaving(self._leaving)

    @staticmethod
    def say(reason: str | BaseException) -> None:
        from dpro_integrations.base import step_aside

        rank = os.environ.get("HOROVOD_RANK", os.environ.get("DMLC_WORKER_ID", "0"))
        step_aside(reason, int(rank) if rank.isdecimal() else 0)

    def _has_own(self) -> bool:
        from dpro_integrations.keras import is_tuned

        return is_tuned(self.made)

    def _skipped(self) -> None:
        if self._tuner is not None:
            self._tuner.skip()

    def _leaving(self) -> None:
        if self._tuner is not None:
            self._tuner.close()
        self._stop()

    def _make(self) -> Any:
        from dpro_integrations.keras import make_tuner

        # the job may have a callback or a call of its own
        return None if self._has_own() else make_tuner(self.made, tracing=self._tracing)

    def _unhook(self, made: Any) -> None:
        from dpro_integrations.keras_steps import _nothing

        if self._tracing is not None:
            self._tracing.stop()
        self._tracing = None
        self.callback._stepped = self.callback._skipped = _nothing
        self._unpatch()


def _watch_first(model_class: Any) -> None:
    """Watch the first model that the job trains with Horovod, and tell the watch of a second one."""
    from dpro_integrations.keras_steps import OTHER_WORK

    watch: _Watch | None = None
    patched: dict[str, tuple[Any, Any]] = {}

    def noted(model: Any) -> bool:
        """Whether ``model`` is the one that is watched."""
        nonlocal watch
        from dpro_integrations.keras_graph import distributed_optimizer

        try:
            if distributed_optimizer(model) is None:
                return False
            if watch is None:
                watch = _Watch(model, restore)
            elif watch.made is not model:
                watch.second()
        except Exception as error:  # the job comes first
            restore()
            _Watch.say(error)
        return watch is not None and watch.made is model

    def restore() -> None:
        for name, (wrapper, original) in patched.items():
            if vars(model_class).get(name) is wrapper:
                setattr(model_class, name, original)

    def patch(name: str, make: Callable[[Any], Any]) -> None:
        original = vars(model_class)[name]
        wrapper = functools.wraps(original)(make(original))
        patched[name] = wrapper, original
        setattr(model_class, name, wrapper)

    def fit(original: Any) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if noted(self):
                assert watch is not None
                args, kwargs = _injected(watch, functools.partial(original, self), args, kwargs)
            return original(self, *args, **kwargs)

        return wrapper

    def train_on_batch(original: Any) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            ours = noted(self)
            logs = original(self, *args, **kwargs)
            if ours and watch is not None and watch.made is self:
                _stepped(watch)
            return logs

        return wrapper

    def other_work(original: Any) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if watch is not None and watch.made is self:
                watch.callback._skipped()
            return original(self, *args, **kwargs)

        return wrapper

    patch("fit", fit)
    patch("train_on_batch", train_on_batch)
    for name in OTHER_WORK:
        patch(name, other_work)


def _injected(watch: _Watch, fit: Any, args: Any, kwargs: Any) -> Any:
    from dpro_integrations.keras_steps import with_callback

    return with_callback(watch.callback, fit, args, kwargs)


def _stepped(watch: _Watch) -> None:
    from dpro_integrations.keras_steps import is_update

    if is_update(watch.made):
        watch.callback._stepped()
