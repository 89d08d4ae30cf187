"""BytePS for Keras: the adapter for one model that is trained with ``bps.DistributedOptimizer``.

How a job gets a tuner is in ``keras``. What BytePS' optimizer pushes has a name that is baked into the train step when
it is traced: names of another bound (``byteps_partitions``) come with a train step of their own (``keras_retrace``).
So do the parts of a flow (``byteps_flow``): slices of gradients, whose pushes have other sums for control inputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import byteps.tensorflow as bps
import numpy as np
import tensorflow as tf
from byteps.tensorflow import ops

from dpro.adapter import Exchange, Knob
from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.settings import Settings
from dpro.trace.byteps import SETTINGS, with_comm
from dpro.trace.model import RankTrace
from dpro_integrations import byteps_exchange, byteps_partitions, byteps_trace
from dpro_integrations.base import before_call
from dpro_integrations.byteps_flow import Flow, flow_of
from dpro_integrations.byteps_partitions import MOST_GRADIENTS, Bounds
from dpro_integrations.byteps_start import started_with
from dpro_integrations.byteps_trace import OwnTrace
from dpro_integrations.clocks import epoch_ns
from dpro_integrations.keras_adapter import KerasAdapter
from dpro_integrations.keras_graph import PUSH_PULL, Collection, StepGraph, Tracing
from dpro_integrations.keras_version import name_of

#: More than a tensor has whose shape is not known.
MAX_BYTES = 1 << 62
__all__ = ["adapter", "before_leaving", "meet", "patience", "place", "started_with"]


def place() -> tuple[int, int]:
    """Rank and number of ranks, as :func:`dpro_integrations.byteps_exchange.place`."""
    return byteps_exchange.place(bps)


def meet(tag: str) -> Exchange:
    """The other ranks, as :func:`dpro_integrations.byteps_exchange.meet`."""

    def summed(name: str, own: bytes) -> bytes:
        with tf.device("/CPU:0"):
            given = tf.constant(np.frombuffer(own, dtype=np.uint8).astype(np.float32))
            return bytes(ops.C_LIB.byteps_push_pull(given, input_name=name).numpy().astype(np.uint8))

    return byteps_exchange.meet(bps, "keras", tag, _bounds(), summed)


def patience(settings: Settings) -> Settings:
    """BytePS has no time-out of its own."""
    return settings


def before_leaving(leaving: Callable[[], None]) -> Callable[[], None]:
    """Have ``leaving`` called before the job's ``bps.shutdown()``. Returns the undo."""
    import byteps.tensorflow.keras as bps_keras

    return before_call("shutdown", (bps, ops, bps_keras), leaving)


@dataclass(frozen=True)
class _Pushed:
    """What goes by one name, bytes as they are sent."""

    name: str
    dtype: str
    nbytes: int


