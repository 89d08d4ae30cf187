"""BytePS for MXNet: the adapter for one ``DistributedTrainer``.

How a job gets a tuner is in ``mxnet``; the change of partitions is in ``mxnet_partitions``, agreement between ranks in
``byteps_exchange``.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import byteps.mxnet as bps
import mxnet as mx
import numpy as np
from byteps.mxnet.compression import FP16Compressor

from dpro.adapter import Exchange, Knob
from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.trace.byteps import MAX_PARTS, PAGE_BYTES, cut
from dpro_integrations import mxnet_partitions
from dpro_integrations.mxnet_adapter import GluonAdapter
from dpro_integrations.mxnet_partitions import Partitions, reduces_as_stock
from dpro_integrations.mxnet_steps import reduced


class BytePSMXNetAdapter(GluonAdapter):
    """:class:`dpro.adapter.Adapter` for one ``bps.DistributedTrainer``."""

    name = "byteps_mxnet"

    def __init__(self, trainer: Any, exchange: Exchange) -> None:
        super().__init__(trainer, exchange)
        self._partitions = Partitions(trainer)
        self._place = bps.rank(), bps.size()

    def capabilities(self) -> set[Knob]:
        return set() if self.why_not() else {Knob.PARTITIONS}

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
        return mxnet_partitions.why_not()

    def obstacle(self) -> str:
        if (bps.rank(), bps.size()) != self._place:
            return "the job's ranks have changed"
        return super().obstacle()

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
        return f"byteps {version('byteps')}, mxnet {mx.__version__}"
