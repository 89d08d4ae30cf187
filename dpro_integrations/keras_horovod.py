"""The adapter for one Keras model that is trained with ``hvd.DistributedOptimizer``.

Groups are in ``keras_groups``, capture in ``keras_capture``, what is seen while the step is traced in ``keras_graph``.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from typing import Any

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.util import split_list
from horovod.tensorflow import mpi_ops

from dpro.adapter import Exchange, Knob
from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.trace.model import RankTrace, Tensor
from dpro.trace.regions import Region
from dpro_integrations.horovod_settings import library_settings
from dpro_integrations.horovod_start import switched_on
from dpro_integrations.host_load import StepCpu
from dpro_integrations.keras_capture import Capture, warm_up
from dpro_integrations.keras_clusters import time_regions
from dpro_integrations.keras_graph import Tracing, name_of, nodes_of, seeded_in, traced_functions
from dpro_integrations.keras_groups import TrainStep, settings_of, tensor_bytes

_SAMPLES = 64


class KerasHorovodAdapter:
    """:class:`dpro.adapter.Adapter` for one compiled model.

    Args:
        tracing: of the model, from before its first step where that is possible. Where the step was traced already, it
            is traced once more here, so that it can be looked at.
        exchange: how this job's ranks agree.
    """

    name = "horovod_keras"

    def __init__(self, tracing: Tracing, exchange: Exchange) -> None:
        self.exchange = exchange
        self._tracing = tracing
        self._model, self._optimizer = tracing.model, tracing.optimizer
        self._step = TrainStep(self._model, self._optimizer)
        self._former: Any = None
        self._seeded = ""
        self._restarted = False
        self._place = hvd.rank(), hvd.size()
        self._seen_at = time.monotonic()
        self._longest_s = 0.0
        self._cpu = StepCpu()
        self._capture: Capture | None = None
        self._compiled: Any = None  # the train function that the job had after its first step
        self._unpatch = self._watch_init()
        if not tracing.gradients:
            self._trace_again()
        warm_up()

    # -- what can be done here -----------------------------------------------------------------

    def capabilities(self) -> set[Knob]:
        if self.why_not():
            return set()
        return {Knob.GROUPS, Knob.CYCLE_TIME} | ({Knob.COMPILE_REGIONS} if tf.test.is_built_with_xla() else set())

    def why_not(self) -> str:
        told = settings_of(self._tracing.recorder.original)
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
        if seeded := self._seeded or next((graph.seeded for graph in self._tracing.graphs if graph.seeded), ""):
            return (
                f"{seeded} draws random numbers from a seed, anew from the first with another train function "
                "(not so after tf.keras.backend.experimental.enable_tf_random_generator())"
            )
        for graph in self._tracing.graphs:
            if graph.gathers() or len(graph.reductions()) != len(self._reduced()):
                return "the step reduces more than the gradients of one call of the optimizer"
        return ""

    def obstacle(self) -> str:
        now = time.monotonic()
        self._longest_s, self._seen_at = max(self._longest_s, now - self._seen_at), now
        self._tracing.stop()
        self._cpu.end()
        self._cpu.begin()
        if not hvd.is_initialized() or self._restarted:
            return "Horovod was shut down or started anew"
        if (hvd.rank(), hvd.size()) != self._place:
            return "the job's ranks have changed"
        function = self._model.train_function
        if self._compiled is None:
            self._compiled = function
        ours = self._step.is_ours() if self._step.changed else function is self._compiled
        return "" if ours else "the model was compiled anew"

    def fingerprint(self) -> dict[str, str]:
        variables = self._model.trainable_variables
        shapes = [(name_of(v), tuple(v.shape.as_list()), v.dtype.name) for v in variables]
        return {
            "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            "world_size": str(self.exchange.world_size),
            "framework": f"horovod {horovod.__version__}, tensorflow {tf.__version__}",
        }

    # -- capture -------------------------------------------------------------------------------

    def start_capture(self) -> None:
        self._tracing.stop()
        if not self._tracing.gradients:
            why = f": {self._seeded} draws random numbers from a seed" if self._seeded else ""
            raise RuntimeError(f"the train step was traced before dpro could look on{why}")
        self._capture = Capture(self._longest_s, self._cpu)

    def mark_step(self) -> None:
        if self._capture is not None:
            self._capture.mark_step()

    def stop_capture(self) -> RankTrace:
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("no capture is running")
        tensors = []
        for variable in self._reduced():
            dtype, nbytes = tensor_bytes(variable, self._tracing.recorder.original)
            tensors.append(Tensor(name_of(variable), tuple(variable.shape.as_list()), dtype, nbytes))
        trace = capture.finish(self._tracing.graphs, tensors, self._members())
        trace.meta.extra["graph_info"] = library_settings()
        trace.meta.rank, trace.meta.world_size = hvd.rank(), hvd.size()
        trace.meta.framework, trace.meta.source = self.fingerprint()["framework"], self.name
        return trace

    def abort_capture(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.abort()

    def time_regions(self, trace: RankTrace, budget_s: float) -> list[Region]:
        if Knob.COMPILE_REGIONS not in self.capabilities():
            return []
        return time_regions(self._model, self._step.regions, trace, budget_s)

    # -- settings ------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> None:
        fitting = self.fingerprint()
        for key, value in plan.fingerprint.items():
            if fitting.get(key) != value:
                raise PlanError(f"the plan is for another job: {key} is {fitting.get(key)}, the plan's {value}")
        if reason := self.why_not():
            raise PlanError(f"the train step can't be changed here: {reason}")
        foreign = sorted(set(plan.settings()) - {"tensor_groups", "compile_regions"})
        if foreign:
            raise PlanError(f"nothing is known for {foreign[0]!r} that dpro changes in a running Keras job")
        if not plan.tensor_groups and not plan.compile_regions:
            raise PlanError("the plan has neither tensor_groups nor compile_regions")
        reduced = self._reduced()
        if not reduced:
            raise PlanError("the train step was traced before dpro could look on")
        known = {name_of(variable): variable for variable in reduced}
        for name in (name for group in plan.tensor_groups or () for name in group):
            if name not in known:
                raise PlanError(f"the train step reduces no gradient of {name!r}")
        groups = [[known[name] for name in group] for group in plan.tensor_groups or ()]
        self._step.make(plan.sha256, groups, plan.compile_regions or [], reduced)

    def apply(self, plan: Plan) -> None:
        self.prepare(plan)
        self._step.set(plan.sha256)

    def revert(self) -> None:
        self._step.clear()

    def checksum(self) -> str:
        """Over up to 64 values of every variable: cheap, and any lost update moves it."""
        digest = hashlib.sha256()
        for variable in self._model.trainable_variables:
            flat = tf.reshape(variable, [-1])
            picked = flat[:: max(1, int(flat.shape[0]) // _SAMPLES)][:_SAMPLES]
            digest.update(tf.cast(picked, tf.float32).numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        self.abort_capture()
        self._tracing.stop()
        self._unpatch()
        self._step.forget()
        former, self._former = self._former, None
        if former is not None and not self._step.changed and self._model.train_function is self._compiled:
            self._model.train_function, self._model.train_tf_function = former

    # -- parts ---------------------------------------------------------------------------------

    def _reduced(self) -> list[Any]:
        """The variables whose gradients are reduced, in Horovod's order."""
        return [gradient.variable for gradient in self._tracing.gradients if gradient.kind == "dense"]

    def _members(self) -> list[list[int]]:
        """Numbers, among :meth:`_reduced`, of what each of Horovod's reductions takes, in its order."""
        number = {id(variable): i for i, variable in enumerate(self._reduced())}
        given = [gradient.variable for gradient in self._tracing.gradients if gradient.kind != "none"]
        groups = settings_of(self._tracing.recorder.original).get("groups")
        if isinstance(groups, list):
            named = [{variable.name for variable in group} for group in groups]
            split = [[v for v in given if v.name in names] for names in named]
            split += [[v] for v in given if not any(v.name in names for names in named)]
        elif groups:
            split = split_list(given, groups)
        else:
            split = [[variable] for variable in given]
        return [[number[id(variable)] for variable in group if id(variable) in number] for group in split]

    def _trace_again(self) -> None:
        """Of a model that has made steps already. Not where random numbers would begin anew by it."""
        model = self._model
        made = traced_functions(model.train_function)
        if not made:
            return  # its first step is still to come
        self._seeded = next(filter(None, (seeded_in(nodes_of(f.graph.as_graph_def())) for f in made)), "")
        if self._seeded:
            return
        self._former = model.train_function, model.train_tf_function
        try:
            function = model.make_train_function(force=True)
            arguments, keywords = made[0].structured_input_signature
            function.get_concrete_function(*arguments, **keywords)
        except Exception:
            model.train_function, model.train_tf_function = self._former
            self._former = None
            raise
        finally:
            self._tracing.recorder.remove()

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
