"""Horovod for torch: the adapter for one ``DistributedOptimizer``, and :func:`autotune` for a plain loop.

Example: ``examples/horovod_torch.py``. Groups are in ``horovod_groups``, capture in ``horovod_capture``,
agreement between ranks in ``horovod_exchange``, ends of steps in ``horovod_steps``.
"""

from __future__ import annotations

import atexit
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from dpro.adapter import Exchange, Knob
from dpro.errors import DproError, PlanError
from dpro.outcome import Outcome
from dpro.plan import Plan
from dpro.session import Session
from dpro.settings import Settings, disabled
from dpro.tuner import Tuner
from dpro_integrations import torch_micro
from dpro_integrations.base import step_aside
from dpro_integrations.horovod_capture import Capture
from dpro_integrations.horovod_exchange import meet
from dpro_integrations.horovod_groups import Groups
from dpro_integrations.horovod_settings import patient
from dpro_integrations.horovod_start import started_with, switched_on
from dpro_integrations.horovod_steps import Steps
from dpro_integrations.host_load import StepCpu
from dpro_integrations.torch_adapter import TorchAdapter
from dpro_integrations.torch_shares import SharedBatchSampler

#: Of a plan, that can be set here.
_FIELDS = {"tensor_groups", "compile_regions", "recompute", "accumulate", "batch_shares"}
#: Optimizers that have or had a tuner. Weak on both sides: neither may live on because it was tuned once.
_tuned: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Tuner]] = weakref.WeakKeyDictionary()
_count = 0


