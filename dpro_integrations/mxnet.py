"""Gluon: one handler for ``Estimator.fit``, :func:`autotune` for a plain loop, whichever library synchronises.

Example: ``examples/horovod_mxnet.py``. The adapter is in ``mxnet_horovod``, ends of iterations in ``mxnet_steps``,
capture in ``mxnet_capture``, MXNet's profiler and its engine in ``mxnet_profiler`` and ``mxnet_engine``.
"""

from __future__ import annotations

import atexit
import importlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mxnet.gluon.contrib.estimator import event_handler as events

from dpro.errors import DproError
from dpro.outcome import Outcome
from dpro.plan import Plan
from dpro.session import Session
from dpro.settings import Settings, disabled
from dpro.tuner import Tuner
from dpro_integrations import mxnet_profiler
from dpro_integrations.base import step_aside
from dpro_integrations.mxnet_steps import Steps

#: What makes trainers -> what tunes them: a module with ``place``, ``meet``, ``patience``, ``adapter``, ``MODULES``,
#: ``started_with``.
_LIBRARIES = {
    "horovod.mxnet": "dpro_integrations.mxnet_horovod",
    "byteps.mxnet": "dpro_integrations.mxnet_byteps",
}
#: Trainers that have or had a tuner. Weak on both sides: neither may live on because it was tuned once.
_tuned: weakref.WeakKeyDictionary[Any, weakref.ref[Tuner]] = weakref.WeakKeyDictionary()
_count = 0

mxnet_profiler.watch()


def is_tuned(trainer: Any) -> bool:
    """Whether ``trainer`` has or had a tuner."""
    return trainer in _tuned


@atexit.register
def _close_all() -> None:
    """A job that ends in mid-tuning says so, and lets go of the other ranks."""
    for reference in list(_tuned.values()):
        # a forked child that ends has copies of the tuners, but is no rank
        if (tuner := reference()) and tuner.owner_pid == os.getpid():
            tuner.close()


def library(trainer: Any) -> Any:
    """The module that knows the library of ``trainer``.

    Raises:
        DproError: none does.
    """
    for kind in type(trainer).__mro__:
        if name := _LIBRARIES.get(kind.__module__):
            return importlib.import_module(name)
    raise DproError("this trainer was not made by hvd.DistributedTrainer or bps.DistributedTrainer")


def make_tuner(
    trainer: Any,
    *,
    on_done: Callable[[Outcome], None] | None = None,
    plan: str | Path | Plan | None = None,
    **given: Any,
) -> Tuner | None:
    """A tuner for ``trainer``, or None where there is nothing to tune. Whoever calls it keeps it alive.

    All ranks call it at about the same place: it returns when rank 0 has called it.

    Args:
        trainer: made by ``hvd.DistributedTrainer``; its parameters may still be without a shape.
        on_done: called with the outcome on every rank.
        plan: a plan or its file: skips capture and search.
        given: fields of :class:`dpro.settings.Settings`.

    Raises:
        DproError: a bad setting or plan file, or a job that this can't tune.
    """
    global _count
    knows = library(trainer)
    rank, size = knows.place()
    if size < 2:
        if not disabled():
            Session(Settings(), rank).say("one process only: there is nothing to synchronise, nothing to tune")
        return None
    if trainer in _tuned and (former := _tuned[trainer]()):
        former.close()
    _count += 1  # also where this rank takes no part: the others' next tuner has the same tag as ours
    exchange = knows.meet(str(_count))
    try:
        if disabled():
            exchange.leave()
            return None
        settings = knows.patience(Settings.from_env(**given))
        if not isinstance(plan, Plan):
            file = plan or settings.plan
            plan = Plan.load(Path(file)) if file else None
        given_plan, note = knows.started_with(plan)
        session = Session(settings, exchange.rank)
        if note:
            session.say(note)
        adapter = knows.adapter(trainer, exchange)
        tuner = Tuner(adapter, settings, plan=given_plan, on_done=on_done, session=session)
    except Exception:
        exchange.leave()  # whoever does tune need not wait for us
        raise
    mxnet_profiler.watch()
    _tuned[trainer] = weakref.ref(tuner)
    return tuner