class KerasBytePSAdapter(KerasAdapter):
    """:class:`dpro.adapter.Adapter` for one compiled model; arguments as for :class:`KerasAdapter`."""

    name = "byteps_keras"

    def __init__(self, tracing: Tracing, exchange: Exchange) -> None:
        self._bounds = _bounds()
        self._place = bps.rank(), bps.size()
        self._own_bound = self._now = 0  # the job's bound while another is in force; that one
        self._flow: Flow | None = None
        self._pushed: dict[int, list[_Pushed]] = {}  # by bound, in the optimizer's order
        self._trace: OwnTrace | None = None
        self._to_record: Plan | None = None
        self._collection: Collection | None = None
        self._recorded: list[StepGraph] = []
        self._unpatch: Callable[[], None] | None = None
        self._lost = ""
        super().__init__(tracing, exchange)

    # -- what can be done here -----------------------------------------------------------------

    def capabilities(self) -> set[Knob]:
        return set() if self.why_not() else {Knob.PARTITION_BOUND, Knob.IN_FLIGHT}

    def why_not(self) -> str:
        if self._now or self._flow is not None:
            return ""
        if byteps_trace.is_the_jobs():
            return "the job has BytePS record itself (BYTEPS_TRACE_ON)"
        names = Counter(map(name_of, self._model.trainable_variables))
        if names and max(names.values()) > 1:
            return f"several variables are called {names.most_common(1)[0][0]!r}, and plans go by names"
        if any(gradient.kind == "sparse" for gradient in self._tracing.gradients):
            return "there are sparse gradients (sparse_as_dense=True makes them dense)"
        if len(names) > MOST_GRADIENTS:
            return f"the model has more than {MOST_GRADIENTS} variables"
        if seeded := self._draws_from_a_seed():
            return seeded
        if self._tracing.recorder.original is not None:
            return "the job's optimizer reduces gradients in a way of its own"
        scope = f"{self._optimizer._name}_Push_Pull/"
        for graph in self._tracing.graphs:  # others are broadcasts of the job's
            ours = any(scope in name for name in graph.pushed.values())
            if ours and len(graph.pushed) != len(self._reduced()):
                return "the step reduces more than the gradients of one call of the optimizer"
        return self._bounds.why_not("byteps.tensorflow")

    # -- capture -------------------------------------------------------------------------------

    def plan_to_record(self) -> Plan | None:
        """See :class:`dpro.adapter.RecordsUnderPlan`."""
        self._tracing.stop()
        reason = self.why_not() or ("" if self._reduced() else "the train step was traced before dpro could look on")
        if reason:
            raise RuntimeError(f"BytePS' stages can't be recorded here: {reason}")
        self._trace = self._trace or OwnTrace(ops.TF_LIB_CTYPES, bps.local_rank())
        self._to_record = byteps_partitions.plan_to_record(self.fingerprint(), self._sizes(), self._bounds)
        return self._to_record

    def start_capture(self) -> None:
        if self._trace is None or not self._trace.runs:
            raise RuntimeError("BytePS' stages are recorded only under the plan for it")
        if self._collection is not None:
            self._collection.stop()
            self._recorded, self._collection = self._collection.graphs, None
        super().start_capture()

    def stop_capture(self) -> RankTrace:
        trace = super().stop_capture()
        trace.meta.rank, trace.meta.world_size = bps.rank(), bps.size()
        trace.meta.extra[SETTINGS] = byteps_partitions.told(self._bounds, self._now)
        assert self._trace is not None
        names = {name: number for number, name in enumerate(self._names())}
        return with_comm(trace, self._trace.finish(), -epoch_ns(), names)

    def abort_capture(self) -> None:
        self._end_trace()
        super().abort_capture()

    # -- settings ------------------------------------------------------------------------------

    def obstacle(self) -> str:
        if self._now:
            self._bounds.rounds[self._now] += 1
        return super().obstacle()

    def prepare(self, plan: Plan) -> None:
        if plan.in_flight_bytes is not None:
            self._flowing(plan)
        else:
            self._prepared(plan)

    def apply(self, plan: Plan) -> None:
        if plan.in_flight_bytes is not None:
            flow = self._flowing(plan)
            self._leave_bound()
            self._step.set(_key(flow))
            self._flow = flow
            return
        bound = self._prepared(plan)
        self._flow = None
        if not self._now:
            self._own_bound = self._bounds.now
        self._step.set(str(bound))
        self._unpatch = self._unpatch or _patched(self._push_of_others)
        self._now = self._bounds.now = bound
        if self._trace is not None and plan == self._to_record:
            self._trace.begin(self._bounds.rounds[bound])
            if not self._recorded:
                self._collection = self._collection or Collection(frozenset({PUSH_PULL}))

    def revert(self) -> None:
        self._end_trace()
        super().revert()
        self._leave_bound()
        self._flow = None

    def close(self) -> None:
        self._end_trace()
        super().close()

    # -- parts ---------------------------------------------------------------------------------

    def _leave_bound(self) -> None:
        """The job's own bound is in force."""
        unpatch, self._unpatch = self._unpatch, None
        if unpatch is not None:
            unpatch()
        if self._now:
            self._bounds.now = self._own_bound
            self._now = 0

    def _flowing(self, plan: Plan) -> Flow:
        """What is to go how under ``plan``; there is a train step for it. Raises as :meth:`_prepared`."""
        reduced = self._check_fit(plan, {"partitions", "in_flight_bytes", "push_order"})
        flow = flow_of(plan, self._sizes(), self._bounds)
        self._bounds.reserve(flow.key)
        names = [name_of(variable) for variable in reduced]
        self._step.make(_key(flow), lambda _: self._in_order(flow, names), [], reduced)
        return flow

    def _prepared(self, plan: Plan) -> int:
        """The bound that is to be in force under ``plan``; there is a train step for it.

        Raises:
            PlanError: the plan does not fit this job.
        """
        reduced = self._check_fit(plan, {"partitions"})
        bound = self._bounds.of(plan, self._sizes())
        if self._bounds.reserve(bound) or bound not in self._pushed:
            pushed: list[_Pushed] = []
            self._step.make(str(bound), lambda _: self._under(bound, pushed), [], reduced)
            if len(pushed) != len(reduced):
                raise PlanError("traced anew, the train step reduces other gradients")
            self._pushed[bound] = pushed
        return bound

    def _under(self, bound: int, pushed: list[_Pushed]) -> Callable[[Any], Any]:
        """What reduces gradients as BytePS' optimizer does, under the names of ``bound``; notes these in ``pushed``."""
        optimizer = self._optimizer

        def aggregate(grads_and_vars: Any) -> Any:
            pushed.clear()
            undo = _patched(functools.partial(self._push, bound, pushed))
            try:
                return type(optimizer)._aggregate_gradients(optimizer, grads_and_vars)
            finally:
                undo()

        plain: Callable[[Any], Any] = tf.autograph.experimental.do_not_convert(aggregate)
        return plain

    def _in_order(self, flow: Flow, names: list[str]) -> Callable[[Any], Any]:
        """What reduces the gradients ``names`` as BytePS' optimizer does, but sends them by ``flow``.

        BytePS' own method is called twice: first it tells what it would push, then it gets what came of that.
        """
        optimizer = self._optimizer

        def under(push: Callable[..., Any], grads_and_vars: Any) -> Any:
            undo = _patched(push)
            try:
                return type(optimizer)._aggregate_gradients(optimizer, grads_and_vars)
            finally:
                undo()

        def aggregate(grads_and_vars: Any) -> Any:
            pairs = list(grads_and_vars)
            told: list[tuple[Any, str]] = []

            def tell(tensor: Any, scope: str = "", name: str | None = None) -> Any:
                told.append((tensor, scope + (name or f"BytePSPushPull_{ops._normalize_name(tensor.name)}")))
                return tensor

            under(tell, pairs)
            if len(told) != len(names):
                raise PlanError("traced anew, the train step reduces other gradients")
            sums = iter(self._send(flow, dict(zip(names, told, strict=True))))
            return under(lambda *_, **__: next(sums), pairs)

        plain: Callable[[Any], Any] = tf.autograph.experimental.do_not_convert(aggregate)
        return plain

    def _send(self, flow: Flow, given: dict[str, tuple[Any, str]]) -> list[Any]:
        """The sums of ``given`` (tensor and BytePS' name, by variable), in its order."""
        parts: list[Any] = []
        for at, (piece, before) in enumerate(zip(flow.pieces, flow.waits(), strict=True)):
            tensor, name = given[piece.gradient]
            size = tensor.dtype.size
            part = tensor if piece.whole else tf.reshape(tensor, [-1])[piece.begin // size : piece.end // size]
            renamed = self._bounds.name(flow.key, f"{name}.{piece.number}", at)
            with tf.control_dependencies([parts[k] for k in before]):
                parts.append(ops.C_LIB.byteps_push_pull(part, input_name=renamed))
        sums = []
        for gradient, (tensor, _) in given.items():
            mine = [parts[at] for at in flow.of(gradient)]
            sums.append(mine[0] if len(mine) == 1 else tf.reshape(tf.concat(mine, 0), tensor.shape))
        return sums

    def _push(self, bound: int, pushed: list[_Pushed], tensor: Any, scope: str = "", name: str | None = None) -> Any:
        """In the place of ``byteps.tensorflow.ops._push_pull``, while the step is traced."""
        name = name or f"BytePSPushPull_{ops._normalize_name(tensor.name)}"
        renamed = self._bounds.name(bound, scope + name, len(pushed))
        nbytes = int(tensor.shape.num_elements()) * int(tensor.dtype.size)
        pushed.append(_Pushed(renamed, str(tensor.dtype.name), nbytes))
        return ops.C_LIB.byteps_push_pull(tensor, name=name, input_name=renamed)

    def _push_of_others(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The same while another bound is in force: what the job traces now has a name of the job's own.

        BytePS would end the process where a name is cut otherwise than at first. All ranks come by here alike, between
        two steps: our bound goes.
        """
        nbytes = int(tensor.shape.num_elements() or MAX_BYTES) * int(tensor.dtype.size)
        if not tf.executing_eagerly() and nbytes > min(self._own_bound, self._now):
            self._lost = "the job pushes other tensors of more than a partition"
            self.revert()
        return ops._push_pull(tensor, *args, **kwargs)

    def _end_trace(self) -> None:
        if self._trace is not None:
            self._trace.end()
        if self._collection is not None:
            self._collection.stop()
            self._collection = None

    def _obstacle(self) -> str:
        return "the job's ranks have changed" if (bps.rank(), bps.size()) != self._place else self._lost

    def _framework(self) -> str:
        return f"byteps {version('byteps')}, tensorflow {tf.__version__}"

    def _sizes(self) -> dict[str, int]:
        return {name_of(variable): self._tensor(variable)[1] for variable in self._reduced()}

    def _tensor(self, variable: Any) -> tuple[str, int]:
        sent, _ = self._optimizer._compression.compress(tf.zeros([0], variable.dtype))
        return str(sent.dtype.name), int(variable.shape.num_elements()) * int(sent.dtype.size)

    def _members(self) -> list[list[int]]:
        return [[number] for number, _ in enumerate(self._reduced())]

    def _names(self) -> list[str]:
        return [pushed.name for pushed in self._pushed.get(self._now, [])]

    def _graphs(self) -> list[StepGraph]:
        return self._recorded


def _key(flow: Flow) -> str:
    """Of the train step under a flow."""
    return f"flow {hash(flow)}"


def _bounds() -> Bounds:
    """Those of this process."""

    def declare(name: str) -> None:
        ops.TF_LIB_CTYPES.byteps_tensorflow_declare_tensor(ctypes.c_char_p(name.encode()))

    return Bounds(ops.TF_LIB_CTYPES, declare, bps.local_size())


def _patched(push: Callable[..., Any]) -> Callable[[], None]:
    """Have ``push`` called for every tensor that BytePS' Python is given; gives the undoing."""
    stock = bps._push_pull

    def undo() -> None:
        if bps._push_pull is push:
            bps._push_pull = stock

    bps._push_pull = push
    return undo


adapter = KerasBytePSAdapter