def is_tuned(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` has or had a tuner."""
    return optimizer in _tuned


@atexit.register
def _close_all() -> None:
    """A job that ends in mid-tuning says so, and lets go of the other ranks."""
    for reference in list(_tuned.values()):
        # a forked child that ends has copies of the tuners, but is no rank
        if (tuner := reference()) and tuner.owner_pid == os.getpid():
            tuner.close()


class HorovodTorchAdapter(TorchAdapter):
    """:class:`dpro.adapter.Adapter` for one optimizer made by ``hvd.DistributedOptimizer``.

    Args:
        optimizer: it stays the same object whatever is applied.
        exchange: how this job's ranks agree.
    """

    name = "horovod_torch"

    def __init__(self, optimizer: Any, exchange: Exchange) -> None:
        self.exchange = exchange
        self._optimizer = optimizer
        self._groups = Groups(optimizer)
        self._model_seen: Callable[[], torch.nn.Module | None] = _nobody
        self._sparse = False
        self._parts = 1
        # hvd.init() makes a new one of these each time: how to see that Horovod was started anew
        self._generation = mpi_ops._handle_map
        self._place = hvd.rank(), hvd.size()
        self._seen_at = time.monotonic()
        self._longest_s = 0.0
        # up to the optimizer's step: in it the thread waits for gradients, and Horovod waits by spinning
        self._cpu = StepCpu(time.thread_time_ns)
        self._before_step: Any = None  # the handle of the hook that ends it, from the first obstacle() on

    def capabilities(self) -> set[Knob]:
        if self.why_not():
            return set()
        knobs = {Knob.GROUPS, Knob.CYCLE_TIME}
        if self._module() is not None:
            knobs.add(Knob.RECOMPUTE)
        knobs |= self._batch_knobs()
        if self._can_compile():
            knobs.add(Knob.COMPILE_REGIONS)
        return knobs

    def why_not(self) -> str:
        optimizer = self._optimizer
        if not hasattr(optimizer, "_groups") or optimizer.op not in (hvd.Average, hvd.Sum):
            return "only gradients that are averaged or summed can be grouped"
        if optimizer._groups is not None and not self._groups.in_force:
            return "the job has groups of its own"
        if optimizer.process_set.process_set_id != 0:
            return "the optimizer spans only a process set"
        if optimizer.gradient_predivide_factor != 1.0:
            return "Horovod's groups ignore gradient_predivide_factor"
        if not optimizer._grad_accs:
            return "the optimizer has no hooks on gradients"
        if not self._groups.in_force and "synchronize" in vars(optimizer):
            return "the job replaced optimizer.synchronize()"
        if self._sparse:
            return "there are sparse gradients, which can't be grouped"
        if switched_on("HOROVOD_AUTOTUNE"):
            return "HOROVOD_AUTOTUNE changes settings meanwhile"
        return ""

    def obstacle(self) -> str:
        now = time.monotonic()
        self._longest_s, self._seen_at = max(self._longest_s, now - self._seen_at), now
        if self._before_step is None:
            hook = torch.compiler.disable(lambda *_: self._cpu.end())
            self._before_step = self._optimizer.register_step_pre_hook(hook)
        self._cpu.begin()
        if not hvd.is_initialized() or mpi_ops._handle_map is not self._generation:
            return "Horovod was shut down or started anew"
        if (hvd.rank(), hvd.size()) != self._place:
            return "the job's ranks have changed"
        if not self._sparse:
            self._sparse = any(p.grad is not None and p.grad.is_sparse for p in self._known().values())
        return ""

    def fingerprint(self) -> dict[str, str]:
        return {
            "model": self._model(),
            "world_size": str(self.exchange.world_size),
            "framework": f"horovod {horovod.__version__}, torch {torch.__version__}",
        }

    def start_capture(self) -> None:
        self._capture = Capture(self._optimizer, self._longest_s, self._cpu, self._new_marks(), self._new_meter())
        self._watch_parts(True)

    def prepare(self, plan: Plan) -> None:
        self._check_fit(plan)
        if reason := self.why_not():
            raise PlanError(f"groups can't be changed here: {reason}")
        foreign = sorted(set(plan.settings()) - _FIELDS)
        if foreign:
            raise PlanError(f"Horovod has no setting for {foreign[0]!r} that dpro changes in a running job")
        if not _FIELDS & set(plan.settings()):
            raise PlanError("the plan has no tensor_groups")
        known = self._known()
        for name in (name for group in plan.tensor_groups or () for name in group):
            if name not in known:
                raise PlanError(f"the optimizer has no parameter {name!r}")
        self._check_regions(plan)
        self._check_parts(plan)
        self._check_shares(plan)
        self._check_blocks(plan)

    def apply(self, plan: Plan) -> None:
        self.prepare(plan)
        self._set_parts(1)
        self._set_shares(None)
        self._set_blocks(None)
        self._check_blocks(plan)
        known = self._known()
        if plan.tensor_groups:
            self._groups.set([[known[name] for name in group] for group in plan.tensor_groups])
        else:
            self._groups.clear()
        self._set_regions(plan)
        self._set_blocks(plan)
        self._set_parts(plan.accumulate or 1)
        self._set_shares(plan.batch_shares)

    def revert(self) -> None:
        self._set_parts(1)
        self._set_shares(None)
        self._set_blocks(None)
        self._set_regions(None)
        self._groups.clear()

    def _can_cut(self) -> bool:
        # a job that accumulates already means something else by its steps
        return self._optimizer.backward_passes_per_step == self._parts and super()._can_cut()

    def _set_parts(self, parts: int) -> None:
        if parts != self._parts:
            super()._set_parts(parts)
            if (model := self._module()) is not None:
                torch_micro.cutting(model).broke_off = partial(_begin_anew, self._optimizer)
            # a step that has one pass all the same hands its gradients in as it ends
            self._optimizer.set_backward_passes_per_step(parts)
            self._parts = parts

    def close(self) -> None:
        if self._before_step is not None:
            self._before_step.remove()
        self.abort_capture()
        self._forget_regions()

    def _module(self) -> torch.nn.Module | None:
        """The optimizer does not know the model: whatever has all of its parameters, by their names if one has.

        Of a model and what is only around it, that is the model.
        """
        known = self._known()
        wanted = {id(p) for p in known.values()}

        def has_all(module: torch.nn.Module | None) -> bool:
            return module is not None and wanted <= {id(p) for p in module.parameters()}

        if not has_all(model := self._model_seen()):
            found = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module) and has_all(o)]
            by_name = [m for m in found if all(dict(m.named_parameters()).get(n) is p for n, p in known.items())]
            model = min(by_name or found, key=lambda module: sum(1 for _ in module.modules()), default=None)
            self._model_seen = _nobody if model is None else weakref.ref(model)
        return model

    def _parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        return self._known().items()

    def _known(self) -> dict[str, torch.nn.Parameter]:
        """Name -> parameter whose gradient Horovod reduces."""
        optimizer = self._optimizer
        return {name: p for p, name in optimizer._parameter_names.items() if p in optimizer._requires_update}


def _nobody() -> None:
    return None


def _begin_anew(optimizer: Any) -> None:
    """A step broke off between its backward passes: the next one has all of them, unless gradients are under way."""
    if not any(handle for handle, _ in optimizer._handles.values()):
        optimizer._handles.clear()
        optimizer.set_backward_passes_per_step(optimizer.backward_passes_per_step)


def make_tuner(
    optimizer: torch.optim.Optimizer,
    *,
    on_done: Callable[[Outcome], None] | None = None,
    plan: str | Path | Plan | None = None,
    sampler: SharedBatchSampler | None = None,
    **given: Any,
) -> Tuner | None:
    """A tuner for ``optimizer``, or None where there is nothing to tune. Whoever calls it keeps it alive.

    All ranks call it at about the same place: it returns when rank 0 has called it.

    Args:
        optimizer: made by ``hvd.DistributedOptimizer``.
        on_done: called with the outcome on every rank.
        plan: a plan or its file: skips capture and search.
        sampler: see :func:`autotune`.
        given: fields of :class:`dpro.settings.Settings`.

    Raises:
        DproError: a bad setting or plan file, or a job that this can't tune.
    """
    global _count
    if not hvd.is_initialized():
        raise DproError("hvd.init() comes first")
    if not hasattr(optimizer, "_parameter_names"):
        raise DproError("this optimizer was not made by hvd.DistributedOptimizer")
    if hvd.size() < 2:
        if not disabled():
            Session(Settings(), 0).say("one process only: there is nothing to synchronise, nothing to tune")
        return None
    if switched_on("HOROVOD_ELASTIC"):
        raise DproError("the job is elastic: its ranks may change while dpro measures")
    if optimizer in _tuned and (former := _tuned[optimizer]()):
        former.close()
    _count += 1  # also where this rank takes no part: the others' next tuner has the same tag as ours
    exchange = meet(hvd, str(_count))
    try:
        if disabled():
            exchange.leave()
            return None
        settings = patient(Settings.from_env(**given))
        if not isinstance(plan, Plan):
            file = plan or settings.plan
            plan = Plan.load(Path(file)) if file else None
        plan, note = started_with(plan)
        session = Session(settings, exchange.rank)
        if note:
            session.say(note)
        adapter = HorovodTorchAdapter(optimizer, exchange)
        if sampler is not None:
            adapter.share_batches(sampler)
        adapter.may_compile = settings.regions_s > 0
        tuner = Tuner(adapter, settings, plan=plan, on_done=on_done, session=session)
    except Exception:
        exchange.leave()  # whoever does tune need not wait for us
        raise
    _tuned[optimizer] = weakref.ref(tuner)
    return tuner


def autotune(
    optimizer: torch.optim.Optimizer,
    *,
    on_done: Callable[[Outcome], None] | None = None,
    plan: str | Path | Plan | None = None,
    sampler: SharedBatchSampler | None = None,
    **settings: Any,
) -> Tuner | None:
    """Tune a plain training loop: ``tuner = autotune(hvd.DistributedOptimizer(…))``, on every rank.

    Training code stays as it is. The tuner moves on at every ``optimizer.step()``; ``tuner.close()`` at
    the end is optional. None where there is nothing to tune, or dpro stepped aside (it said why).

    Args:
        optimizer: made by ``hvd.DistributedOptimizer``; one step of it is one iteration.
        on_done: called once with the :class:`dpro.tuner.Outcome`, on every rank.
        plan: a plan file of an earlier run: verified at once, without profiling.
        sampler: what deals out the samples of each batch, where ranks that are not equally fast may take unequal
            shares; steps go through :func:`dpro_integrations.torch_micro.step` then.
        settings: fields of :class:`dpro.settings.Settings` (``mode="suggest"``, …).
    """
    try:
        tuner = make_tuner(optimizer, on_done=on_done, plan=plan, sampler=sampler, **settings)
    except Exception as error:  # whatever it is, the job goes on
        step_aside(error, hvd.rank() if hvd.is_initialized() else 0)
        return None
    if tuner is not None:
        follow(tuner, optimizer)
    return tuner


def follow(tuner: Tuner, optimizer: torch.optim.Optimizer) -> None:
    """Move ``tuner`` at every step of ``optimizer``, until it is done."""

    def stepped() -> None:
        tuner.step()
        if tuner.outcome is not None:
            steps.stop()

    def joining() -> None:
        # the others go on without this rank; they need not wait for it at their next meeting
        tuner.close()
        steps.stop()

    steps = Steps(optimizer, stepped, joining)