def autotune(
    trainer: Any,
    *,
    on_done: Callable[[Outcome], None] | None = None,
    plan: str | Path | Plan | None = None,
    **settings: Any,
) -> Tuner | None:
    """Tune a plain training loop: ``tuner = autotune(hvd.DistributedTrainer(…))``, on every rank.

    Training code stays as it is. The tuner moves on at every ``trainer.step()`` (or ``update()``); ``tuner.close()``
    at the end is optional. None where there is nothing to tune, or dpro stepped aside (it said why).

    Args:
        trainer: one step of it is one iteration.
        on_done: called once with the :class:`dpro.tuner.Outcome`, on every rank.
        plan: a plan file of an earlier run: verified at once, without profiling.
        settings: fields of :class:`dpro.settings.Settings` (``mode="suggest"``, …).
    """
    try:
        tuner = make_tuner(trainer, on_done=on_done, plan=plan, **settings)
        if tuner is not None:
            follow(tuner, trainer)
    except Exception as error:  # whatever it is, the job goes on
        step_aside(error, _rank(trainer))
        return None
    return tuner


def follow(tuner: Tuner, trainer: Any) -> Callable[[], None]:
    """Move ``tuner`` at every iteration of ``trainer``, until it is done; gives what lets the trainer go."""

    def stepped() -> None:
        tuner.step()
        if tuner.outcome is not None:
            stop()

    def ending() -> None:
        tuner.close()
        stop()

    def stop() -> None:
        steps.stop()
        mxnet_profiler.unwatch()

    steps = Steps(trainer, stepped, ending, library(trainer).MODULES)
    return stop


class DproHandler(events.TrainBegin, events.TrainEnd, events.EpochBegin, events.EpochEnd):
    """Tune a job of ``Estimator.fit``; once, whatever number of fits.

    Args:
        mode: ``"apply"`` (default), ``"suggest"`` (write a plan, change nothing) or ``"observe"``.
        plan: a plan or its file, of an earlier run: verified at once, without profiling.
        settings: further fields of :class:`dpro.settings.Settings`.

    After training ``handler.outcome`` says what came of it.
    """

    #: after the handlers that update weights and metrics
    priority = 1000

    def __init__(self, mode: str | None = None, plan: str | Path | Plan | None = None, **settings: Any) -> None:
        self.outcome: Outcome | None = None
        self._settings = {"mode": mode, **settings}
        self._plan = plan
        self._tuner: Tuner | None = None
        self._began = False
        self._undo: list[Callable[[], None]] = []

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        if self._began:
            return
        self._began = True
        try:
            self._tuner = make_tuner(estimator.trainer, on_done=self._done, plan=self._plan, **self._settings)
            if self._tuner is not None:
                self._undo = [
                    follow(self._tuner, estimator.trainer),
                    _before_each(estimator.batch_processor, "evaluate_batch", self._tuner.skip),
                ]
        except Exception as error:  # the job comes first
            self._close()
            step_aside(error, _rank(estimator.trainer))

    def epoch_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        self._skip()

    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        self._skip()
        return False

    def train_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        self._close()

    def _skip(self) -> None:
        if self._tuner is not None:
            self._tuner.skip()

    def _done(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._let_go()

    def _close(self) -> None:
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            tuner.close()
        self._let_go()

    def _let_go(self) -> None:
        undo, self._undo = self._undo, []
        for action in undo:
            action()


def _before_each(owner: Any, name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` before every call of a method of ``owner``; gives the undoing."""
    own, original = name in vars(owner), getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    def undo() -> None:
        if vars(owner).get(name) is wrapper:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    setattr(owner, name, wrapper)
    return undo


def _rank(trainer: Any) -> int:
    try:
        rank, _ = library(trainer).place()
        return int(rank)
    except Exception:
        return 0
