"""PyTorch DistributedDataParallel: the adapter, and :func:`autotune` for a plain training loop.

Example: ``examples/plain_ddp.py``. Re-wrapping is in ``torch_rewrap``, profiling in
``torch_capture``, agreement between ranks in ``torch_exchange``, hooks in ``torch_forward``.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dpro.adapter import Exchange, Knob
from dpro.errors import DproError, PlanError
from dpro.outcome import Outcome
from dpro.plan import Plan
from dpro.session import Session
from dpro.settings import Settings, disabled
from dpro.trace.model import GRADIENT_DTYPES, RankTrace
from dpro.tuner import Tuner
from dpro_integrations.base import step_aside
from dpro_integrations.host_load import StepCpu
from dpro_integrations.torch_adapter import TorchAdapter
from dpro_integrations.torch_capture import Capture
from dpro_integrations.torch_exchange import exchange_of_job
from dpro_integrations.torch_forward import OrderWatch, before_next_forward
from dpro_integrations.torch_rewrap import (
    HAS_CAP_LIST,
    arguments,
    bucket_bytes,
    built_over_these,
    compress,
    gradient_dtypes,
    plan_arguments,
    reducer_parameters,
    rewrap,
    why_fixed,
)
from dpro_integrations.torch_shares import SharedBatchSampler

#: Of a plan, that can be set here.
_FIELDS = {
    "bucket_caps",
    "tensor_groups",
    "ddp_options",
    "gradient_dtype",
    "compile_regions",
    "recompute",
    "accumulate",
    "batch_shares",
}
_OPTIONS = ("gradient_as_bucket_view", "batched_grad_copy")
#: Wrappers that have or had a tuner, so that callback and environment never both tune one job.
#: Weak on both sides: a model that the job drops must not live on because it was tuned once.
_tuned: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[Tuner]] = weakref.WeakKeyDictionary()
_count = 0


def is_tuned(ddp: DistributedDataParallel) -> bool:
    """Whether ``ddp`` has or had a tuner."""
    return ddp in _tuned


@atexit.register
def _close_all() -> None:
    """A job that ends in mid-tuning says so, and lets go of the other ranks."""
    for reference in list(_tuned.values()):
        # a forked child that ends has copies of the tuners, but is no rank
        if (tuner := reference()) and tuner.owner_pid == os.getpid():
            tuner.close()


def job_rank() -> int:
    """This process's rank; 0 where the job has no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class TorchDDPAdapter(TorchAdapter):
    """:class:`dpro.adapter.Adapter` for one DDP wrapper.

    Args:
        ddp: the wrapper; it stays the same object whatever is applied.
    """

    name = "torch_ddp"

    def __init__(self, ddp: DistributedDataParallel, tag: str = "") -> None:
        self.exchange: Exchange = exchange_of_job(tag)
        self._ddp = ddp
        self._original: dict[str, Any] | None = None
        # the tuner may be made inside optimizer.step(), around which the job has frozen something
        self._built = [id(p) for _, p in reducer_parameters(ddp)] if built_over_these(ddp) else None
        self._hooks = len(ddp._comm_hooks)
        self._compressed = False
        self._order: OrderWatch | None = None
        self._early_forward: bool | None = None
        self._seen_at = time.monotonic()
        self._longest_s = 0.0
        self._cpu = StepCpu(time.thread_time_ns)

    def capabilities(self) -> set[Knob]:
        if self.why_not():
            return set()
        knobs = {Knob.BUCKET_CAP, Knob.BUCKET_VIEW, Knob.RECOMPUTE}
        knobs |= self._batch_knobs()
        if HAS_CAP_LIST:
            knobs.add(Knob.BUCKET_LIST)
        if hasattr(self._ddp, "batched_grad_copy"):
            knobs.add(Knob.BATCHED_COPY)
        if gradient_dtypes(self._ddp):
            knobs.add(Knob.COMPRESSION)
        if self._can_compile():
            knobs.add(Knob.COMPILE_REGIONS)
        return knobs

    def why_not(self) -> str:
        if self._early_forward:
            return "the next forward runs before the optimizer's step"
        return why_fixed(self._ddp, own_hook=self._compressed)

    def obstacle(self) -> str:
        self._look()
        if self._ddp._join_config.enable:
            return "the job runs under Join (uneven inputs)"
        if len(self._ddp._comm_hooks) > self._hooks + self._compressed:
            return "a communication hook was registered"
        if [id(p) for _, p in reducer_parameters(self._ddp)] != self._built:
            return "parameters were frozen, unfrozen or replaced since DDP was made"
        return ""

    def _look(self) -> None:
        """Over the second step: the order of forward and step. Over all steps: how long they take."""
        now = time.monotonic()
        self._cpu.end()
        self._cpu.begin()
        self._longest_s = max(self._longest_s, now - self._seen_at)
        self._seen_at = now
        if self._order is not None:
            self._early_forward = self._order.ends_early()
            self._order = None
        elif self._early_forward is None:
            self._order = OrderWatch(self._ddp)

    def fingerprint(self) -> dict[str, str]:
        return {
            "model": self._model(),
            "world_size": str(self.exchange.world_size),
            "framework": f"torch {torch.__version__}",
            "backend": str(dist.get_backend(self._ddp.process_group)),
        }

    def _module(self) -> torch.nn.Module:
        module: torch.nn.Module = self._ddp.module
        return module

    def _called(self) -> torch.nn.Module:
        return self._ddp

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return reducer_parameters(self._ddp)

    def _unseen_bytes(self) -> int:
        return bucket_bytes(self._ddp)

    def start_capture(self) -> None:
        self._capture = Capture(self._ddp, self._longest_s, self._cpu, self._new_marks(), self._new_meter())
        self._watch_parts(True)

    def stop_capture(self) -> RankTrace:
        trace = super().stop_capture()
        trace.meta.extra[GRADIENT_DTYPES] = gradient_dtypes(self._ddp)
        return trace

    def prepare(self, plan: Plan) -> None:
        # first of all: whatever fails on one rank from here on, all must revert alike
        if self._original is None and (plan.bucket_caps or plan.ddp_options or plan.gradient_dtype):
            self._original = arguments(self._ddp)
        self._check_fit(plan)
        if reason := self.why_not():
            raise PlanError(f"buckets can't be changed here: {reason}")
        foreign = sorted(set(plan.settings()) - _FIELDS)
        if foreign:
            raise PlanError(f"DDP has no setting for {foreign[0]!r}")
        if plan.bucket_caps and len(plan.bucket_caps) > 1 and not HAS_CAP_LIST:
            raise PlanError("this torch has no bucket_cap_mb_list")
        if plan.gradient_dtype and plan.gradient_dtype not in gradient_dtypes(self._ddp):
            backend = dist.get_backend(self._ddp.process_group)
            raise PlanError(f"DDP can't reduce this model's gradients in {plan.gradient_dtype} over {backend}")
        for option in plan.ddp_options or {}:
            if option not in _OPTIONS or not hasattr(self._ddp, option):
                raise PlanError(f"this DDP has no option {option!r}")
        self._check_regions(plan)
        self._check_parts(plan)
        self._check_shares(plan)
        self._check_blocks(plan)

    def apply(self, plan: Plan) -> None:
        self.prepare(plan)
        self._keep_all()
        self._check_blocks(plan)
        if self._original is not None:
            given = dict(self._original)
            if plan.bucket_caps:
                given.pop("bucket_cap_mb_list", None)
                given.pop("bucket_cap_mb", None)
            self._rewrap(given | plan_arguments(plan))
            if plan.gradient_dtype:
                compress(self._ddp, plan.gradient_dtype)
                self._compressed = True
        self._set_regions(plan)
        self._set_blocks(plan)
        self._set_parts(plan.accumulate or 1)
        self._set_shares(plan.batch_shares)

    def revert(self) -> None:
        self._keep_all()
        self._set_regions(None)
        # also where apply failed: a new reducer's first step has a collective that an old one's lacks
        if self._original is not None:
            self._rewrap(self._original)
            self._original = None

    def _rewrap(self, given: dict[str, Any]) -> None:
        rewrap(self._ddp, given)
        self._compressed = False  # a hook of ours went with the reducer

    def _keep_all(self) -> None:
        """No block is recomputed any more, no batch cut, all ranks have equal shares."""
        self._set_parts(1)
        self._set_shares(None)
        self._set_blocks(None)

    def close(self) -> None:
        if self._order is not None:
            self._order.ends_early()
            self._order = None
        self.abort_capture()
        self._forget_regions()


