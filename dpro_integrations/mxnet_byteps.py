"""BytePS for MXNet: the adapter for one ``DistributedTrainer``.

How a job gets a tuner is in ``mxnet``; the change of partitions is in ``mxnet_partitions``, agreement between ranks in
``byteps_exchange``, BytePS' own record of its stages in ``byteps_trace``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import byteps.mxnet as bps
import mxnet as mx
import numpy as np
from byteps.mxnet import ops
from byteps.mxnet.compression import FP16Compressor, NoneCompressor

from dpro.adapter import Exchange, Knob
from dpro.errors import PlanError, TraceError
from dpro.plan import Plan
from dpro.settings import Settings
from dpro.trace.byteps import SETTINGS, Comm, read, with_comm
from dpro.trace.model import RankTrace
from dpro_integrations import byteps_exchange, byteps_partitions, byteps_trace
from dpro_integrations.byteps_flow import Flow, flow_of
from dpro_integrations.byteps_partitions import MOST_GRADIENTS
from dpro_integrations.byteps_start import started_with
from dpro_integrations.byteps_trace import OwnTrace
from dpro_integrations.mxnet_adapter import GluonAdapter
from dpro_integrations.mxnet_capture import StepCapture
from dpro_integrations.mxnet_partitions import PREFIX, Partitions, bounds, reduces_as_stock
from dpro_integrations.mxnet_steps import reduced

__all__ = ["MODULES", "adapter", "meet", "patience", "place", "started_with"]
#: How long BytePS may take to write its trace, and how long a file that is whole stays as it is, s.
_WRITTEN_S, _LOOK_S = 3.0, 0.1
#: A file's time is no finer than this.
_TICK_NS = 10_000_000
#: Where a job finds ``shutdown``, the one that it calls first.
MODULES: tuple[ModuleType, ...] = (bps, ops)


def place() -> tuple[int, int]:
    """Rank and number of ranks, as :func:`dpro_integrations.byteps_exchange.place`."""
    return byteps_exchange.place(bps)


def meet(tag: str) -> Exchange:
    """The other ranks, as :func:`dpro_integrations.byteps_exchange.meet`."""

    def summed(name: str, own: bytes) -> bytes:
        array = mx.nd.array(np.frombuffer(own, dtype=np.uint8), dtype="float32")
        array.wait_to_read()
        bps.byteps_push_pull(array, name=name, is_average=False)
        return bytes(array.asnumpy().astype(np.uint8))

    return byteps_exchange.meet(bps, "mxnet", tag, bounds(), summed)


def patience(settings: Settings) -> Settings:
    """BytePS has no time-out of its own."""
    return settings


class BytePSMXNetAdapter(GluonAdapter):
    """:class:`dpro.adapter.Adapter` for one ``bps.DistributedTrainer``."""

    name = "byteps_mxnet"

    def __init__(self, trainer: Any, exchange: Exchange) -> None:
        super().__init__(trainer, exchange)
        self._partitions = Partitions(trainer)
        self._bounds = self._partitions.bounds
        self._place = bps.rank(), bps.size()
        self._trace: OwnTrace | None = None
        self._to_record: Plan | None = None

    def capabilities(self) -> set[Knob]:
        if self.why_not():
            return set()
        if byteps_trace.is_the_jobs():
            return {Knob.PARTITION_BYTES}
        return {Knob.PARTITION_BOUND} if self._compresses() else {Knob.PARTITION_BOUND, Knob.IN_FLIGHT}

    def why_not(self) -> str:
        if self._partitions.changed:
            return ""
        trainer = self._trainer
        if not reduces_as_stock(trainer):
            return "the job's trainer reduces gradients in a way of its own"
        if any(name.startswith("byteps_") for p in trainer._params for name in vars(p)):
            return "BytePS compresses the gradients, with a state that belongs to their names"
        if any(p._stype != "default" or p._grad_stype != "default" for p in trainer._params):
            return "there are sparse gradients"
        if len(trainer._params) > MOST_GRADIENTS:
            return f"the trainer has more than {MOST_GRADIENTS} parameters"
        return self._bounds.why_not("byteps.mxnet")

    def obstacle(self) -> str:
        if (bps.rank(), bps.size()) != self._place:
            return "the job's ranks have changed"
        return super().obstacle()

    def plan_to_record(self) -> Plan | None:
        if byteps_trace.is_the_jobs():
            return None
        if reason := self.why_not():
            raise RuntimeError(f"BytePS' stages can't be recorded here: {reason}")
        self._trace = self._trace or OwnTrace(ops.MXNET_LIB_CTYPES, bps.local_rank())
        sizes = self._sizes()
        self._to_record = byteps_partitions.plan_to_record(self.fingerprint(), sizes, self._bounds)
        return self._to_record

    def start_capture(self) -> None:
        if not byteps_trace.is_the_jobs() and not (self._trace and self._trace.runs):
            raise RuntimeError("BytePS' stages are recorded only under the plan for it")
        super().start_capture()

    def prepare(self, plan: Plan) -> None:
        if plan.in_flight_bytes is not None:
            self._flow(plan)
        else:
            self._bound(plan)

    def apply(self, plan: Plan) -> None:
        if plan.in_flight_bytes is not None:
            self._partitions.send(self._flow(plan))
            return
        bound = self._bound(plan)
        self._partitions.set(bound)
        if self._trace is not None and plan == self._to_record:
            self._trace.begin(self._bounds.rounds[bound])

    def revert(self) -> None:
        self._end_trace()
        self._partitions.clear()

    def abort_capture(self) -> None:
        self._end_trace()
        super().abort_capture()

    def _end_trace(self) -> None:
        if self._trace is not None:
            self._trace.end()

    def _bound(self, plan: Plan) -> int:
        """The one bound that cuts all gradients as ``plan`` says, bytes.

        Raises:
            PlanError: there is none, or the plan does not fit this job.
        """
        self._check_fit(plan, {"partitions"})
        if reason := self.why_not():
            raise PlanError(f"partitions can't be changed here: {reason}")
        if byteps_trace.is_the_jobs():
            raise PlanError("while BYTEPS_TRACE_ON is set, BytePS can crash where there are several partitions")
        return self._bounds.of(plan, self._sizes())

    def _flow(self, plan: Plan) -> Flow:
        """As :meth:`_bound`, of a plan with ``in_flight_bytes``."""
        self._check_fit(plan, {"partitions", "in_flight_bytes", "push_order"})
        if reason := self.why_not():
            raise PlanError(f"how gradients go can't be changed here: {reason}")
        if self._compresses():
            raise PlanError("the trainer compresses gradients one by one as it pushes them")
        return flow_of(plan, self._sizes(), self._bounds)

    def _compresses(self) -> bool:
        """Whether what is pushed is not the gradients themselves."""
        return any(type(made) is not NoneCompressor for made in self._trainer._intra_compressors.values())

    def _sizes(self) -> dict[str, int]:
        """Bytes of every gradient as it is pushed, by its parameter's name."""
        return {parameter.name: self._sent_bytes(parameter) for _, parameter in reduced(self._trainer)}

    def _sent_bytes(self, parameter: Any) -> int:
        """Of a gradient as it is pushed."""
        gradient = parameter.list_grad()[0]
        kind = np.dtype(gradient.dtype)
        halves = isinstance(self._trainer._intra_compressors[parameter.name], FP16Compressor) and kind.kind == "f"
        return int(gradient.size) * (2 if halves else kind.itemsize)

    def _framework(self) -> str:
        return _framework()

    def _new_capture(self, usual_s: float) -> StepCapture:
        return Capture(self._trainer, usual_s, self._partitions, self._trace)


