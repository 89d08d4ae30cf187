"""Horovod for MXNet: the adapter for one ``DistributedTrainer``, and its capture.

How a job gets a tuner is in ``mxnet``; groups are in ``mxnet_groups``, agreement between ranks in ``horovod_exchange``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import horovod
import horovod.mxnet as hvd
import mxnet as mx
from horovod.mxnet import mpi_ops

from dpro.adapter import Exchange, Knob
from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.trace.model import RankTrace
from dpro_integrations import horovod_exchange
from dpro_integrations.horovod_settings import library_settings, patient
from dpro_integrations.horovod_start import started_with, switched_on
from dpro_integrations.host_load import StepCpu
from dpro_integrations.mxnet_adapter import GluonAdapter
from dpro_integrations.mxnet_capture import StepCapture
from dpro_integrations.mxnet_groups import Groups, reduces_as_stock

__all__ = ["MODULES", "adapter", "meet", "patience", "place", "started_with"]
#: Where a job finds ``shutdown``, the one that it calls first.
MODULES: tuple[ModuleType, ...] = (hvd, mpi_ops)
_BETWEEN = re.compile(r"(\d+):(\d+)$")


def place() -> tuple[int, int]:
    """Rank and number of ranks, as :func:`dpro_integrations.horovod_exchange.place`."""
    return horovod_exchange.place(hvd)


def meet(tag: str) -> Exchange:
    """The other ranks, as :func:`dpro_integrations.horovod_exchange.meet`."""
    return horovod_exchange.meet(hvd, f"mxnet-{tag}")


#: Settings with which no rank waits for so long that the library ends the job.
patience = patient


class HorovodMXNetAdapter(GluonAdapter):
    """:class:`dpro.adapter.Adapter` for one ``hvd.DistributedTrainer``."""

    name = "horovod_mxnet"

    def __init__(self, trainer: Any, exchange: Exchange) -> None:
        super().__init__(trainer, exchange)
        self._groups = Groups(trainer)
        self._place = hvd.rank(), hvd.size()
        self._cpu = StepCpu()

    def capabilities(self) -> set[Knob]:
        return set() if self.why_not() else {Knob.GROUPS, Knob.CYCLE_TIME}

    def why_not(self) -> str:
        trainer = self._trainer
        if trainer._num_groups > 0:
            return "the job has groups of its own"
        if not self._groups.in_force and not reduces_as_stock(trainer):
            return "the job's trainer reduces gradients in a way of its own"
        if trainer._process_set.process_set_id != 0:
            return "the trainer spans only a process set"
        if any(p._stype != "default" or p._grad_stype != "default" for p in trainer._params):
            return "there are sparse gradients, which can't be grouped"
        if switched_on("HOROVOD_AUTOTUNE"):
            return "HOROVOD_AUTOTUNE changes settings meanwhile"
        return ""

    def obstacle(self) -> str:
        self._cpu.end()
        self._cpu.begin()
        if not hvd.is_initialized():
            return "Horovod was shut down"
        if (hvd.rank(), hvd.size()) != self._place:
            return "the job's ranks have changed"
        return super().obstacle()

    def prepare(self, plan: Plan) -> None:
        self._check_fit(plan, {"tensor_groups"})
        if reason := self.why_not():
            raise PlanError(f"groups can't be changed here: {reason}")
        if not plan.tensor_groups:
            raise PlanError("the plan has no tensor_groups")
        known = self._places()
        for name in (name for group in plan.tensor_groups for name in group):
            if name not in known:
                raise PlanError(f"the trainer has no parameter {name!r}")

    def apply(self, plan: Plan) -> None:
        self.prepare(plan)
        known = self._places()
        assert plan.tensor_groups is not None
        self._groups.set([[known[name] for name in group] for group in plan.tensor_groups])

    def revert(self) -> None:
        self._groups.clear()

    def _framework(self) -> str:
        return f"horovod {horovod.__version__}, mxnet {mx.__version__}"

    def _new_capture(self, usual_s: float) -> StepCapture:
        return Capture(self._trainer, usual_s, self._cpu)


adapter = HorovodMXNetAdapter


class Capture(StepCapture):
    """:class:`StepCapture` of a job with ``hvd.DistributedTrainer``."""

    operators = ("horovod_allreduce",)

    def _attach(self) -> None:
        # the trainer, and dpro's groups, look them up in this module at every call
        for name in ("allreduce_", "allreduce"):
            self._wrap(hvd, name, self._single)
        for name in ("grouped_allreduce_", "grouped_allreduce"):
            self._wrap(hvd, name, self._grouped)

    def _describe(self, trace: RankTrace) -> None:
        meta = trace.meta
        meta.rank, meta.world_size = hvd.rank(), hvd.size()
        meta.framework = f"horovod {horovod.__version__}, mxnet {mx.__version__}"
        meta.source = "horovod_mxnet"
        meta.extra["graph_info"] = library_settings()

    def _single(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def allreduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            numbers = self._numbers([tensor], kwargs.get("name"))
            return self._hand_in([tensor], numbers, lambda: original(tensor, *args, **kwargs))

        return allreduce

    def _grouped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grouped_allreduce(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not tensors:
                return original(tensors, *args, **kwargs)
            numbers = self._numbers(tensors, kwargs.get("name"))
            return self._hand_in(list(tensors), numbers, lambda: original(tensors, *args, **kwargs))

        return grouped_allreduce

    def _numbers(self, tensors: list[Any], name: Any) -> tuple[int, ...]:
        """Of which gradients ``tensors`` are; () where they are none, or not all known."""
        found = [self._of_array[id(tensor)] for tensor in tensors if id(tensor) in self._of_array]
        if len(found) == len(tensors):
            return tuple(found)
        # compressed: a copy, whose name says which place in the trainer it has, or from where to where its group goes
        named = str(name or "").removeprefix(self._trainer._prefix)
        if len(tensors) == 1 and named.isdecimal():
            return (self._number[int(named)],) if int(named) in self._number else ()
        if (between := _BETWEEN.match(named)) is None:
            return ()
        inside = [n for place, n in self._number.items() if int(between[1]) <= place <= int(between[2])]
        shapes = [tuple(self._parameters[n].shape) for n in inside]
        return tuple(inside) if shapes == [tuple(tensor.shape) for tensor in tensors] else ()