def make_tuner(
    ddp: DistributedDataParallel,
    *,
    on_done: Callable[[Outcome], None] | None = None,
    plan: str | Path | Plan | None = None,
    sampler: SharedBatchSampler | None = None,
    **given: Any,
) -> Tuner | None:
    """A tuner for ``ddp``, or None where there is nothing to tune. Whoever calls it keeps it alive.

    Args:
        ddp: the wrapped model.
        sampler: see :func:`autotune`.
        on_done: called with the outcome on every rank.
        plan: a plan or its file: skips capture and search.
        given: fields of :class:`dpro.settings.Settings`.

    Raises:
        DproError: a bad setting or plan file, or a DDP that this can't tune.
    """
    global _count
    if dist.get_world_size() < 2:
        if not disabled():
            Session(Settings(), 0).say("one process only: there is nothing to synchronise, nothing to tune")
        return None
    if ddp in _tuned and (former := _tuned[ddp]()):
        former.close()
    _count += 1  # also where this rank takes no part: the others' next tuner has the same tag as ours
    adapter = TorchDDPAdapter(ddp, tag=str(_count))
    try:
        if disabled():
            adapter.exchange.leave()
            return None
        if dist.get_world_size(ddp.process_group) != dist.get_world_size():
            raise DproError("DDP spans only a part of the ranks")
        settings = _patient(Settings.from_env(**given), ddp)
        if sampler is not None:
            adapter.share_batches(sampler)
        adapter.may_compile = settings.regions_s > 0
        adapter.compile_s = min(adapter.compile_s, _patience_s(ddp))
        if not isinstance(plan, Plan):
            file = plan or settings.plan
            plan = Plan.load(Path(file)) if file else None
        tuner = Tuner(adapter, settings, plan=plan, on_done=on_done)
    except Exception:
        adapter.exchange.leave()  # whoever does tune need not wait for us
        raise
    _tuned[ddp] = weakref.ref(tuner)
    return tuner


