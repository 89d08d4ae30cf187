"""Capture of a few steps of a Gluon job: MXNet's profiler, hand-ins and updates, the wire, host contention.

Attaches at one step boundary, detaches at another, leaves nothing behind. The job runs as it does without: the steps
are told apart by marks in the engine's own order, nobody waits for them; only after the last one the engine is waited
for, so that all of it is recorded. What the rows are made of is in ``mxnet_rows``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock

from dpro.clock.identity import CLOCK_ID, clock_id
from dpro.trace import mxnet as profiles
from dpro.trace import wire
from dpro.trace.model import EventKind, RankTrace, Tensor
from dpro_integrations import mxnet_engine, mxnet_profiler
from dpro_integrations.clocks import epoch_ns
from dpro_integrations.host_load import HostLoad, StepCpu
from dpro_integrations.mxnet_rows import HANDED_MARK, REDUCED_MARK, STEP_MARK, Log, rows
from dpro_integrations.mxnet_steps import reduced, weights

#: A captured step that lasts longer than any before, so many times and at least so long, or a capture that
#: writes more, is given up: something else than training is going on.
LIMIT_STEPS = 20.0
LEAST_LIMIT_S = 2.0
LIMIT_BYTES = 512 << 20
_TAKEN_OVER = "the job's own profiler took over"
#: How often, and on how many ops, it is measured what recording an op costs.
_PROBE_RUNS, _PROBE_OPS, _PROBE = 24, 64, "dpro_probe"
#: An op of a real model costs at most so many times what the probe's does: colder caches, fresh memory.
_MOST_PROBES = 4.0


class StepCapture:
    """Record the job from construction to :meth:`finish` or :meth:`abort`.

    How gradients are handed in, and whose trace it is, is for subclasses.

    Args:
        trainer: the ``gluon.Trainer``; its parameters are initialised.
        usual_s: the longest step so far, seconds.
        cpu: of the process, in steps without us, where it says what a step costs (nothing in it spins); goes on being
            told of those that are captured.

    Raises:
        RuntimeError: the job uses the profiler, or an operation of its own failed.
    """

    #: The library's ops in the engine, which end when the communication does.
    operators: tuple[str, ...] = ()

    def __init__(self, trainer: Any, usual_s: float, cpu: StepCpu | None = None) -> None:
        self._trainer, self._cpu = trainer, cpu or StepCpu()
        named = reduced(trainer)
        self._parameters = [parameter for _, parameter in named]
        #: place in ``trainer._params`` -> number of the gradient
        self._number = {place: number for number, (place, _) in enumerate(named)}
        self._of_array = {id(p.list_grad()[0]): number for number, (_, p) in enumerate(named)}
        self._log = Log(updates=[[]])
        self._sent: dict[int, Any] = {}
        self._undo = contextlib.ExitStack()
        self._lost = ""
        self._process = os.getpid()
        self._limit_s = max(LEAST_LIMIT_S, LIMIT_STEPS * usual_s)
        self._deadline = 0.0
        self._tap: wire.Tap | None = None
        self._token = mxnet_engine.array()
        self._marked: list[Any] = []  # one array for each mark behind a hand-in: written when it has run
        # what the engine still has to do is not ours, and would disturb the probe
        mxnet_engine.mark("dpro/settle", weights(trainer), [self._token])
        mxnet_engine.wait(self._token)
        plain_ns = _probe_ns()
        try:
            folder = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="dpro-"))
            self._file = Path(folder) / "profile.json"
            mxnet_profiler.borrow(str(self._file), self._give_way)
            self._undo.callback(mxnet_profiler.give_back)
            self._least_ns = max(0.0, _probe_ns() - plain_ns)
            self._blocks = _hybrid_blocks(trainer)
            for block in self._blocks:
                self._undo.callback(_without_bulks(block))
            self._wrap(type(trainer._updaters[0].optimizer), "update_multi_precision", self._updating)
            self._wrap(Block, "__call__", self._minding)
            self._attach()
            self._host = _EngineLoad()
            self._tap = wire.Tap()
            self._undo.callback(self._tap.stop)
            self._clock_pair = epoch_ns()
            self._log.begin = time.monotonic_ns()
            self._deadline = time.monotonic() + self._limit_s
            self._cpu.capture(True)
        except BaseException:
            self.abort()
            raise

    def mark_step(self) -> None:
        """A step was handed in; the next one begins where its updates end."""
        if self._lost:
            raise RuntimeError(self._lost)
        self._log.updates.append([])
        self._deadline = time.monotonic() + self._limit_s
        mxnet_engine.mark(STEP_MARK, weights(self._trainer), [self._token])

    def finish(self) -> RankTrace:
        """Wait for the last step, detach, and read back what was recorded.

        Raises:
            RuntimeError: the job's own profiler took over, there is far too much, or an operation of the job's failed.
        """
        if self._lost:
            raise RuntimeError(self._lost)
        self._cpu.capture(False)
        mxnet_engine.mark("dpro/end", [*weights(self._trainer), *self._marked], [self._token])
        mxnet_engine.wait(self._token)
        contention = self._host.since()
        mxnet_profiler.give_back()
        last_pair = epoch_ns()
        assert self._tap is not None
        self._tap.stop()
        with self._undo.pop_all():
            size = self._file.stat().st_size
            if size > LIMIT_BYTES:
                raise RuntimeError(f"the capture is too large ({size >> 20} MiB)")
            raw = profiles.read(self._file)
        raw.shift(-((self._clock_pair + last_pair) // 2))
        raw.meta.clock, raw.meta.host = "monotonic", socket.gethostname()
        raw.meta.contention = contention
        raw.meta.extra[CLOCK_ID] = clock_id()
        self._describe(raw)
        names = [parameter.name for parameter in self._parameters]
        trace, ready = rows(raw, self._log, names, self.operators, self._symbol())
        trace.tensors = self._tensors(ready)
        trace.meta.event_overhead_ns = self._overhead_ns(raw, trace)
        return self._tap.add_to(trace)

    def abort(self) -> None:
        """Detach, keep nothing. Never raises."""
        with contextlib.suppress(Exception):
            self._cpu.capture(False)
            self._undo.close()

    # -- for subclasses ------------------------------------------------------------------------

    def _attach(self) -> None:
        """Wrap what hands in gradients, so that it comes by :meth:`_hand_in`."""
        raise NotImplementedError

    def _describe(self, trace: RankTrace) -> None:
        """Whose trace it is, in ``trace.meta``."""
        raise NotImplementedError

    def _hand_in(self, arrays: list[Any], numbers: tuple[int, ...], call: Callable[[], Any]) -> Any:
        """``call``, which hands ``arrays``, of the gradients ``numbers`` (() of none), to the library in one op."""
        self._mind_the_time()
        number = len(self._log.handed)
        self._log.handed.append(numbers)
        self._sent.update(zip(numbers, arrays, strict=False))
        self._mark(f"{HANDED_MARK}{number}", arrays)
        result = call()
        self._marked.append(mxnet_engine.array())
        self._mark(
            f"{REDUCED_MARK}{number}", result if isinstance(result, (list, tuple)) else [result], self._marked[-1:]
        )
        return result

    def _mark(self, name: str, arrays: Sequence[Any], writes: Sequence[Any] = ()) -> None:
        try:
            mxnet_engine.mark(name, arrays, writes)
        except Exception as error:  # we are in the midst of the job's step
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])

    def _wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``make(original)`` in the place of ``owner.name`` until the capture ends."""
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
        self._undo.callback(undo)

    # -- parts ---------------------------------------------------------------------------------

    def _updating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_multi_precision(optimizer: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
            if optimizer is self._trainer._updaters[0].optimizer:
                places = index if isinstance(index, (tuple, list)) else (index,)
                self._log.updates[-1].append(tuple(self._number[i] for i in places if i in self._number))
            return original(optimizer, index, *args, **kwargs)

        return update_multi_precision

    def _minding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(block: Any, *args: Any) -> Any:
            self._mind_the_time()
            return original(block, *args)

        return __call__

    def _mind_the_time(self) -> None:
        # a data loader's worker that was forked meanwhile has our wrappers, and the capture is not its
        if time.monotonic() > self._deadline and not self._lost and os.getpid() == self._process:
            self._give_up(f"a captured step did not end within {self._limit_s:.3g} s")

    def _give_way(self) -> None:
        self._give_up(_TAKEN_OVER)

    def _give_up(self, reason: str) -> None:
        self._lost = self._lost or reason
        self.abort()

    def _overhead_ns(self, raw: RankTrace, trace: RankTrace) -> float:
        """CPU time per op of ``trace`` that it took to record all that is in ``raw``, marks and bookkeeping too, ns.

        Told by how much the process' CPU time grew. The probe fits into the cache: it tells the least that an event can
        cost, and with it what growth is the machine's.
        """
        begin, end = int(trace.step_bounds[0, 0]), int(trace.step_bounds[-1, 1])
        recorded = int(((raw.start >= begin) & (raw.start < end)).sum())
        ops = max(1, int(((trace.kind == EventKind.CPU_OP) & (trace.step >= 0)).sum()))
        least_ns = self._least_ns * recorded / ops
        return self._cpu.per_event_ns(ops / trace.steps, least_ns, _MOST_PROBES * least_ns)

    def _symbol(self) -> str:
        """JSON of the graph that holds most of the parameters, as MXNet runs it."""
        graphs = [block._cached_graph for block in self._blocks if block._cached_graph]
        return str(graphs[0][1].tojson(remove_amp_cast=False)) if graphs else ""

    def _tensors(self, ready: list[int]) -> list[Tensor]:
        """The gradients as they were handed in, after compression."""
        order = {number: k for k, number in enumerate(ready)}
        found = []
        for number, parameter in enumerate(self._parameters):
            array = self._sent.get(number, parameter.list_grad()[0])
            kind = np.dtype(array.dtype)
            nbytes = int(np.prod(array.shape, dtype=np.int64)) * kind.itemsize
            found.append(Tensor(parameter.name, tuple(array.shape), kind.name, nbytes, order.get(number, -1)))
        return found


class _EngineLoad(HostLoad):
    """:class:`HostLoad` in which the engine's worker is the thread that trains, not the one that hands it work."""

    def __init__(self) -> None:
        super().__init__()
        mxnet_engine.call_on_worker(self._here)

    def _here(self) -> None:
        self._main = threading.get_native_id()


def _hybrid_blocks(trainer: Any) -> list[Any]:
    """Blocks that run a graph of their own over parameters of ``trainer``, the one that holds most of them first."""
    names = {parameter.name for parameter in trainer._params}
    found = []
    # (isinstance() would ask an object for its class, which proxies answer with side effects)
    for block in gc.get_objects():
        if issubclass(type(block), HybridBlock) and getattr(block, "_active", False) and block._cached_op is not None:
            held = sum(not is_data and p.name in names for is_data, p in block._cached_op_args)
            if held:
                found.append((held, block))
    return [block for _, block in sorted(found, key=lambda pair: -pair[0])]


def _without_bulks(block: Any) -> Callable[[], None]:
    """Have ``block`` run op by op; gives the undoing.

    Where shapes are static MXNet has made bulks when the block first ran, and keeps them: a twin runs meanwhile.
    """
    flags = dict(block._flags)
    if not flags.get("static_shape"):
        return lambda: None
    data = [i for i, (is_data, _) in enumerate(block._cached_op_args) if is_data]
    others = [i for i, (is_data, _) in enumerate(block._cached_op_args) if not is_data]
    flags |= {"static_alloc": False, "static_shape": False, "data_indices": data, "param_indices": others}
    original = block._cached_op
    twin = mx.nd.CachedOp(block._cached_graph[1], list(flags.items()))
    block._cached_op = twin

    def undo() -> None:
        if block._cached_op is twin:  # else the job has hybridized it anew
            block._cached_op = original

    return undo


@functools.cache
def _probe() -> tuple[Any, Any]:
    """A graph of small ops, one after another, and what to call it with. MXNet makes bulks of it while none records."""
    result = mx.sym.Variable(f"{_PROBE}_data")
    for number in range(_PROBE_OPS):
        result = mx.sym.negative(result, name=f"{_PROBE}{number}")
    with mx.autograd.pause():
        return mx.nd.CachedOp(result, []), mx.nd.ones((4, 4), ctx=mx.cpu())


def _probe_ns() -> float:
    """CPU time of handing in and running one op; more with the profiler, for its event, and as there are no bulks.

    The least of several: other threads of the process run meanwhile.
    """
    graph, data = _probe()
    times = []
    with mx.autograd.pause():
        for _ in range(_PROBE_RUNS):
            start = time.process_time_ns()
            mxnet_engine.wait(graph(data))
            times.append((time.process_time_ns() - start) / _PROBE_OPS)
    return min(times)
