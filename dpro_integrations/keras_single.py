"""Keras in one process, with nothing to synchronise: which layers XLA compiles, and on which device each one runs.

Keras 2.15 and Keras 3 on TensorFlow. How a job gets a tuner is in ``keras``, layers are in ``keras_regions``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dpro.adapter import Exchange, Knob
from dpro.errors import DproError, PlanError
from dpro.plan import Plan
from dpro.settings import Settings
from dpro.trace.model import RankTrace
from dpro.trace.regions import Region
from dpro_integrations.exchange import Alone
from dpro_integrations.keras_adapter import KerasAdapter
from dpro_integrations.keras_clusters import time_regions
from dpro_integrations.keras_graph import Tracing
from dpro_integrations.keras_placement import devices_here, placed_by
from dpro_integrations.keras_scopes import LayerScopes
from dpro_integrations.keras_version import KERAS3, VERSION

#: Who started several processes says so in one of these.
_WORLDS = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "DMLC_NUM_WORKER", "WORLD_SIZE")


def place() -> tuple[int, int]:
    """Rank and number of ranks.

    Raises:
        DproError: it is a job of several processes, whose optimizer dpro does not know.
    """
    if any(os.environ.get(name, "1") not in ("", "0", "1") for name in _WORLDS) or "TF_CONFIG" in os.environ:
        raise DproError("the model was not compiled with an optimizer made by hvd. or bps.DistributedOptimizer")
    return 0, 1


def meet(tag: str) -> Exchange:
    """Nobody else."""
    return Alone()


def patience(settings: Settings) -> Settings:
    """Nobody waits."""
    return settings


def before_leaving(leaving: Callable[[], None]) -> Callable[[], None]:
    """Nobody is left alone by this rank."""
    return lambda: None


def started_with(plan: Plan | None) -> tuple[Plan | None, str]:
    """Nothing here is set when a job starts."""
    return plan, ""


class KerasSingleAdapter(KerasAdapter):
    """:class:`dpro.adapter.Adapter` for one compiled model; arguments as for :class:`KerasAdapter`."""

    name = "keras"

    def __init__(self, tracing: Tracing, exchange: Exchange) -> None:
        # Keras 2 has a layer's own code converted by AutoGraph, which does not look through what is put around it
        self._scopes = LayerScopes(tracing.model) if KERAS3 else None
        try:
            super().__init__(tracing, exchange)
        except BaseException:
            self._let_layers_go()
            raise

    def close(self) -> None:
        self._let_layers_go()
        super().close()

    def capabilities(self) -> set[Knob]:
        if self.why_not():
            return set()
        return self._layer_knobs() | ({Knob.PLACEMENT} if len(devices_here()) > 1 else set())

    def why_not(self) -> str:
        if not tf.test.is_built_with_xla():
            return "this TensorFlow was built without XLA"
        if int(getattr(self._model.optimizer, "gradient_accumulation_steps", None) or 1) > 1:
            return "the optimizer accumulates gradients: its steps are not alike"
        return self._draws_from_a_seed()

    def obstacle(self) -> str:
        self._let_layers_go()
        return super().obstacle()

    def stop_capture(self) -> RankTrace:
        trace = super().stop_capture()
        trace.meta.rank, trace.meta.world_size = 0, 1
        trace.warnings = [line for line in trace.warnings if not line.startswith("messages on the wire")]
        if self._scopes is not None:
            renamed, dataflow = self._scopes.renamed, trace.meta.extra["dataflow"]
            trace.names = [renamed(name) for name in trace.names]
            trace.meta.extra["dataflow"] = {renamed(op): [*map(renamed, inputs)] for op, inputs in dataflow.items()}
        return trace

    def time_regions(self, trace: RankTrace, budget_s: float) -> list[Region]:
        return time_regions(self._model, self._step.regions, trace, budget_s) if self.capabilities() else []

    def prepare(self, plan: Plan) -> None:
        self._check_fit(plan, {"compile_regions", "recompute", "placement", "order"})
        if not any(plan.settings().values()):
            raise PlanError("the plan has none of compile_regions, recompute, placement, order")
        placed = placed_by(plan)
        if any(placed) and getattr(self._model, "jit_compile", False):
            raise PlanError("the whole step is one XLA program, on one device (compile without jit_compile)")
        regions, blocks = plan.compile_regions or [], plan.recompute or ()
        self._step.make(plan.sha256, None, regions, super()._reduced(), blocks, placed)

    def apply(self, plan: Plan) -> None:
        self.prepare(plan)
        self._step.set(plan.sha256)

    # -- parts ---------------------------------------------------------------------------------

    def _let_layers_go(self) -> None:
        if self._scopes is not None:
            self._scopes.stop()

    def _obstacle(self) -> str:
        return ""

    def _framework(self) -> str:
        return f"tensorflow {tf.__version__}, keras {VERSION}"

    def _reduced(self) -> list[Any]:
        return []

    def _members(self) -> list[list[int]]:
        return []

    def _seen(self) -> bool:
        return bool(self._tracing.graphs)


adapter = KerasSingleAdapter