def _patient(settings: Settings, ddp: DistributedDataParallel) -> Settings:
    """Never so patient that a collective of the job's runs into its own time-out meanwhile.

    A rank waits for at most 3 ``timeout_s``, 3 ``search_s`` and 2 ``regions_s`` at one meeting.
    """
    limit_s = 0.8 * _patience_s(ddp)
    clamped = {key: min(getattr(settings, key), limit_s) for key in ("timeout_s", "search_s", "regions_s")}
    return replace(settings, **clamped)


def _patience_s(ddp: DistributedDataParallel) -> float:
    """An eighth of the time-out of the job's collectives; endless where this torch does not tell."""
    try:
        device = torch.device(ddp.device_type)
        return float(ddp.process_group._get_backend(device).options._timeout.total_seconds() / 8)
    except (AttributeError, RuntimeError):
        return float("inf")


def autotune(
    ddp: DistributedDataParallel,
    *,
    optimizer: torch.optim.Optimizer,
    on_done: Callable[[Outcome], None] | None = None,
    plan: str | Path | Plan | None = None,
    sampler: SharedBatchSampler | None = None,
    **settings: Any,
) -> tuple[DistributedDataParallel, Tuner | None]:
    """Tune a plain training loop: ``model, tuner = autotune(DDP(net), optimizer=opt)``.

    The model returned is the wrapper given; training code stays as it is. The tuner moves on at
    every ``optimizer.step()``; ``tuner.close()`` at the end is optional.

    Args:
        ddp: the wrapped model.
        optimizer: its optimizer; one step of it is one iteration.
        on_done: called once with the :class:`dpro.tuner.Outcome`, on every rank.
        plan: a plan file of an earlier run: verified at once, without profiling.
        sampler: what deals out the samples of each batch, where ranks that are not equally fast may take unequal
            shares; steps go through :func:`dpro_integrations.torch_micro.step` then.
        settings: fields of :class:`dpro.settings.Settings` (``mode="suggest"``, …).
    """
    try:
        tuner = make_tuner(ddp, on_done=on_done, plan=plan, sampler=sampler, **settings)
    except Exception as error:  # whatever it is, the job goes on
        step_aside(error, job_rank())
        return ddp, None
    if tuner is not None:
        _follow(tuner, ddp, optimizer)
    return ddp, tuner


def _follow(tuner: Tuner, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Move ``tuner`` at every step of ``optimizer``, until it is done."""
    over = False

    def stepped(*_: Any) -> None:
        nonlocal over
        tuner.step()
        if tuner.outcome is not None and not over:
            over = True
            before_next_forward(ddp, handle.remove)

    # a compiled optimizer step must not be compiled into ours
    handle = optimizer.register_step_post_hook(torch.compiler.disable(stepped))
