"""Horovod for Keras: the adapter for one model that is trained with ``hvd.DistributedOptimizer``.

How a job gets a tuner is in ``keras``; groups are in ``keras_groups``, capture in ``keras_capture``, what is seen while
the step is traced in ``keras_graph``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.util import split_list
from horovod.tensorflow import mpi_ops

from dpro.adapter import Exchange, Knob
from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.trace.model import RankTrace
from dpro.trace.regions import Region
from dpro_integrations import horovod_exchange
from dpro_integrations.base import before_call
from dpro_integrations.horovod_settings import library_settings, patient
from dpro_integrations.horovod_start import started_with, switched_on
from dpro_integrations.keras_adapter import KerasAdapter
from dpro_integrations.keras_clusters import time_regions
from dpro_integrations.keras_graph import Tracing
from dpro_integrations.keras_groups import grouped, settings_of, split_by_kind, tensor_bytes
from dpro_integrations.keras_version import name_of


def place() -> tuple[int, int]:
    """Rank and number of ranks, as :func:`dpro_integrations.horovod_exchange.place`."""
    return horovod_exchange.place(hvd)


def meet(tag: str) -> Exchange:
    """The other ranks, as :func:`dpro_integrations.horovod_exchange.meet`."""
    return horovod_exchange.meet(hvd, f"keras-{tag}")


__all__ = ["adapter", "before_leaving", "meet", "patience", "place", "started_with"]
#: Settings with which no rank waits for so long that the library ends the job.
patience = patient


def before_leaving(leaving: Callable[[], None]) -> Callable[[], None]:
    """Have ``leaving`` called before the job's ``hvd.join()``. Returns the undo.

    A rank's data have ended then, and the steps of other ranks may go on without it.
    """
    return before_call("join", (mpi_ops, hvd), leaving)


class KerasHorovodAdapter(KerasAdapter):
    """:class:`dpro.adapter.Adapter` for one compiled model; arguments as for :class:`KerasAdapter`."""

    name = "horovod_keras"

    def __init__(self, tracing: Tracing, exchange: Exchange) -> None:
        self._restarted = False
        self._place = hvd.rank(), hvd.size()
        super().__init__(tracing, exchange)
        self._unpatch = self._watch_init()  # last: whatever raises before leaves no patch

    # -- what can be done here -----------------------------------------------------------------

    def capabilities(self) -> set[Knob]:
        if self.why_not():
            return set()
        return {Knob.GROUPS, Knob.CYCLE_TIME} | self._layer_knobs()

    def why_not(self) -> str:
        told = settings_of(self._own_reduction())
        names = Counter(map(name_of, self._model.trainable_variables))
        if not told:
            return "this Horovod keeps its settings elsewhere than dpro knows"
        if told["groups"] is not None:
            return "the job has groups of its own"
        if told["process_set"].process_set_id != 0:
            return "the optimizer spans only a process set"
        if switched_on("HOROVOD_AUTOTUNE"):
            return "HOROVOD_AUTOTUNE changes settings meanwhile"
        if names and max(names.values()) > 1:
            return f"several variables are called {names.most_common(1)[0][0]!r}, and Horovod's groups go by names"
        if any(gradient.kind == "sparse" for gradient in self._tracing.gradients):
            return "there are sparse gradients, which can't be grouped (sparse_as_dense=True makes them dense)"
        if seeded := self._draws_from_a_seed():
            return seeded
        for graph in self._tracing.graphs:
            if graph.gathers() or len(graph.reductions()) != len(self._reduced()):
                return "the step reduces more than the gradients of one call of the optimizer"
        return ""

    def stop_capture(self) -> RankTrace:
        trace = super().stop_capture()
        trace.meta.extra["graph_info"] = library_settings()
        trace.meta.rank, trace.meta.world_size = hvd.rank(), hvd.size()
        return trace

    def time_regions(self, trace: RankTrace, budget_s: float) -> list[Region]:
        if Knob.COMPILE_REGIONS not in self.capabilities():
            return []
        return time_regions(self._model, self._step.regions, trace, budget_s)

    # -- settings ------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> None:
        reduced = self._check_fit(plan, {"tensor_groups", "compile_regions", "recompute"})
        if not plan.tensor_groups and not plan.compile_regions and not plan.recompute:
            raise PlanError("the plan has none of tensor_groups, compile_regions, recompute")
        known = {name_of(variable): variable for variable in reduced}
        for name in (name for group in plan.tensor_groups or () for name in group):
            if name not in known:
                raise PlanError(f"the train step reduces no gradient of {name!r}")
        groups = [[known[name] for name in group] for group in plan.tensor_groups or ()]
        alike = [kind for group in groups for kind in split_by_kind(group)]
        reducing = functools.partial(grouped, groups=alike) if alike else None
        self._step.make(plan.sha256, reducing, plan.compile_regions or [], reduced, plan.recompute or ())

    def apply(self, plan: Plan) -> None:
        self.prepare(plan)
        self._step.set(plan.sha256)

    def close(self) -> None:
        self._unpatch()
        super().close()

    # -- parts ---------------------------------------------------------------------------------

    def _obstacle(self) -> str:
        if not hvd.is_initialized() or self._restarted:
            return "Horovod was shut down or started anew"
        return "the job's ranks have changed" if (hvd.rank(), hvd.size()) != self._place else ""

    def _framework(self) -> str:
        return f"horovod {horovod.__version__}, tensorflow {tf.__version__}"

    def _tensor(self, variable: Any) -> tuple[str, int]:
        return tensor_bytes(variable, self._own_reduction())

    def _own_reduction(self) -> Callable[..., Any]:
        original: Callable[..., Any] = self._tracing.recorder.original
        return original

    def _members(self) -> list[list[int]]:
        number = {id(variable): i for i, variable in enumerate(self._reduced())}
        given = [gradient.variable for gradient in self._tracing.gradients if gradient.kind != "none"]
        groups = settings_of(self._own_reduction()).get("groups")
        if isinstance(groups, list):
            named = [{variable.name for variable in group} for group in groups]
            split = [[v for v in given if v.name in names] for names in named]
            split += [[v] for v in given if not any(v.name in names for names in named)]
        elif groups:
            split = split_list(given, groups)
        else:
            split = [[variable] for variable in given]
        return [[number[id(variable)] for variable in group if id(variable) in number] for group in split]

    def _watch_init(self) -> Any:
        """Notes a second ``hvd.init()``. Returns the undo."""
        basics = mpi_ops._basics
        original = basics.init

        def init(*args: Any, **kwargs: Any) -> Any:
            self._restarted = True
            return original(*args, **kwargs)

        def undo() -> None:
            if vars(basics).get("init") is init:
                del basics.init

        basics.init = init
        return undo


adapter = KerasHorovodAdapter
