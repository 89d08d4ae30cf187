"""What the adapters of Keras jobs share, whichever library synchronises: a capture's way, plan against job."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import tensorflow as tf

from dpro.adapter import Exchange, Knob
from dpro.errors import PlanError
from dpro.meeting import describe
from dpro.plan import Plan
from dpro.trace.model import RankTrace, Tensor
from dpro_integrations.host_load import StepCpu
from dpro_integrations.keras_capture import Capture, warm_up
from dpro_integrations.keras_graph import StepGraph, Tracing, nodes_of, seeded_in, traced_functions
from dpro_integrations.keras_memory import Meter
from dpro_integrations.keras_retrace import TrainStep
from dpro_integrations.keras_units import units
from dpro_integrations.keras_version import dtype_of, name_of, shape_of, traced_step

_SAMPLES = 64


class KerasAdapter:
    """Base of :class:`dpro.adapter.Adapter` implementations.

    Args:
        tracing: of the model, from before its first step where that is possible. Where the step was traced already, it
            is traced once more here, so that it can be looked at.
        exchange: how this job's ranks agree.
    """

    name = ""

    def __init__(self, tracing: Tracing, exchange: Exchange) -> None:
        self.exchange = exchange
        self._tracing = tracing
        self._model, self._optimizer = tracing.model, tracing.optimizer
        self._step = TrainStep(self._model, self._optimizer)
        self._former: Any = None
        self._seeded = ""
        self._seen_at = time.monotonic()
        self._longest_s = 0.0
        self._cpu = StepCpu()
        self._capture: Capture | None = None
        self._memory = False
        self._meter: Meter | None = None
        self._unmetered = ""
        self._compiled: Any = None  # the train function that the job had after its first step
        if not self._seen():
            self._trace_again()
        warm_up()

    # -- for subclasses ------------------------------------------------------------------------

    def capabilities(self) -> set[Knob]:
        """See :class:`dpro.adapter.Adapter`."""
        raise NotImplementedError

    def why_not(self) -> str:
        """See :class:`dpro.adapter.Adapter`."""
        raise NotImplementedError

    def _framework(self) -> str:
        """Names and versions, for a fingerprint."""
        raise NotImplementedError

    def _obstacle(self) -> str:
        """What the library has against going on; "" nothing."""
        raise NotImplementedError

    def _tensor(self, variable: Any) -> tuple[str, int]:
        """dtype and bytes of a variable's gradient on the wire."""
        raise NotImplementedError

    def _members(self) -> list[list[int]]:
        """Numbers, among :meth:`_reduced`, of what each of the library's reductions takes, in its order."""
        raise NotImplementedError

    def _graphs(self) -> list[StepGraph]:
        """What may run while a capture does."""
        return self._tracing.graphs

    # -- the contract, as far as it is the same ------------------------------------------------

    def obstacle(self) -> str:
        now = time.monotonic()
        self._longest_s, self._seen_at = max(self._longest_s, now - self._seen_at), now
        self._tracing.stop()
        self._cpu.end()
        self._cpu.begin()
        if reason := self._obstacle():
            return reason
        function = self._model.train_function
        if self._compiled is None:
            self._compiled = function
        ours = self._step.is_ours() if self._step.changed else function is self._compiled
        return "" if ours else "the model was compiled anew"

    def fingerprint(self) -> dict[str, str]:
        variables = self._model.trainable_variables
        shapes = [(name_of(v), tuple(shape_of(v)), dtype_of(v)) for v in variables]
        return {
            "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            "world_size": str(self.exchange.world_size),
            "framework": self._framework(),
        }

    def start_rehearsal(self) -> None:
        """See :class:`dpro.adapter.Rehearses`."""
        self._tracing.stop()
        self._capture = Capture(self._longest_s, self._cpu)

    def start_capture(self) -> None:
        self._tracing.stop()
        if not self._seen():
            why = f": {self._seeded} draws random numbers from a seed" if self._seeded else ""
            raise RuntimeError(f"the train step was traced before dpro could look on{why}")
        self._meter = self._new_meter()
        self._capture = Capture(self._longest_s, self._cpu, None if self._meter is None else self._meter.events)

    def meter_memory(self) -> None:
        """See :class:`dpro.adapter.MemoryMeter`."""
        self._memory = True

    def mark_step(self) -> None:
        if self._capture is not None:
            self._capture.mark_step()
        if self._meter is not None:
            self._meter.begin()

    def stop_capture(self) -> RankTrace:
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("no capture is running")
        tensors = []
        for variable in self._reduced():
            dtype, nbytes = self._tensor(variable)
            tensors.append(Tensor(name_of(variable), tuple(size or 0 for size in shape_of(variable)), dtype, nbytes))
        trace = capture.finish(self._graphs(), tensors, self._members(), self._names())
        trace.meta.framework, trace.meta.source = self._framework(), self.name
        return self._with_memory(trace)

    def abort_capture(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.abort()
        self._no_meter()

    def revert(self) -> None:
        self._step.clear()

    def checksum(self) -> str:
        """Over up to 64 values of every variable: cheap, and any lost update moves it."""
        digest = hashlib.sha256()
        for variable in self._model.trainable_variables:
            flat = tf.reshape(tf.convert_to_tensor(variable), [-1])
            picked = flat[:: max(1, int(flat.shape[0]) // _SAMPLES)][:_SAMPLES]
            digest.update(tf.cast(picked, tf.float32).numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        self.abort_capture()
        self._tracing.stop()
        self._step.forget()
        former, self._former = self._former, None
        if former is not None and not self._step.changed and self._model.train_function is self._compiled:
            self._put_back(former)

    # -- parts ---------------------------------------------------------------------------------

    def _new_meter(self) -> Meter | None:
        """For a capture that begins, where memory is asked for and can be told; else it is remembered why not."""
        if not self._memory:
            return None
        try:
            if Knob.RECOMPUTE not in self.capabilities():
                raise RuntimeError("there is nothing here that would make the job fit")
            meter = Meter(self._model)
            meter.begin()
            return meter
        except Exception as error:  # there are other things to tune
            self._unmetered = describe(error)
            return None

    def _with_memory(self, trace: RankTrace) -> RankTrace:
        """``trace`` with what the meter saw, or a line that it did not."""
        meter = self._meter
        self._no_meter()
        try:
            trace = trace if meter is None else meter.add_to(trace)
        except Exception as error:  # a graph that is like none that was seen
            self._unmetered = describe(error)
        if self._memory and self._unmetered:
            trace.warnings.append(f"no memory: {self._unmetered}")
        return trace

    def _no_meter(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.detach()

    def _layer_knobs(self) -> set[Knob]:
        """What can be done with layers, whoever synchronises."""
        compiled = {Knob.COMPILE_REGIONS} if tf.test.is_built_with_xla() else set()
        return compiled | ({Knob.RECOMPUTE} if units(self._model) else set())

    def _put_back(self, former: tuple[Any, Any]) -> None:
        self._model.train_function = former[0]
        if former[1] is not None:
            self._model.train_tf_function = former[1]

    def _seen(self) -> bool:
        """Whether dpro has looked on while the train step was traced."""
        return bool(self._tracing.gradients)

    def _names(self) -> list[str]:
        """The library's for the gradients, where its ops go by them."""
        return []

    def _draws_from_a_seed(self) -> str:
        """One clause, where the train step can't be traced anew for that; "" it can."""
        if seeded := self._seeded or next((graph.seeded for graph in self._tracing.graphs if graph.seeded), ""):
            return (
                f"{seeded} draws random numbers from a seed, anew from the first with another train function "
                "(not so after tf.keras.backend.experimental.enable_tf_random_generator())"
            )
        return ""

    def _check_fit(self, plan: Plan, settings: set[str]) -> list[Any]:
        """The variables that are reduced. Refuses a plan of another job, or one with other than ``settings``.

        Raises:
            PlanError: model, world or framework differ; a setting that can't be changed here.
        """
        fitting = self.fingerprint()
        for key, value in plan.fingerprint.items():
            if fitting.get(key) != value:
                raise PlanError(f"the plan is for another job: {key} is {fitting.get(key)}, the plan's {value}")
        if reason := self.why_not():
            raise PlanError(f"the train step can't be changed here: {reason}")
        foreign = sorted(set(plan.settings()) - settings)
        if foreign:
            raise PlanError(f"nothing is known for {foreign[0]!r} that dpro changes in a running Keras job")
        if plan.recompute and plan.compile_regions:
            raise PlanError("layers are compiled or recomputed, not both in one plan")
        if not self._seen():
            raise PlanError("the train step was traced before dpro could look on")
        return self._reduced()

    def _reduced(self) -> list[Any]:
        """The variables whose gradients are reduced, in the library's order."""
        return [gradient.variable for gradient in self._tracing.gradients if gradient.kind == "dense"]

    def _trace_again(self) -> None:
        """Of a model that has made steps already. Not where random numbers would begin anew by it."""
        model = self._model
        made = traced_functions(model.train_function)
        if not made:
            return  # its first step is still to come
        self._seeded = next(filter(None, (seeded_in(nodes_of(f.graph.as_graph_def())) for f in made)), "")
        if self._seeded:
            return
        self._former = model.train_function, getattr(model, "train_tf_function", None)
        try:
            model.make_train_function(force=True)
            arguments, keywords = made[0].structured_input_signature
            traced_step(model.train_function).get_concrete_function(*arguments, **keywords)
            self._compiled = model.train_function
        except Exception:
            self._put_back(self._former)
            self._former = None
            raise
        finally:
            self._tracing.recorder.remove()
