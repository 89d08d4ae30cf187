"""Capture of a few steps of a Keras job: TensorFlow's own profiler, the graph of the step, and Horovod's part in it.

An op is a row named by its node. A gradient is handed in by the op that reduces it: that one only starts the reduction,
and is over at once; whoever uses the result is started when it is there. TensorFlow has one profiler a process. If
the job starts its own, ours gives way. Nothing here is a collective, and nothing stays.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import errors
from tensorflow.python.profiler import profiler_v2
from tensorflow.python.profiler.internal import _pywrap_profiler, _pywrap_traceme

from dpro.clock.identity import CLOCK_ID, clock_id
from dpro.trace import horovod, wire, xplane
from dpro.trace.dataflow import normalise
from dpro.trace.model import EventKind, RankTrace, Tensor, TraceBuilder
from dpro_integrations.host_load import HostLoad, StepCpu
from dpro_integrations.host_load import _read as read_threads
from dpro_integrations.keras_graph import StepGraph

#: A captured step that lasts longer than any before, so many times and at least so long, or a capture that
#: writes more, is given up: something else than training is going on.
LIMIT_STEPS = 20.0
LEAST_LIMIT_S = 2.0
LIMIT_BYTES = 512 << 20
#: How often, and on how many ops, it is measured what recording an op costs.
_PROBE_RUNS, _PROBE_OPS, _PROBE = 24, 64, "dpro_probe"
#: An op of a real model costs at most so many times what the probe's does: colder caches, fresh memory.
_MOST_PROBES = 2.0
#: How long the job is held, once, to see what Horovod's threads take while there is nothing to do.
_IDLE_S, _IDLE_LOOKS = 0.03, 3
_CLOCK_MARKS = 5
#: What a reader says of a profile that ours is not: steps have our marks, and all ops are recorded.
_NOT_OURS = ("no step marks", "cheap ops are missing")
_TAKEN_OVER = "the job's own profiler took over"
_OPTIONS = {"host_tracer_level": 3, "python_tracer_level": 0, "device_tracer_level": 0}


class Capture:
    """Profile the job from construction to :meth:`finish` or :meth:`abort`.

    Args:
        usual_s: the longest step so far, seconds.
        cpu: of the process, in steps without us; goes on being told of those that are captured.
        allocations: gets what the profile has of them, where TensorFlow was told to record them.

    Raises:
        RuntimeError: a profiler is running already, or the job is not on the CPU.
    """

    def __init__(self, usual_s: float, cpu: StepCpu, allocations: list[xplane.Allocation] | None = None) -> None:
        if profiler_v2._profiler is not None:
            raise RuntimeError("the job's own profiler is running")
        if tf.config.list_logical_devices("GPU"):
            raise RuntimeError("TensorFlow's ops are captured on the CPU only")
        self._bounds: list[tuple[int, int]] = []
        self._opened = 0
        self._lost = ""
        self._limit_s = max(LEAST_LIMIT_S, LIMIT_STEPS * usual_s)
        self._cpu, self._allocations = cpu, allocations
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._session: Any = None
        self._tap: wire.Tap | None = None
        self._restore: Callable[[], None] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="dpro-")
        try:
            self._host = _Load()
            self._plain_ns = _probe_ns()
            self._session = _start(self._folder.name)
            self._profiled_ns = _probe_ns()
            self._restore = _yield_to_user(self._give_way)
            _mark_clock()
            self._tap = wire.Tap()
            self._host.begin()
            self._open_step()
            cpu.capture(True)
        except BaseException:
            self.abort()
            raise

    def mark_step(self) -> None:
        """The step that ended is over, the next one begins."""
        if self._lost:
            raise RuntimeError(self._lost)
        self._bounds.append((self._opened, time.monotonic_ns()))
        self._open_step()

    def finish(
        self, graphs: list[StepGraph], tensors: list[Tensor], members: list[list[int]], names: Sequence[str] = ()
    ) -> RankTrace:
        """Detach and read back what was recorded.

        Args:
            graphs: what may have run; the one that has most of the ops did.
            tensors: gradients.
            members: for each of the library's reductions, in the order in which they were made, numbers in ``tensors``.
            names: BytePS' for the gradients, in that order.

        Raises:
            RuntimeError: the job's own profiler took over, or there is far too much.
            TraceError: nothing to be read.
        """
        if self._lost or not self._bounds:
            raise RuntimeError(self._lost or "no step was captured")
        contention = self._host.since()
        with self._lock, self._folder:
            session, self._session = self._session, None
            if session is None:
                raise RuntimeError(self._lost or _TAKEN_OVER)
            try:
                _mark_clock()
                self._profiled_ns = min(self._profiled_ns, _probe_ns())
                session.export_to_tb()
            finally:
                del session
                self._detach()
            self._plain_ns = min(self._plain_ns, _probe_ns())
            files = sorted(Path(self._folder.name).rglob("*.xplane.pb"))
            size = sum(file.stat().st_size for file in files)
            if not files or size > LIMIT_BYTES:
                raise RuntimeError(f"the capture is too large ({size >> 20} MiB)" if files else _TAKEN_OVER)
            trace = xplane.read(files[0], self._allocations)
        return self._complete(trace, contention, graphs, tensors, members, names)

    def abort(self) -> None:
        """Detach, keep nothing. Never raises."""
        with contextlib.suppress(Exception), self._lock:
            self._detach()
            self._folder.cleanup()

    # -- parts ---------------------------------------------------------------------------------

    def _complete(
        self,
        trace: RankTrace,
        contention: dict[str, float],
        graphs: list[StepGraph],
        tensors: list[Tensor],
        members: list[list[int]],
        names: Sequence[str],
    ) -> RankTrace:
        meta = trace.meta
        trace.step_bounds = np.asarray(self._bounds, dtype=np.int64).reshape(-1, 2)
        meta.host, meta.clock = socket.gethostname(), "monotonic"
        meta.contention = contention
        meta.extra[CLOCK_ID] = clock_id()
        trace.warnings = [line for line in trace.warnings if not line.startswith(_NOT_OURS)]
        least_ns = max(0.0, self._profiled_ns - self._plain_ns) / _PROBE_OPS
        seen = set(trace.names)
        graph = max(graphs, key=lambda one: len(seen & one.ops.keys()), default=StepGraph())
        _keep_ops(trace, graph.ops.keys() if graph.ops else seen - {n for n in seen if n.startswith(_PROBE)})
        trace.assign_steps()
        meta.event_overhead_ns = self._overhead_ns(trace, least_ns) * _stretch(contention)
        meta.extra["dataflow"] = {
            name: list(dict.fromkeys(map(normalise, inputs))) for name, inputs in graph.inputs.items() if inputs
        }
        meta.extra.pop("op_types", None)
        trace = with_gradients(trace, graph, tensors, members, names)
        return self._tap.add_to(trace) if self._tap is not None else trace

    def _overhead_ns(self, trace: RankTrace, least_ns: float) -> float:
        """CPU time of recording one op, ns: by how much the process' CPU time grew in the captured steps.

        The probe fits into the cache: it tells the least that an op can cost, and with it what growth is the machine's.
        """
        inside = int(((trace.kind == EventKind.CPU_OP) & (trace.step >= 0)).sum())
        return self._cpu.per_event_ns(inside / max(1, trace.steps), least_ns, _MOST_PROBES * least_ns)

    def _open_step(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            # on a thread of its own: nothing of ours is called in a validation, or while the data do not come
            why = f"a captured step did not end within {self._limit_s:.3g} s"
            self._timer = threading.Timer(self._limit_s, self._give_up, (why,))
            self._timer.daemon = True
            self._timer.start()
        self._opened = time.monotonic_ns()

    def _give_way(self) -> None:
        self._give_up(_TAKEN_OVER)

    def _give_up(self, reason: str) -> None:
        with self._lock:
            self._lost = self._lost or reason
            self.abort()

    def _detach(self) -> None:
        """Everything off, whatever fails on the way."""
        self._cpu.capture(False)
        with contextlib.ExitStack() as undo:  # runs all of it, last in first out, and raises at the end
            if self._tap is not None:
                undo.callback(self._tap.stop)
            restore, self._restore = self._restore, None
            if restore is not None:
                undo.callback(restore)
            self._session = None  # a session that is let go of ends, and what it saw is thrown away
            timer, self._timer = self._timer, None
            if timer is not None:
                undo.callback(timer.cancel)


def with_gradients(
    trace: RankTrace, graph: StepGraph, tensors: list[Tensor], members: list[list[int]], names: Sequence[str] = ()
) -> RankTrace:
    """``trace`` with its tensor table, and rows for when each gradient was handed in and first used.

    Args:
        trace: rows of the ops of ``graph``, by node.
        members, names: see :meth:`Capture.finish`.
    """
    trace.tensors = tensors
    rows = _rows_of_nodes(trace)
    consumers = _consumers(graph)
    more = TraceBuilder(trace.meta)
    handed: list[tuple[int, int, int]] = []
    for node, place in graph.reductions(names).items():
        numbers = members[place] if 0 <= place < len(members) else []
        for port, number in enumerate(numbers):
            users = _first_ops(consumers, rows, node, port)
            for row in rows.get(node, ()):
                step, start, end = int(trace.step[row]), int(trace.start[row]), int(trace.end[row])
                thread = trace.resources[trace.resource[row]]
                more.add(horovod.SUBMIT, EventKind.ANNOTATION, thread, start, end, tensor=number)
                used = [int(trace.start[r]) for r in users if trace.step[r] == step and trace.start[r] >= end]
                if used:
                    more.add(horovod.WAIT, EventKind.ANNOTATION, thread, end, min(used), tensor=number)
                if step == trace.steps - 1:
                    handed.append((start, place, number))
    # of several times in a step the last one counts
    last = {number: (start, place, port) for port, (start, place, number) in enumerate(sorted(handed))}
    for ready, number in enumerate(sorted(last, key=last.__getitem__)):
        tensors[number].ready = ready
    return trace.joined(more.freeze([]))


def _rows_of_nodes(trace: RankTrace) -> dict[str, list[int]]:
    """Rows inside steps, by name, in order."""
    found: dict[str, list[int]] = {}
    for row in np.flatnonzero((trace.kind == EventKind.CPU_OP) & (trace.step >= 0)).tolist():
        found.setdefault(trace.names[trace.name[row]], []).append(row)
    return found


def _consumers(graph: StepGraph) -> dict[str, list[tuple[int, str]]]:
    """Node -> number of its output, and the node that takes it."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, inputs in graph.inputs.items():
        for given in inputs:
            node, _, port = given.partition(":")
            if not node.startswith("^"):
                found.setdefault(node, []).append((int(port) if port.isdecimal() else 0, name))
    return found


