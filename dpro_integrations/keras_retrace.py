"""Another train step for a Keras model, traced with another reduction, or with layers compiled, recomputed or placed;
and the job's own again.

TensorFlow bakes the function that reduces the gradients into the traced train step. So the step is made anew by Keras'
``make_train_function(force=True)``, and exchanged between two steps; ``fit`` looks its train function up at every one
of them. The former one is kept and put back as it was. Variables (weights, the optimizer's state, metrics, the step
that a learning-rate schedule counts) belong to none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dpro.errors import PlanError
from dpro_integrations.keras_graph import Recorder, reduction, set_reduction, traced_functions
from dpro_integrations.keras_placement import Placed, Placement
from dpro_integrations.keras_recompute import Recomputed
from dpro_integrations.keras_regions import Regions
from dpro_integrations.keras_version import traced_step

#: From the job's own reduction (see :func:`~dpro_integrations.keras_graph.reduction`) to another one.
Reducing = Callable[[Any], Any]


class _Step(NamedTuple):
    """What a model needs to make steps."""

    reduction: Any
    function: Any
    tf_function: Any
    regions: tuple[str, ...]  # layers that are compiled when it is traced
    blocks: tuple[str, ...]  # that are recomputed
    placed: Placed


class TrainStep:
    """The train step of one model: the job's own, and those that were made for plans.

    Args:
        model: compiled; its step has been traced.
        optimizer: the one in it that a ``DistributedOptimizer`` made.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        #: its compiled layers
        self.regions = Regions(model)
        self._recomputed = Recomputed(model)
        self._placement = Placement(model)
        self._own: _Step | None = None
        self._made: dict[str, _Step] = {}
        self._in_force: _Step | None = None

    @property
    def changed(self) -> bool:
        """Whether another than the job's own is in force."""
        return self._in_force is not None

    def is_ours(self) -> bool:
        """Whether the model still has the function that was put in force last."""
        return self._in_force is None or self._model.train_function is self._in_force.function

    def make(
        self,
        key: str,
        reducing: Reducing | None,
        regions: list[str],
        reduced: list[Any],
        blocks: Sequence[str] = (),
        placed: Placed | None = None,
    ) -> None:
        """Trace the step with another reduction, compiled ``regions``, recomputed ``blocks`` and ``placed`` layers,
        under ``key``, and change nothing.

        Args:
            reducing: makes of the job's own reduction another one; None: it stays.
            regions: names of layers.
            reduced: the variables whose gradients the present step reduces, in order.
            blocks: names, as in ``plan.recompute``.
            placed: None: no layer is.

        Raises:
            PlanError: traced anew the step would reduce others, XLA does not compile a region, a block must not run
                twice, or a layer is not there to be placed.
            Exception: what the model's own code raises when it is traced.
        """
        if key in self._made:
            return
        present = self._present()
        function = (self._own or present).reduction
        if reducing is not None:
            function = reducing(function)
        set_reduction(self._optimizer, function)
        recorder = Recorder(self._optimizer)
        try:
            self.regions.set(tuple(regions))
            self._recomputed.set(tuple(blocks))
            self._placement.set(placed or Placed())
            self._trace(present)
            self._recomputed.check()
            self._placement.check()
            found = [gradient.variable for gradient in recorder.gradients if gradient.kind == "dense"]
            if [id(variable) for variable in found] != [id(variable) for variable in reduced]:
                raise PlanError("traced anew, the train step reduces other gradients (layers frozen meanwhile?)")
            self.regions.try_out()
            recorder.remove()
            self._made[key] = self._present()
        finally:
            recorder.remove()
            self._put(present)

    def set(self, key: str) -> None:
        """Put in force what was made under ``key``."""
        if self._own is None:
            self._own = self._present()
        self._in_force = self._made[key]
        self._put(self._in_force)

    def clear(self) -> None:
        """Back to the job's own step."""
        if self._own is not None and self._in_force is not None:
            self._put(self._own)
        self._in_force = None

    def forget(self) -> None:
        """What was made and is not in force."""
        self._made.clear()

    # -- parts ---------------------------------------------------------------------------------

    def _present(self) -> _Step:
        model = self._model
        tf_function = getattr(model, "train_tf_function", None)
        layers = self.regions.names, self._recomputed.names, self._placement.placed
        return _Step(reduction(self._optimizer), model.train_function, tf_function, *layers)

    def _put(self, step: _Step) -> None:
        set_reduction(self._optimizer, step.reduction)
        self.regions.set(step.regions)
        self._recomputed.set(step.blocks)
        self._placement.set(step.placed)
        self._model.train_function = step.function
        if step.tf_function is not None:
            self._model.train_tf_function = step.tf_function

    def _trace(self, present: _Step) -> None:
        """Now and not at the next step, where the model's own code could fail it."""
        signatures = [concrete.structured_input_signature for concrete in traced_functions(present.function)]
        if not signatures:
            raise PlanError("the train step is no traced tf.function")
        self._model.make_train_function(force=True)
        arguments, keywords = signatures[0]
        traced_step(self._model.train_function).get_concrete_function(*arguments, **keywords)
