"""Capture of a few steps of a Horovod job: what any torch job's capture has, and what Horovod did.

Per gradient: when it was handed in (``allreduce_async_``) and when the training thread waited for it
(``synchronize``). On the coordinator, where the job was started with ``HOROVOD_TIMELINE=DYNAMIC``, Horovod's
timeline of the captured steps: which gradients went together, and when. Nothing here is a collective, and
nothing stays: wrappers are taken off, the timeline is stopped.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd
import horovod.torch.optimizer as hvd_optimizer
import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from dpro.errors import TraceError
from dpro.trace import horovod as timelines
from dpro.trace.model import EventKind, RankTrace, Tensor, TraceBuilder
from dpro_integrations.host_load import IdleLoad, StepCpu
from dpro_integrations.torch_capture import StepCapture, clock_pair_ns
from dpro_integrations.torch_memory import Meter
from dpro_integrations.torch_regions import LayerMarks

#: Defaults of HOROVOD_CYCLE_TIME, ms, and HOROVOD_FUSION_THRESHOLD, bytes (``common/operations.cc``).
_CYCLE_MS, _FUSION_BYTES = 1.0, 128 << 20


class Capture(StepCapture):
    """:class:`~dpro_integrations.torch_capture.StepCapture` of a job with ``hvd.DistributedOptimizer``.

    Args:
        optimizer: the distributed optimizer.
        usual_s: the longest step so far, seconds.
        cpu: of the training thread, per step, ``synchronize`` left out: there it spins.
        marks, meter: see :class:`~dpro_integrations.torch_capture.StepCapture`.
    """

    def __init__(
        self,
        optimizer: Any,
        usual_s: float,
        cpu: StepCpu,
        marks: LayerMarks | None = None,
        meter: Callable[[], Meter] | None = None,
    ) -> None:
        self._optimizer = optimizer
        # by name: an index into them means the same on every rank
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._named = sorted((str(optimizer._parameter_names[p]), p) for p in params)
        self._number = {p: i for i, (_, p) in enumerate(self._named)}
        self._of_handle: dict[Any, Sequence[int]] = {}
        #: (name, gradient, start, end), CLOCK_MONOTONIC ns
        self._spans: list[tuple[str, int, int, int]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._idle = IdleLoad()
        super().__init__(usual_s, bool(params) and params[0].is_cuda, cpu, marks, meter)

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self._named

    def _attach(self) -> None:
        optimizer = self._optimizer
        self._handles.append(register_module_forward_pre_hook(lambda *_: self._mind_the_time()))
        self._wrap(optimizer, "_allreduce_grad_async", self._submitting)
        if hasattr(optimizer, "_grouped_allreduce_grad_async"):
            self._wrap(optimizer, "_grouped_allreduce_grad_async", self._submitting)
        self._wrap(hvd_optimizer, "synchronize", self._waiting)
        if hvd.rank() == 0 and os.environ.get("HOROVOD_TIMELINE") == "DYNAMIC":
            self._folder = tempfile.TemporaryDirectory(prefix="dpro-")
            with contextlib.suppress(ValueError):  # the variable was set after hvd.init()
                hvd.start_timeline(self._timeline_file(self._folder))
                self._handles.append(_Undo(hvd.stop_timeline))

    def _open_step(self) -> None:
        super()._open_step()
        self._idle.begin()

    def _complete(self, trace: RankTrace) -> RankTrace:
        meta = trace.meta
        if "HOROVOD_TIMELINE" not in os.environ:  # its writer spins all the time, which is no round
            meta.contention["idle_share"] = self._idle.share()
        meta.rank, meta.world_size = hvd.rank(), hvd.size()
        meta.framework = f"horovod {horovod.__version__}, torch {torch.__version__}"
        meta.source = "horovod_torch"
        meta.extra["graph_info"] = _settings()
        main = trace.resources[_main_resource(trace)]
        more = TraceBuilder(meta)
        for name, number, start, end in self._spans:
            more.add(name, EventKind.ANNOTATION, main, start, end, tensor=number)
        trace = trace.joined(more.freeze([]))
        folder, self._folder = self._folder, None
        if folder is not None:
            with folder:
                trace = self._with_timeline(trace, Path(self._timeline_file(folder)))
        return trace

    def abort(self) -> None:
        super().abort()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.cleanup()

    def _tensors(self) -> list[Tensor]:
        """As they are synchronised: after compression."""
        found = super()._tensors()
        for tensor, (_, parameter) in zip(found, self._named, strict=True):
            sent, _ = self._optimizer._compression.compress(torch.empty(0, dtype=parameter.dtype))
            tensor.dtype = str(sent.dtype).removeprefix("torch.")
            tensor.nbytes = parameter.numel() * sent.element_size()
        return found

    # -- wrappers --------------------------------------------------------------------------------

    def _wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``make(original)`` in the place of ``owner.name``, and its undoing into ``_handles``."""
        own = name in vars(owner)
        original = getattr(owner, name)
        wrapper = make(original)

        def undo() -> None:
            # somebody may have patched on top of us: his patch then still works, and calls ours
            if vars(owner).get(name) is not wrapper:
                return
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        setattr(owner, name, wrapper)
        self._handles.append(_Undo(undo))

    def _submitting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For the optimizer's two ways to hand in: one parameter, or a group of them."""

        def submit(given: Any, *args: Any) -> Any:
            self._idle.end()
            start = time.monotonic_ns()
            handle, context = original(given, *args)
            end = time.monotonic_ns()
            numbers = [self._number[p] for p in (given if isinstance(given, tuple) else (given,)) if p in self._number]
            self._of_handle[handle] = numbers
            self._ready += numbers
            self._spans += [(timelines.SUBMIT, number, start, end) for number in numbers]
            return handle, context

        return submit

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def synchronize(handle: Any) -> Any:
            start = time.monotonic_ns()
            try:
                return original(handle)
            finally:
                end = time.monotonic_ns()
                waited = self._of_handle.pop(handle, ())
                self._spans += [(timelines.WAIT, number, start, end) for number in waited]

        return synchronize

    # -- the timeline ----------------------------------------------------------------------------

    @staticmethod
    def _timeline_file(folder: tempfile.TemporaryDirectory[str]) -> str:
        return str(Path(folder.name) / "timeline.json")

    def _with_timeline(self, trace: RankTrace, file: Path) -> RankTrace:
        """``trace`` with the responses of the timeline, on its clock."""
        try:
            timeline = timelines.read(file)
        except TraceError as error:
            trace.warnings.append(f"Horovod's timeline: {error.reason}")
            return trace
        trace.warnings += [f"Horovod's timeline: {line}" for line in timeline.warnings]
        return timelines.with_timeline(trace, timeline, timeline.epoch_ns - clock_pair_ns(), self._groups())

    def _groups(self) -> dict[str, list[int]]:
        """Numbers of a group's gradients by the name of the first, which Horovod gives to all of them."""
        groups: Sequence[Sequence[torch.nn.Parameter]] = list(getattr(self._optimizer, "_group_counts", {}))
        return {self._named[self._number[group[0]]][0]: [self._number[p] for p in group] for group in groups if group}


class _Undo:
    """A call in the shape of a hook's handle."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.remove = action


def _settings() -> dict[str, int]:
    """What Horovod read from the environment: ``cycle_ns``, and ``fusion_bytes``, 0 if groups go alone.

    With HOROVOD_DISABLE_GROUP_FUSION a gradient in no group is one of its own, too (``EnqueueTensorAllreduces``).
    """
    alone = os.environ.get("HOROVOD_DISABLE_GROUP_FUSION", "0").lower() not in ("", "0", "false")
    fusion_bytes = 0 if alone else int(_number("HOROVOD_FUSION_THRESHOLD", _FUSION_BYTES))
    return {"cycle_ns": round(_number("HOROVOD_CYCLE_TIME", _CYCLE_MS) * 1e6), "fusion_bytes": fusion_bytes}


def _number(name: str, otherwise: float) -> float:
    try:
        return float(os.environ.get(name, otherwise))
    except ValueError:
        return otherwise


def _main_resource(trace: RankTrace) -> int:
    """The thread that carries the step marks."""
    marks = [i for i, name in enumerate(trace.names) if name.startswith("ProfilerStep")]
    return int(trace.resource[np.isin(trace.name, marks)][0])
