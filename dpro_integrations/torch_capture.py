"""Capture of a few steps of a torch job: torch.profiler, gradient-ready order, host contention.

Attaches at one step boundary, detaches at another, leaves nothing behind. If the user starts a
profiler of his own meanwhile, ours gives way to it.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from dpro.clock.identity import CLOCK_ID, clock_id
from dpro.trace import kineto, wire
from dpro.trace.model import EventKind, RankTrace, Tensor
from dpro_integrations.host_load import HostLoad, StepCpu
from dpro_integrations.torch_forward import ForwardHook
from dpro_integrations.torch_memory import Meter
from dpro_integrations.torch_regions import LayerMarks
from dpro_integrations.torch_rewrap import bucket_parameters, reducer_parameters

#: A captured step that lasts longer than any before, so many times and at least so long, or a capture that
#: writes more, is given up: something else than training is going on.
LIMIT_STEPS = 20.0
LEAST_LIMIT_S = 2.0
LIMIT_BYTES = 512 << 20
#: How often, and on how many ops, it is measured what recording an event costs.
_PROBE_RUNS = 60
_PROBE_OPS = 8
#: An event of a real model costs at most so many times what the probe's does: colder caches, fresh memory.
_MOST_PROBES = 10.0
_TAKEN_OVER = "the job's own profiler took over"


class StepCapture:
    """Profile the job from construction to :meth:`finish` or :meth:`abort`.

    What the gradients are, and what else to record of them, is for subclasses.

    Args:
        usual_s: the longest step so far, seconds.
        on_gpu: the model is on one.
        cpu: of this thread, in steps without us; goes on being told of those that are captured.
        marks: notes which ops are of which submodule; None: nobody asks.
        meter: makes what tells of memory, where that is wanted.

    Raises:
        RuntimeError: a profiler is running already.
    """

    def __init__(
        self,
        usual_s: float,
        on_gpu: bool,
        cpu: StepCpu,
        marks: LayerMarks | None = None,
        meter: Callable[[], Meter] | None = None,
    ) -> None:
        if _foreign_profiler():
            raise RuntimeError("the job's own profiler is running")
        self._ready: list[int] = []
        self._handles: list[Any] = []
        self._range: record_function | None = None
        self._step = 0
        self._lost = ""
        self._limit_s = max(LEAST_LIMIT_S, LIMIT_STEPS * usual_s)
        self._deadline = 0.0
        self._cpu, self._on_gpu, self._marks = cpu, on_gpu, marks
        plain_ns = _probe_ns()
        self._restore: Callable[[], None] | None = None
        self._tap: wire.Tap | None = None
        self._meter: Meter | None = None
        self._unmetered = ""
        self._profiler: profile | None = _profile(on_gpu, memory=meter is not None)
        self._profiler.start()
        try:
            self._probe_cost_ns = max(0.0, _probe_ns() - plain_ns)
            self._restore = _yield_to_user(self._give_way)
            self._attach()
            if marks is not None:
                self._handles += marks.attach()
            if meter is not None:
                try:
                    self._meter = meter()
                except RuntimeError as error:  # the rest of the capture is as good as ever
                    self._unmetered = str(error)
            self._clock_pair = clock_pair_ns()
            self._host = HostLoad()
            if not on_gpu:  # there gradients go by NCCL, past every socket call
                self._tap = wire.Tap()
            self._open_step()
            cpu.capture(True)
        except BaseException:
            self.abort()
            raise

    def mark_step(self) -> None:
        """Close the range of the step that ended and open the next."""
        if self._lost:
            raise RuntimeError(self._lost)
        self._close_step()
        self._open_step()

    def finish(self) -> RankTrace:
        """Detach and read back what was recorded.

        Raises:
            RuntimeError: the user's own profiler took over, or there is far too much.
        """
        if self._lost:
            raise RuntimeError(self._lost)
        contention = self._host.since()
        profiler, steps = self._profiler, self._step - 1
        self._detach()
        assert profiler is not None and profiler.profiler is not None
        if not profiler.profiler.kineto_results.events():  # to write an empty one crashes
            raise RuntimeError(_TAKEN_OVER)
        first, last = self._clock_pair, clock_pair_ns()
        with tempfile.TemporaryDirectory(prefix="dpro-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            if path.stat().st_size > LIMIT_BYTES:
                raise RuntimeError(f"the capture is too large ({path.stat().st_size >> 20} MiB)")
            allocations: list[kineto.Allocation] | None = None if self._meter is None else []
            trace = kineto.read(path, allocations)
        if self._meter is not None and allocations is not None:
            self._meter.add_to(trace, allocations, steps)
        if self._unmetered:
            trace.warnings.append(self._unmetered)
        trace.shift(-((first + last) // 2))
        trace.meta.clock = "monotonic"
        overhead_ns = self._overhead_ns(trace, steps) * _stretch(contention)
        # the range that was open when we stopped belongs to no step
        trace.step_bounds = trace.step_bounds[:steps]
        trace.columns["step"] = np.where(trace.step < steps, trace.step, -1).astype(np.int32)
        if self._marks is not None:
            self._marks.mark(trace)
        trace.meta.host = socket.gethostname()
        trace.meta.extra[CLOCK_ID] = clock_id()
        trace.meta.event_overhead_ns = overhead_ns
        trace.meta.contention = contention
        trace.tensors = self._tensors()
        trace = self._complete(trace)
        return self._tap.add_to(trace) if self._tap is not None else trace

    def abort(self) -> None:
        """Detach, keep nothing. Never raises."""
        with contextlib.suppress(Exception):
            self._detach()

    # -- for subclasses ------------------------------------------------------------------------

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters whose gradients are synchronised, with their names."""
        raise NotImplementedError

    def _attach(self) -> None:
        """Hook what tells a gradient's readiness into ``_ready`` and :meth:`_mind_the_time` before a forward.

        Whatever has to be undone goes into ``_handles``. The profiler is running already.
        """
        raise NotImplementedError

    def _complete(self, trace: RankTrace) -> RankTrace:
        """Whose trace it is, and what else was recorded; everything is detached."""
        raise NotImplementedError

    # -- parts ---------------------------------------------------------------------------------

    def _mind_the_time(self) -> None:
        if torch.compiler.is_compiling():  # known to the compiler: nothing of this gets into the job's graph
            return
        # not in backward: autograd would put back its copy of the profiler that we stopped there
        if time.monotonic() > self._deadline and not self._lost:
            self._give_up(f"a captured step did not end within {self._limit_s:.3g} s")

    def _open_step(self) -> None:
        if self._meter is not None:
            self._meter.begin()
        self._ready.clear()
        self._deadline = time.monotonic() + self._limit_s
        self._range = record_function(f"ProfilerStep#{self._step}")
        self._range.__enter__()
        self._step += 1

    def _close_step(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
            self._last_ready = list(self._ready)

    def _overhead_ns(self, trace: RankTrace, steps: int) -> float:
        """CPU time of recording one event, ns: by how much this thread's CPU time grew in the captured steps.

        The probe fits into the cache: it tells the least an event can cost, and with it what growth is the machine's.
        """
        events = trace.kind == EventKind.CPU_OP
        probe = events & (trace.start < trace.step_bounds[:1, 0])  # before the first step
        least_ns = self._probe_cost_ns * _PROBE_RUNS / max(1, int(probe.sum()))
        if self._on_gpu:
            return least_ns
        inside = int((events & (trace.step >= 0) & (trace.step < steps)).sum())
        return self._cpu.per_event_ns(max(1, inside) / steps, least_ns, _MOST_PROBES * least_ns)

    def _give_way(self) -> None:
        self._give_up(_TAKEN_OVER)

    def _give_up(self, reason: str) -> None:
        self._lost = self._lost or reason
        self.abort()

    def _detach(self) -> None:
        """Everything off, whatever fails on the way."""
        self._cpu.capture(False)
        with contextlib.ExitStack() as undo:  # runs all of it, last in first out, and raises at the end
            if self._tap is not None:
                undo.callback(self._tap.stop)
            if self._meter is not None:
                undo.callback(self._meter.detach)
            profiler, self._profiler = self._profiler, None
            if profiler is not None:
                undo.callback(profiler.stop)
            span, self._range = self._range, None
            if span is not None:
                undo.callback(span.__exit__, None, None, None)
            restore, self._restore = self._restore, None
            if restore is not None:
                undo.callback(restore)
            for handle in self._handles:
                undo.callback(handle.remove)
            self._handles = []

    def _tensors(self) -> list[Tensor]:
        """The gradients, with their ready order."""
        # a parameter may become ready several times in a step (micro-batches): the last time counts
        last_place = {number: place for place, number in enumerate(self._last_ready)}
        order = {number: k for k, number in enumerate(sorted(last_place, key=last_place.__getitem__))}
        return [
            Tensor(
                name=name,
                shape=tuple(p.shape),
                dtype=str(p.dtype).removeprefix("torch."),
                nbytes=p.numel() * p.element_size(),
                ready=order.get(number, -1),
            )
            for number, (name, p) in enumerate(self._parameters())
        ]


class Capture(StepCapture):
    """:class:`StepCapture` of a DDP job.

    Args:
        ddp: the wrapper.
        usual_s: the longest step so far, seconds.
        cpu: of the training thread, per step.
        marks, meter: see :class:`StepCapture`.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        usual_s: float,
        cpu: StepCpu,
        marks: LayerMarks | None = None,
        meter: Callable[[], Meter] | None = None,
    ) -> None:
        self._ddp = ddp
        super().__init__(usual_s, ddp.device_type == "cuda", cpu, marks, meter)

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return reducer_parameters(self._ddp)

    def _attach(self) -> None:
        self._handles.append(self._ddp.register_forward_pre_hook(ForwardHook(self._mind_the_time)))
        for number, (_, parameter) in enumerate(self._parameters()):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._watch(number)))

    def _watch(self, number: int) -> Callable[[torch.Tensor], None]:
        ready = self._ready

        def accumulated(_: torch.Tensor) -> None:
            ready.append(number)

        return accumulated

    def _complete(self, trace: RankTrace) -> RankTrace:
        meta = trace.meta
        meta.rank, meta.world_size = dist.get_rank(), dist.get_world_size()
        meta.framework, meta.source = f"torch {torch.__version__}", "torch_ddp"
        if not hasattr(self._ddp, "bucket_bytes_cap_default"):
            meta.extra["graph_info"] = {"ddp_first_bucket_bytes": dist._DEFAULT_FIRST_BUCKET_BYTES}
        for bucket, numbers in enumerate(bucket_parameters(self._ddp)):
            for number in numbers:
                trace.tensors[number].bucket = bucket
        return trace


def _profile(on_gpu: bool, memory: bool) -> profile:
    if on_gpu and torch.cuda.is_initialized():
        return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=memory)
    try:  # correlation is for kernels, and on the CPU a third of what an event costs
        lean = _ExperimentalConfig(disable_external_correlation=True)
    except TypeError:  # a torch that has no such switch
        lean = None
    return profile(activities=[ProfilerActivity.CPU], profile_memory=memory, experimental_config=lean)


def _probe_ns() -> float:
    """Time of one forward and backward pass of a few smallest ops; more with the profiler, for its events.

    Recording an op of a backward pass costs more than a plain one, so both are in it. The median over
    many runs: one that lost its core is long, and the shortest were lucky with the cache.
    """
    times = []
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(16, requires_grad=True)
        for _ in range(_PROBE_RUNS):
            start = time.perf_counter_ns()
            result = weight
            for _ in range(_PROBE_OPS):
                result = result * 1.0 + 1.0
            torch.autograd.grad(result.sum(), weight)
            times.append(time.perf_counter_ns() - start)
    return statistics.median(times)


def _stretch(contention: dict[str, float]) -> float:
    """Wall time of the training thread per CPU time that it wanted: more than 1 where others have its core as well."""
    running_ns = contention.get("main_cpu_ns", 0.0)
    return 1.0 + contention["main_delay_ns"] / running_ns if running_ns else 1.0


def clock_pair_ns() -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC, ns; the tightest of a few readings."""
    pairs = []
    for _ in range(5):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        pairs.append((after - before, real - (before + after) // 2))
    return min(pairs)[1]


def _yield_to_user(give_way: Callable[[], None]) -> Callable[[], None]:
    """If anybody prepares or starts a profiler while ours runs, stop ours first. Returns the undo.

    All of torch's profilers come through two functions, which two modules know by name.
    """
    undone: list[Callable[[], None]] = []
    for module in (torch.autograd, torch.autograd.profiler):
        for name in ("_prepare_profiler", "_enable_profiler"):
            undone.append(_wrap(module, name, give_way))

    def undo() -> None:
        for one in undone:
            one()

    return undo


def _wrap(module: ModuleType, name: str, first: Callable[[], None]) -> Callable[[], None]:
    original = getattr(module, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    def undo() -> None:
        # somebody may have patched on top of us: his patch then still works, and calls ours
        if getattr(module, name) is wrapper:
            setattr(module, name, original)

    setattr(module, name, wrapper)
    return undo


def _foreign_profiler() -> bool:
    """Whether the job has a profiler that runs or is prepared to (a schedule in its warm-up phase)."""
    if torch.autograd._profiler_enabled():
        return True
    # one that is only prepared is known to nobody but itself
    # (isinstance() would ask an object for its class, which proxies and lazy modules answer with side effects)
    alive = (o.profiler for o in gc.get_objects() if issubclass(type(o), torch.profiler._KinetoProfile))
    return any(getattr(p, "entered", False) and getattr(p, "kineto_results", None) is None for p in alive)