class Capture(StepCapture):
    """:class:`StepCapture` of a job with ``bps.DistributedTrainer``, and what BytePS' own trace has of its steps.

    Args:
        trace: begun; None where the job was started with it.
    """

    operators = ("BytePSPushPull",)

    def __init__(self, trainer: Any, usual_s: float, partitions: Partitions, trace: OwnTrace | None) -> None:
        self._partitions, self._trace = partitions, trace
        super().__init__(trainer, usual_s)

    def finish(self) -> RankTrace:
        trace = super().finish()
        suffix = self._partitions.bounds.suffix(self._partitions.in_force)
        names = {f"byteps.{PREFIX}{place}{suffix}": number for place, number in self._number.items()}
        return with_comm(trace, self._comm(), -self._clock_pair, names)

    def _comm(self) -> Comm:
        if self._trace is not None:
            return self._trace.finish()
        try:
            return read(_comm_file(since_ns=self._log.begin + self._clock_pair))
        except TraceError as error:
            raise RuntimeError(f"BytePS' own trace can't be read: {error}") from error

    def _attach(self) -> None:
        # the trainer looks it up in this module at every call
        self._wrap(bps, "byteps_push_pull", self._pushing)

    def _describe(self, trace: RankTrace) -> None:
        meta = trace.meta
        meta.rank, meta.world_size = bps.rank(), bps.size()
        meta.framework, meta.source = _framework(), "byteps_mxnet"
        meta.extra[SETTINGS] = byteps_partitions.told(self._partitions.bounds, self._partitions.in_force)

    def _pushing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def byteps_push_pull(tensor: Any, *args: Any, **kwargs: Any) -> None:
            def call() -> Any:
                original(tensor, *args, **kwargs)
                return tensor

            self._hand_in([tensor], self._of(tensor, kwargs.get("name")), call)

        return byteps_push_pull

    def _of(self, tensor: Any, name: Any) -> tuple[int, ...]:
        """Of which gradient ``tensor`` is; () where it is none."""
        if id(tensor) in self._of_array:
            return (self._of_array[id(tensor)],)
        # compressed: a copy, whose name says which place in the trainer it has
        place = str(name or "").removeprefix("gradient_")
        return (self._number[int(place)],) if place.isdecimal() and int(place) in self._number else ()


def _comm_file(since_ns: int) -> Path:
    """BytePS' own trace: it is written once, by a thread of BytePS', when the last gradient has had its last round.

    Args:
        since_ns: epoch; what is older is of a job before.

    Raises:
        RuntimeError: it does not come.
    """
    file = Path(os.environ.get("BYTEPS_TRACE_DIR") or "trace") / str(bps.local_rank()) / "comm.json"
    deadline, seen = time.monotonic() + _WRITTEN_S, None
    while time.monotonic() < deadline:
        now = file.stat() if file.exists() else None
        if now is not None and now.st_size and now.st_mtime_ns > since_ns - _TICK_NS:
            if seen == (now.st_size, now.st_mtime_ns):
                return file
            seen = now.st_size, now.st_mtime_ns
        time.sleep(_LOOK_S)
    raise RuntimeError("BytePS wrote no trace: BYTEPS_TRACE_END_STEP must be one of the captured steps")


def _framework() -> str:
    return f"byteps {version('byteps')}, mxnet {mx.__version__}"


adapter = BytePSMXNetAdapter
