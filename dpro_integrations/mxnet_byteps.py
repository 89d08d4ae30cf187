"""BytePS for MXNet: the adapter for one ``DistributedTrainer``.

How a job gets a tuner is in ``mxnet``; the change of partitions is in ``mxnet_partitions``, agreement between ranks in
``byteps_exchange``.
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
from byteps.mxnet.compression import FP16Compressor

from dpro.adapter import Exchange, Knob
from dpro.errors import DproError, PlanError, TraceError
from dpro.plan import Plan
from dpro.settings import Settings
from dpro.trace.byteps import MAX_PARTS, PAGE_BYTES, SETTINGS, cut, read, with_comm
from dpro.trace.model import RankTrace
from dpro_integrations import mxnet_partitions
from dpro_integrations.byteps_exchange import join_exchange
from dpro_integrations.mxnet_adapter import GluonAdapter
from dpro_integrations.mxnet_capture import StepCapture
from dpro_integrations.mxnet_partitions import (
    MEETING_NUMBER,
    MOST_GRADIENTS,
    Partitions,
    declare,
    is_traced,
    reduces_as_stock,
)
from dpro_integrations.mxnet_steps import reduced

#: How long BytePS may take to write its trace, and how long a file that is whole stays as it is, s.
_WRITTEN_S, _LOOK_S = 3.0, 0.1
#: A file's time is no finer than this.
_TICK_NS = 10_000_000
#: Where a job finds ``shutdown``, the one that it calls first.
MODULES: tuple[ModuleType, ...] = (bps, ops)


def place() -> tuple[int, int]:
    """Rank and number of ranks.

    Raises:
        DproError: it is no job of several workers that BytePS' launcher started.
    """
    if "DMLC_PS_ROOT_URI" not in os.environ:
        raise DproError("the job has no BytePS scheduler")
    return bps.rank(), bps.size()


def meet(tag: str) -> Exchange:
    """The other ranks, as :func:`~dpro_integrations.byteps_exchange.join_exchange`. Every rank calls it."""
    try:
        timeout_s = Settings.from_env().timeout_s
    except DproError:  # said later, by every rank that has them: the others wait here
        timeout_s = Settings().timeout_s
    name = f"dpro_meet_{tag}"
    try:
        declare(name, MEETING_NUMBER + int(tag))
    except ValueError as error:
        raise DproError(str(error)) from error

    def summed(own: bytes) -> bytes:
        array = mx.nd.array(np.frombuffer(own, dtype=np.uint8), dtype="float32")
        array.wait_to_read()
        bps.byteps_push_pull(array, name=name, is_average=False)
        return bytes(array.asnumpy().astype(np.uint8))

    return join_exchange(bps.rank(), bps.size(), f"mxnet-{tag}", timeout_s, summed)


def patience(settings: Settings) -> Settings:
    """BytePS has no time-out of its own."""
    return settings


class BytePSMXNetAdapter(GluonAdapter):
    """:class:`dpro.adapter.Adapter` for one ``bps.DistributedTrainer``."""

    name = "byteps_mxnet"

    def __init__(self, trainer: Any, exchange: Exchange) -> None:
        super().__init__(trainer, exchange)
        self._partitions = Partitions(trainer)
        self._place = bps.rank(), bps.size()

    def capabilities(self) -> set[Knob]:
        if self.why_not():
            return set()
        return {Knob.PARTITION_BYTES} if is_traced() else {Knob.PARTITION_BOUND}

    def why_not(self) -> str:
        if self._partitions.in_force:
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
        return mxnet_partitions.why_not()

    def obstacle(self) -> str:
        if (bps.rank(), bps.size()) != self._place:
            return "the job's ranks have changed"
        return super().obstacle()

    def start_capture(self) -> None:
        if not is_traced():
            raise RuntimeError("BytePS shows its partitions only if the job is started with BYTEPS_TRACE_ON=1")
        super().start_capture()

    def prepare(self, plan: Plan) -> None:
        self._bound(plan)

    def apply(self, plan: Plan) -> None:
        self._partitions.set(self._bound(plan))

    def revert(self) -> None:
        self._partitions.clear()

    def _bound(self, plan: Plan) -> int:
        """The one bound that cuts all gradients as ``plan`` says, bytes.

        Raises:
            PlanError: there is none, or the plan does not fit this job.
        """
        self._check_fit(plan, {"partitions"})
        if reason := self.why_not():
            raise PlanError(f"partitions can't be changed here: {reason}")
        if is_traced():
            raise PlanError("while BYTEPS_TRACE_ON is set, BytePS can crash where there are several partitions")
        if not plan.partitions:
            raise PlanError("the plan has no partitions")
        known = {parameter.name: self._sent_bytes(parameter) for _, parameter in reduced(self._trainer)}
        for name, nbytes in plan.partitions.items():
            if name not in known:
                raise PlanError(f"the trainer has no parameter {name!r}")
            if nbytes % PAGE_BYTES:
                raise PlanError(f"partitions of {nbytes} bytes are no whole pages of {PAGE_BYTES}")
        wanted = {name: plan.partitions.get(name, mxnet_partitions.job_bound()) for name in known}
        for bound in sorted(set(wanted.values())):
            if all(cut(known[name], bound) == cut(known[name], own) for name, own in wanted.items()):
                break
        else:
            raise PlanError("BytePS has one bound for all gradients, the plan several")
        if (parts := max(len(cut(nbytes, bound)) for nbytes in known.values())) > MAX_PARTS:
            raise PlanError(f"partitions of {bound} bytes make {parts} parts of a gradient")
        if 0 < (most := mxnet_partitions.most_bytes()) < bound:
            raise PlanError(f"BYTEPS_SCHEDULING_CREDIT lets no more than {most} bytes go at once")
        if not self._partitions.room(bound):
            raise PlanError(f"{mxnet_partitions.MOST_BOUNDS} partition sizes were tried: BytePS frees no memory of any")
        return bound

    def _sent_bytes(self, parameter: Any) -> int:
        """Of a gradient as it is pushed."""
        gradient = parameter.list_grad()[0]
        kind = np.dtype(gradient.dtype)
        halves = isinstance(self._trainer._intra_compressors[parameter.name], FP16Compressor) and kind.kind == "f"
        return int(gradient.size) * (2 if halves else kind.itemsize)

    def _framework(self) -> str:
        return _framework()

    def _new_capture(self, usual_s: float) -> StepCapture:
        return Capture(self._trainer, usual_s)


class Capture(StepCapture):
    """:class:`StepCapture` of a job with ``bps.DistributedTrainer``, and what BytePS' own trace has of its steps."""

    operators = ("BytePSPushPull",)

    def finish(self) -> RankTrace:
        trace = super().finish()
        names = {f"byteps.gradient_{place}": number for place, number in self._number.items()}
        try:
            comm = read(_comm_file(since_ns=self._log.begin + self._clock_pair))
        except TraceError as error:
            raise RuntimeError(f"BytePS' own trace can't be read: {error}") from error
        return with_comm(trace, comm, -self._clock_pair, names)

    def _attach(self) -> None:
        # the trainer looks it up in this module at every call
        self._wrap(bps, "byteps_push_pull", self._pushing)

    def _describe(self, trace: RankTrace) -> None:
        meta = trace.meta
        meta.rank, meta.world_size = bps.rank(), bps.size()
        meta.framework, meta.source = _framework(), "byteps_mxnet"
        meta.extra[SETTINGS] = {
            "workers": bps.size(),
            "servers": int(os.environ.get("DMLC_NUM_SERVER", "1")),
            "partition_bytes": mxnet_partitions.job_bound(),
            "credit": int(os.environ.get("BYTEPS_SCHEDULING_CREDIT", "") or 0),
            "hash_fn": os.environ.get("BYTEPS_KEY_HASH_FN", "djb2"),
        }

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
