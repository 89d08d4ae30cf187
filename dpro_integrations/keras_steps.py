"""The end of every optimizer step of a Keras model, in ``fit`` and in loops of ``train_on_batch``.

Knows nothing of tuning.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow import keras

from dpro_integrations.base import put_on
from dpro_integrations.keras_graph import distributed_optimizer

#: What Keras asks a model for before it evaluates or predicts.
OTHER_WORK = ("make_test_function", "make_predict_function")


class StepCallback(keras.callbacks.Callback):
    """Tells of the steps of one model.

    Args:
        stepped: called when an optimizer step has ended. Accumulation's other batches are none.
        skipped: called when what comes, or was, is no training: an epoch's end, a validation.
    """

    def __init__(self, stepped: Callable[[], None], skipped: Callable[[], None]) -> None:
        super().__init__()
        self._supports_tf_logs = True  # else Keras would copy the logs for us after every batch
        self._stepped, self._skipped = stepped, skipped

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if is_update(self.model):
            self._stepped()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._skipped()

    def on_test_begin(self, logs: Any = None) -> None:
        self._skipped()

    def on_test_end(self, logs: Any = None) -> None:
        self._skipped()


def is_update(model: Any) -> bool:
    """Whether the batch that was trained on ended in an update (``backward_passes_per_step``)."""
    optimizer = distributed_optimizer(model)
    helper = getattr(optimizer, "_agg_helper", None)
    # a graph-mode counter has no value to be asked for
    return helper is None or not tf.executing_eagerly() or int(helper.counter.numpy()) == 0


class Steps:
    """Calls ``stepped`` after each optimizer step of ``model``, until :meth:`stop`.

    Args:
        model: its ``fit``, ``train_on_batch`` and :data:`OTHER_WORK` are wrapped on the object.
        stepped: may call :meth:`stop`.
        skipped: see :class:`StepCallback`.
        undo: called by :meth:`stop`.
    """

    def __init__(
        self, model: Any, stepped: Callable[[], None], skipped: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        self._model = model
        self.callback = StepCallback(stepped, skipped)
        self._unpatch: list[Callable[[], None]] = [
            undo,
            before_other_work(model, lambda: self.callback._skipped()),
            _wrap(model, "fit", self._fit),
            _wrap(model, "train_on_batch", self._train_on_batch),
        ]

    def stop(self) -> None:
        """No more calls. Safe to call twice, and from ``stepped``."""
        self.callback._stepped = self.callback._skipped = _nothing
        undone, self._unpatch = self._unpatch, []
        for undo in undone:
            undo()

    def _fit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fit(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = with_callback(self.callback, original, args, kwargs)
            return original(*args, **kwargs)

        return fit

    def _train_on_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_on_batch(*args: Any, **kwargs: Any) -> Any:
            logs = original(*args, **kwargs)
            if is_update(self._model):
                self.callback._stepped()
            return logs

        return train_on_batch


def with_callback(
    callback: Any, fit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of ``fit`` with ``callback`` behind the job's own; a list of the job's is not changed."""
    place = next((i for i, name in enumerate(inspect.signature(fit).parameters) if name == "callbacks"), -1)
    positional = 0 <= place < len(args)
    given = args[place] if positional else kwargs.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        callback.set_model(given.model)
        if callback not in given.callbacks:  # a list that was given to a fit before has it
            given.append(callback)
        given._should_call_train_batch_hooks = True
        return args, kwargs
    given = list(given) if isinstance(given, (list, tuple)) else [given] if given is not None else []
    if positional:
        return (*args[:place], [*given, callback], *args[place + 1 :]), kwargs
    return args, {**kwargs, "callbacks": [*given, callback]}


def before_other_work(model: Any, skipped: Callable[[], None]) -> Callable[[], None]:
    """Have ``skipped`` called before the job evaluates or predicts with ``model``. Returns the undo."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            skipped()
            return original(*args, **kwargs)

        return wrapper

    undone = [_wrap(model, name, make) for name in OTHER_WORK]

    def undo() -> None:
        for one in undone:
            one()

    return undo


def _wrap(model: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Put ``make(original)`` on the object ``model`` as ``name``, past Keras' tracking. Returns the undo."""
    original = getattr(model, name)
    return put_on(model, name, functools.wraps(original)(make(original)))


def _nothing() -> None:
    pass