def _first_ops(
    consumers: dict[str, list[tuple[int, str]]], rows: dict[str, list[int]], node: str, port: int
) -> list[int]:
    """Rows of the ops that take output ``port`` of ``node``, past nodes that never run as ops."""
    left = [name for number, name in consumers.get(node, ()) if number == port]
    seen, found = {node}, []
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in rows:
            found += rows[name]
        else:
            left += [user for _, user in consumers.get(name, ())]
    return found


def _keep_ops(trace: RankTrace, names: Any) -> None:
    """Drop all rows but those called one of ``names``."""
    kept = np.isin(trace.name, [i for i, name in enumerate(trace.names) if name in names])
    kept &= trace.kind == EventKind.CPU_OP
    trace.columns = {key: column[kept] for key, column in trace.columns.items()}


class _Load(HostLoad):
    """As :class:`HostLoad`, with all threads that compute in the place of the main one.

    TensorFlow computes on threads of its own. Those that run while there is nothing to do are Horovod's.
    """

    def __init__(self) -> None:
        looks, at = [read_threads()], time.monotonic_ns()
        for _ in range(_IDLE_LOOKS):
            time.sleep(_IDLE_S / _IDLE_LOOKS)
            looks.append(read_threads())
        wall_ns = time.monotonic_ns() - at
        # in every stretch, and never for most of it: Horovod's go round all the time, others work or come to rest
        most_ns = wall_ns / _IDLE_LOOKS / 2
        ran = [
            {tid for tid, times in now.items() if times > was.get(tid, times) and times[0] - was[tid][0] < most_ns}
            for was, now in pairwise(looks)
        ]
        self._communication = set.intersection(*ran) - {threading.get_native_id()}
        took_ns = sum(looks[-1][tid][0] - looks[0][tid][0] for tid in self._communication)
        self._idle_share = min(took_ns / wall_ns, 0.99)
        super().__init__()

    def begin(self) -> None:
        """Count from here."""
        super().__init__()

    def since(self) -> dict[str, float]:
        found, now, was = super().since(), read_threads(), self._start
        if not found:
            return {}
        found |= {"main_cpu_ns": 0.0, "main_delay_ns": 0.0, "others_cpu_ns": 0.0}
        for tid, (cpu, delay) in now.items():
            before = was.get(tid, (0, 0))
            if tid in self._communication:
                found["others_cpu_ns"] += cpu - before[0]
            else:
                found["main_cpu_ns"] += cpu - before[0]
                found["main_delay_ns"] += delay - before[1]
        if "HOROVOD_TIMELINE" not in os.environ:  # its writer spins all the time, which is no round
            found["idle_share"] = self._idle_share
        return found


