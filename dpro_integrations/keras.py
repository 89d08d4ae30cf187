"""Keras: one callback for ``fit``, :func:`autotune` for a loop of ``train_on_batch``, whichever library synchronises.

Examples: ``examples/horovod_keras.py``, ``examples/byteps_keras.py``. The adapters are in ``keras_horovod`` and
``keras_byteps``, ends of steps in ``keras_steps``.
"""

from __future__ import annotations

import atexit
import importlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpro.errors import DproError
from dpro.outcome import Outcome
from dpro.plan import Plan
from dpro.session import Session
from dpro.settings import Settings, disabled
from dpro.tuner import Tuner
from dpro_integrations.base import before_the_meeting, step_aside
from dpro_integrations.keras_graph import Tracing, distributed_optimizer, library_of
from dpro_integrations.keras_steps import StepCallback, Steps, before_other_work
from dpro_integrations.keras_version import steps_per_execution

#: What makes optimizers -> what tunes them: a module with ``place``, ``meet``, ``patience``, ``adapter``,
#: ``before_leaving``, ``started_with``. "": none is distributed.
_LIBRARIES = {
    "horovod": "dpro_integrations.keras_horovod",
    "byteps": "dpro_integrations.keras_byteps",
    "": "dpro_integrations.keras_single",
}
#: Models that have or had a tuner. Weak on both sides: neither may live on because it was tuned once.
_tuned: weakref.WeakKeyDictionary[Any, weakref.ref[Tuner]] = weakref.WeakKeyDictionary()
_count = 0


def is_tuned(model: Any) -> bool:
    """Whether ``model`` has or had a tuner."""
    return model in _tuned


def library(model: Any) -> Any:
    """The module that knows the library of ``model``'s optimizer."""
    return importlib.import_module(_LIBRARIES[library_of(distributed_optimizer(model))])


@atexit.register
def _close_all() -> None:
    """A job that ends in mid-tuning says so, and lets go of the other ranks."""
    for reference in list(_tuned.values()):
        # a forked child that ends has copies of the tuners, but is no rank
        if (tuner := reference()) and tuner.owner_pid == os.getpid():
            tuner.close()


