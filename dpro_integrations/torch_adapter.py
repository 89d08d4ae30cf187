"""What the adapters of torch jobs share, however a job synchronises: a capture's way, and plan against job."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from dpro.adapter import Exchange, Knob
from dpro.errors import DproError, PlanError
from dpro.plan import Plan
from dpro.session import Session
from dpro.settings import Settings
from dpro.trace.memory import MICRO
from dpro.trace.model import RankTrace
from dpro.trace.regions import Region
from dpro.trace.shares import SHARES, told
from dpro_integrations import torch_micro
from dpro_integrations.torch_compile import LIMIT_S, CompiledRegions, why_no_compiler
from dpro_integrations.torch_memory import Meter
from dpro_integrations.torch_recompute import check_blocks, recompute
from dpro_integrations.torch_regions import LayerMarks, time_regions
from dpro_integrations.torch_shares import SharedBatchSampler

if TYPE_CHECKING:
    from dpro_integrations.torch_capture import StepCapture

_NO_MODEL = "there is no one module with the parameters that are synchronised"


class TorchAdapter:
    """Base of :class:`dpro.adapter.Adapter` implementations; a subclass starts ``_capture``."""

    exchange: Exchange
    _capture: StepCapture | None = None
    #: whether capabilities include compiling, and captures note whose ops are whose
    may_compile = False
    #: what compiling a plan's submodules may take, s: the others wait in a collective
    compile_s = LIMIT_S
    _marks: LayerMarks | None = None
    _regions: CompiledRegions | None = None
    #: captures tell what takes memory
    _memory = _timed = False
    #: what deals out the samples of a batch that ranks share
    _sampler: SharedBatchSampler | None = None
    _undo_blocks: Callable[[], None] | None = None

    def fingerprint(self) -> dict[str, str]:
        raise NotImplementedError

    def _parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Name and parameter of every gradient that is synchronised."""
        raise NotImplementedError

    def _module(self) -> torch.nn.Module | None:
        """The model, whose submodules can be compiled or recomputed; None: it is not known."""
        raise NotImplementedError

    def _called(self) -> torch.nn.Module | None:
        """What the job calls, and hands to ``torch_micro``; None: it is not known."""
        return self._module()

    def capabilities(self) -> set[Knob]:
        """See :class:`dpro.adapter.Adapter`."""
        raise NotImplementedError

    def mark_step(self) -> None:
        if self._capture is not None:
            self._capture.mark_step()

    def stop_capture(self) -> RankTrace:
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("no capture is running")
        trace = capture.finish()
        self._time_parts(trace)
        return trace

    def abort_capture(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.abort()
        self._watch_parts(False)

    def checksum(self) -> str:
        """Over up to 64 values of every parameter: cheap, and any lost update moves it."""
        digest = hashlib.sha256()
        for _, parameter in self._parameters():
            flat = parameter.detach().flatten()
            picked = flat[:: max(1, flat.numel() // 64)][:64]
            digest.update(picked.float().cpu().numpy().tobytes())
        return digest.hexdigest()

    # -- submodules that are compiled ----------------------------------------------------------

    def time_regions(self, trace: RankTrace, budget_s: float) -> list[Region]:
        """See :class:`dpro.adapter.RegionTimer`."""
        marks, self._marks = self._marks, None
        names = {id(p): name for name, p in self._parameters()}
        return [] if marks is None else time_regions(marks, names, trace, budget_s)

    def _can_compile(self) -> bool:
        """Whether it is allowed, and there is a compiler and something to compile."""
        return self.may_compile and not why_no_compiler() and self._module() is not None

    def _new_marks(self) -> LayerMarks | None:
        """For a capture that begins."""
        module = self._module() if self.may_compile and Knob.COMPILE_REGIONS in self.capabilities() else None
        self._marks = None if module is None else LayerMarks(module)
        return self._marks

    def _check_regions(self, plan: Plan) -> None:
        """Refuse submodules that can't be compiled.

        Raises:
            PlanError: see :meth:`~dpro_integrations.torch_compile.CompiledRegions.check`.
        """
        if not plan.compile_regions:
            return
        module = self._planned_module()
        if self._regions is None:
            session = Session(Settings(), self.exchange.rank)
            say = partial(session.say, everywhere=True)
            self._regions = CompiledRegions(module, say, self.compile_s)
        self._regions.check(plan.compile_regions)

    def _set_regions(self, plan: Plan | None) -> None:
        """Have the plan's submodules compiled, which were checked, and no others."""
        if self._regions is not None:
            self._regions.set((plan.compile_regions if plan is not None else None) or ())

    def _forget_regions(self) -> None:
        self._marks = None
        if self._regions is not None:
            self._regions.forget()

    # -- memory --------------------------------------------------------------------------------

    def meter_memory(self) -> None:
        """See :class:`dpro.adapter.MemoryMeter`."""
        self._memory = True

    def _unseen_bytes(self) -> int:
        """What is allocated for tensors that Python does not know."""
        return 0

    def _new_meter(self) -> Callable[[], Meter] | None:
        """For a capture that begins: what makes its meter, which fails where the model is not known."""
        return self._make_meter if self._memory else None

    def _make_meter(self) -> Meter:
        module = self._module()
        if module is None:
            raise RuntimeError(_NO_MODEL)
        return Meter(module, any(p.is_cuda for _, p in self._parameters()), self._unseen_bytes)

    def _check_blocks(self, plan: Plan) -> None:
        """Refuse blocks that can't be recomputed; not while there are some, which look otherwise then.

        Raises:
            PlanError: see :func:`~dpro_integrations.torch_recompute.check_blocks`, or the model is not known.
        """
        if plan.recompute and self._undo_blocks is None:
            check_blocks(self._planned_module(), plan.recompute)

    def _set_blocks(self, plan: Plan | None) -> None:
        """Have the plan's blocks recomputed, and no others.

        Raises:
            PlanError: as :meth:`_check_blocks`; none is recomputed then.
        """
        undo, self._undo_blocks = self._undo_blocks, None
        if undo is not None:
            undo()
        if plan is not None and plan.recompute:
            self._undo_blocks = recompute(self._planned_module(), plan.recompute)

    def _can_cut(self) -> bool:
        """Whether the job's batches can be cut: its steps go through ``torch_micro``."""
        called = self._called()
        return called is not None and torch_micro.can_cut(called)

    def _batch_knobs(self) -> set[Knob]:
        """What can be done with the job's batches."""
        if not self._can_cut():
            return set()
        return {Knob.ACCUMULATE} | ({Knob.BATCH_SHARES} if self._sampler is not None else set())

    def _check_parts(self, plan: Plan) -> None:
        """Refuse to cut batches that can't be.

        Raises:
            PlanError: see :meth:`_can_cut`.
        """
        if plan.accumulate is not None and not self._can_cut():
            raise PlanError("the job's batches can't be cut: its steps do not go through dpro_integrations.torch_micro")

    def _set_parts(self, parts: int) -> None:
        """Have batches cut into as many; 1: not at all."""
        called = self._called()
        if called is not None:
            torch_micro.set_parts(called, parts)

    def _watch_parts(self, watched: bool) -> None:
        """In a capture: what a step is made of is kept, until what its parts take was timed once."""
        called = self._called() if self._memory or self._sampler is not None else None
        if called is not None:
            torch_micro.watch(called, watched and not self._timed)

    def _time_parts(self, trace: RankTrace) -> None:
        try:
            wanted = self._memory or self._sampler is not None
            called = self._called() if wanted and not self._timed else None
            if called is not None:
                self._timed = True
                parts_ns = torch_micro.times(called)
                trace.meta.extra[MICRO] = {str(parts): ns for parts, ns in parts_ns.items()}
                if self._sampler is not None and parts_ns:
                    share = self._sampler.shares[self.exchange.rank]
                    trace.meta.extra[SHARES] = told(share, self._sampler.batch_size, parts_ns)
        except Exception as error:  # the job's own function on parts of its batch; there are other ways
            trace.warnings.append(f"no micro-batches, no shares of a batch: {error}")
        finally:
            self._watch_parts(False)

    # -- a batch that ranks share --------------------------------------------------------------

    def share_batches(self, sampler: SharedBatchSampler) -> None:
        """Let plans say how many samples each rank takes of what ``sampler`` deals out.

        Raises:
            DproError: it deals to other ranks than these, or the model is not known.
        """
        called = self._called()
        if called is None:
            raise DproError(_NO_MODEL)
        if (sampler.rank, sampler.world_size) != (self.exchange.rank, self.exchange.world_size):
            raise DproError(f"the sampler deals to {sampler.world_size} ranks, the job has {self.exchange.world_size}")
        self._sampler = sampler
        torch_micro.cutting(called).even = sampler.batch_size / sampler.world_size

    def _check_shares(self, plan: Plan) -> None:
        """Refuse shares that can't be dealt out.

        Raises:
            PlanError: there is no sampler, or they are not of its batch.
        """
        if plan.batch_shares is None:
            return
        if self._sampler is None or not self._can_cut():
            raise PlanError("no batch that ranks share: there is no SharedBatchSampler, or steps are not torch_micro's")
        self._sampler.check(plan.batch_shares)

    def _set_shares(self, shares: list[int] | None) -> None:
        """From the next batch on; None: equal ones."""
        if self._sampler is not None:
            self._sampler.deal(shares)

    def _planned_module(self) -> torch.nn.Module:
        """The model, of which a plan has parts.

        Raises:
            PlanError: it is not known.
        """
        module = self._module()
        if module is None:
            raise PlanError(_NO_MODEL)
        return module

    def _model(self) -> str:
        """The model's part of a fingerprint: a hash of names, shapes and dtypes."""
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in self._parameters()]
        return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]

    def _check_fit(self, plan: Plan) -> None:
        """Refuse a plan of another job.

        Raises:
            PlanError: model, world or framework differ.
        """
        fitting = self.fingerprint()
        for key, value in plan.fingerprint.items():
            if fitting.get(key) != value:
                raise PlanError(f"the plan is for another job: {key} is {fitting.get(key)}, the plan's {value}")