def _stretch(contention: dict[str, float]) -> float:
    """Wall time of the computing threads per CPU time that they ran: more than 1 where others have a core as well."""
    running_ns = contention.get("main_cpu_ns", 0.0)
    return 1.0 + contention["main_delay_ns"] / running_ns if running_ns else 1.0


def _start(folder: str) -> Any:
    session = _pywrap_profiler.ProfilerSession()
    try:
        session.start(folder, _OPTIONS)
    except errors.AlreadyExistsError as error:
        raise RuntimeError("the job's own profiler is running") from error
    return session


def _mark_clock() -> None:
    """Ranges by which the reader finds our clock in the profile."""
    for _ in range(_CLOCK_MARKS):
        _pywrap_traceme.TraceMe(xplane.CLOCK_MARK, monotonic_ns=time.monotonic_ns()).Stop()


def _yield_to_user(give_way: Callable[[], None]) -> Callable[[], None]:
    """If anybody makes a profiler's session while ours runs, stop ours first. Returns the undo.

    All of Python's ways to one (``tf.profiler``, TensorBoard, ``tf.summary``) look the class up in one module.
    """
    original = _pywrap_profiler.ProfilerSession

    def session() -> Any:
        give_way()
        return original()

    def undo() -> None:
        if _pywrap_profiler.ProfilerSession is session:
            _pywrap_profiler.ProfilerSession = original

    _pywrap_profiler.ProfilerSession = session
    return undo


@functools.cache
def _probe() -> Callable[[Any], Any]:
    """A function of small ops, one after another, that TensorFlow leaves as they are."""

    @tf.function(autograph=False)
    def run(matrix: Any) -> Any:
        with tf.name_scope(_PROBE):
            result = matrix
            for _ in range(_PROBE_OPS):
                result = tf.linalg.matmul(result, matrix)
            return result

    return run  # type: ignore[no-any-return]


def warm_up() -> None:
    """What would make this rank's first captured step begin later than others'."""
    with tf.device("/CPU:0"):
        _probe()(tf.eye(4))


def _probe_ns() -> float:
    """CPU time of a call of the probe, which runs on several threads; more with the profiler, for what it records.

    The least of many: in others there are Horovod's rounds, and a cache that was another's.
    """
    times = []
    with tf.device("/CPU:0"):
        matrix = tf.eye(4)
        _probe()(matrix)
        for _ in range(_PROBE_RUNS):
            start = time.process_time_ns()
            _probe()(matrix)
            times.append(time.process_time_ns() - start)
    return float(min(times))