class DproCallback(StepCallback):
    """Tune a job of ``model.fit`` with a ``DistributedOptimizer``; once, whatever number of fits.

    Args:
        mode: ``"apply"`` (default), ``"suggest"`` (write a plan, change nothing) or ``"observe"``.
        plan: a plan or its file, of an earlier run: verified at once, without profiling.
        settings: further fields of :class:`dpro.settings.Settings`.

    After training ``callback.outcome`` says what came of it.
    """

    def __init__(self, mode: str | None = None, plan: str | Path | Plan | None = None, **settings: Any) -> None:
        super().__init__(self._step, self._skip)
        self.outcome: Outcome | None = None
        self._settings = {"mode": mode, **settings}
        self._plan = plan
        self._tuner: Tuner | None = None
        self._began = False
        self._unpatch: list[Callable[[], None]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        if self._began:
            return
        self._began = True
        self._tuner = _made(self.model, on_done=self._done, plan=self._plan, **self._settings)
        if self._tuner is not None:
            # Keras tells a callback of the validation in fit, not of what other callbacks do
            leaving = library(self.model).before_leaving(self._close)
            self._unpatch = [leaving, before_other_work(self.model, self._skip)]

    def on_train_end(self, logs: Any = None) -> None:
        self._close()

    def _step(self) -> None:
        if self._tuner is not None:
            self._tuner.step()
            if self._tuner.outcome is not None:
                self._close()

    def _skip(self) -> None:
        if self._tuner is not None:
            self._tuner.skip()

    def _close(self) -> None:
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            tuner.close()
        undone, self._unpatch = self._unpatch, []
        for undo in undone:
            undo()

    def _done(self, outcome: Outcome) -> None:
        self.outcome = outcome


def trace(model: Any) -> Tracing:
    """Look on while the train step of ``model`` is traced; at best before the first one.

    Raises:
        DproError: a model that dpro can't tune.
    """
    if model.run_eagerly:
        raise DproError("the model runs eagerly: there is no graph to look at (compile without run_eagerly)")
    if getattr(model, "jit_compile", False):
        raise DproError("the whole step is one XLA program (compile without jit_compile)")
    if steps_per_execution(model) != 1:
        raise DproError(
            "several steps are one execution: dpro looks at single ones (compile with steps_per_execution=1)"
        )
    if type(model.distribute_strategy).__name__ != "_DefaultDistributionStrategy":
        raise DproError("the model is under a tf.distribute strategy as well")
    return Tracing(model, distributed_optimizer(model))


def make_tuner(
    model: Any,
    *,
    tracing: Tracing | None = None,
    on_done: Callable[[Outcome], None] | None = None,
    plan: str | Path | Plan | None = None,
    **given: Any,
) -> Tuner | None:
    """A tuner for ``model``, or None where there is nothing to tune. Whoever calls it keeps it alive.

    All ranks call it at about the same place: it returns when rank 0 has called it.

    Args:
        model: compiled with an optimizer made by ``hvd.`` or ``bps.DistributedOptimizer``.
        tracing: of this model, from before its first step; begun here if not given.
        on_done: called with the outcome on every rank.
        plan: a plan or its file: skips capture and search.
        given: fields of :class:`dpro.settings.Settings`.

    Raises:
        DproError: a bad setting or plan file, or a job that this can't tune.
    """
    global _count
    knows = library(model)
    rank, size = knows.place()
    usual = before_the_meeting()
    wanted = plan or any(given.get(name) or getattr(usual, name) for name in ("plan", "regions_s", "memory_bytes"))
    if size < 2 and not wanted:
        if not disabled():
            Session(Settings(), rank).say(
                "one process only: there is nothing to synchronise, nothing to tune (regions_s=10 tries XLA on layers, "
                "memory_bytes makes it fit into memory)"
            )
        return None
    if size < 2:
        knows = importlib.import_module(_LIBRARIES[""])
    if model in _tuned and (former := _tuned[model]()):
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
        tracing = tracing or trace(model)
        adapter = knows.adapter(tracing, exchange)
        tuner = Tuner(adapter, settings, plan=given_plan, on_done=on_done, session=session)
    except Exception:
        exchange.leave()  # whoever does tune need not wait for us
        if tracing is not None:
            tracing.stop()
        raise
    _tuned[model] = weakref.ref(tuner)
    return tuner


def _made(model: Any, **given: Any) -> Tuner | None:
    """As :func:`make_tuner`; says why there is none."""
    try:
        return make_tuner(model, **given)
    except Exception as error:  # whatever it is, the job goes on
        step_aside(error, _rank(model))
        return None


def _rank(model: Any) -> int:
    try:
        rank, _ = library(model).place()
        return int(rank)
    except Exception:
        return 0


def autotune(
    model: Any,
    *,
    on_done: Callable[[Outcome], None] | None = None,
    plan: str | Path | Plan | None = None,
    **settings: Any,
) -> Tuner | None:
    """Tune a loop of ``train_on_batch`` (``fit`` too): ``tuner = autotune(model)`` after ``compile``, on every rank.

    Training code stays as it is. The tuner moves on at every step; ``tuner.close()`` at the end is optional. None where
    there is nothing to tune, or dpro stepped aside (it said why).

    Args:
        model: compiled with an optimizer made by ``hvd.`` or ``bps.DistributedOptimizer``; before its first step, at
            best.
        on_done: called once with the :class:`dpro.tuner.Outcome`, on every rank.
        plan: a plan file of an earlier run: verified at once, without profiling.
        settings: fields of :class:`dpro.settings.Settings` (``mode="suggest"``, …).
    """
    tuner = _made(model, on_done=on_done, plan=plan, **settings)
    if tuner is not None:
        follow(tuner, model)
    return tuner


def follow(tuner: Tuner, model: Any) -> None:
    """Move ``tuner`` at every step of ``model``, until it is done."""

    def stepped() -> None:
        tuner.step()
        if tuner.outcome is not None:
            steps.stop()

    def leaving() -> None:
        # the others go on without this rank; they need not wait for it at their next meeting
        tuner.close()
        steps.stop()

    steps = Steps(model, stepped, tuner.skip, library(model).before_leaving(leaving))
