"""Horovod's explicit groups, and layers compiled by XLA, in a Keras model that was made without; and out of it again.

Stock ``DistributedOptimizer(groups=[[...]])`` bakes the groups into the function that reduces the gradients
(``hvd._make_allreduce_grads_fn``), and TensorFlow that function into the traced train step. So both are made anew,
from Horovod's own parts and by Keras' ``make_train_function(force=True)``, and exchanged between two steps; ``fit``
looks its train function up at every one of them. The former ones are kept and put back as they were. Variables
(weights, the optimizer's state, metrics, the step that a learning-rate schedule counts) belong to none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.util import vars_to_refs

from dpro.errors import PlanError
from dpro_integrations.keras_graph import Recorder, set_allreduce, traced_functions
from dpro_integrations.keras_regions import Regions

#: What Horovod's function for reducing gradients must have closed over to be made again with groups.
_SETTINGS = (
    "name", "device_dense", "device_sparse", "compression", "sparse_as_dense", "op", "prescale_factor",
    "postscale_factor", "groups", "process_set",
)  # fmt: skip


def settings_of(allreduce: Callable[..., Any]) -> dict[str, Any]:
    """What ``allreduce``, made by Horovod for an optimizer, was made with; empty where it is none of those."""
    function = getattr(allreduce, "python_function", allreduce)
    found = _closed_over(function)
    return {key: found[key] for key in _SETTINGS} if set(_SETTINGS) <= set(found) else {}


def _closed_over(function: Any) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def grouped(allreduce: Callable[..., Any], groups: list[list[Any]]) -> Callable[..., Any]:
    """As ``allreduce``, which has none, with ``groups`` of variables."""
    told = settings_of(allreduce)
    # Horovod's own cache would keep the function, and the variables in it, for ever
    make = _closed_over(hvd._make_cached_allreduce_grads_fn).get("f", hvd._make_cached_allreduce_grads_fn)
    predivide = told["postscale_factor"] if told["op"] == hvd.Average else 1.0
    made: Callable[..., Any] = make(
        told["name"],
        told["device_dense"],
        told["device_sparse"],
        told["compression"],
        told["sparse_as_dense"],
        told["op"],
        predivide,
        vars_to_refs(groups),
        told["process_set"],
    )
    return made


def split_by_kind(variables: list[Any]) -> list[list[Any]]:
    """Variables of one dtype each, in the order given: others can't be in one of Horovod's ops."""
    kinds: dict[Any, list[Any]] = {}
    for variable in variables:
        kinds.setdefault(variable.dtype, []).append(variable)
    return list(kinds.values())


class _Step(NamedTuple):
    """What a model needs to make steps."""

    allreduce: Any
    function: Any
    tf_function: Any
    regions: tuple[str, ...]  # layers that are compiled when it is traced


class TrainStep:
    """The train step of one model: the job's own, and those with groups that were made for it.

    Args:
        model: compiled; its step has been traced.
        optimizer: the one in it that ``hvd.DistributedOptimizer`` made.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        #: its compiled layers
        self.regions = Regions(model)
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

    def make(self, key: str, groups: list[list[Any]], regions: list[str], reduced: list[Any]) -> None:
        """Trace the step with ``groups`` and compiled ``regions``, under ``key``, and change nothing.

        Args:
            groups: of variables; none at all if empty.
            regions: names of layers.
            reduced: the variables whose gradients the present step reduces, in order.

        Raises:
            PlanError: traced anew the step would reduce others, or XLA does not compile a region.
            Exception: what the model's own code raises when it is traced.
        """
        if key in self._made:
            return
        present = self._present()
        function = (self._own or present).allreduce
        if groups:
            function = grouped(function, [alike for group in groups for alike in split_by_kind(group)])
        set_allreduce(self._optimizer, function)
        recorder = Recorder(self._optimizer)
        try:
            self.regions.set(tuple(regions))
            self._trace(present)
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
        return _Step(self._optimizer._allreduce_grads, model.train_function, tf_function, self.regions.names)

    def _put(self, step: _Step) -> None:
        set_allreduce(self._optimizer, step.allreduce)
        self.regions.set(step.regions)
        self._model.train_function = step.function
        if step.tf_function is not None:
            self._model.train_tf_function = step.tf_function

    def _trace(self, present: _Step) -> None:
        """Now and not at the next step, where the model's own code could fail it."""
        signatures = [concrete.structured_input_signature for concrete in traced_functions(present.function)]
        if not signatures:
            raise PlanError("the train step is no traced tf.function")
        function = self._model.make_train_function(force=True)
        arguments, keywords = signatures[0]
        function.get_concrete_function(*arguments, **keywords)


def tensor_bytes(variable: Any, allreduce: Callable[..., Any]) -> tuple[str, int]:
    """dtype and bytes of a variable's gradient on the wire, after compression."""
    compression = settings_of(allreduce).get("compression", hvd.Compression.none)
    sent, _ = compression.compress(tf.zeros([0], variable.dtype))
    return str(sent.dtype.name), int(variable.shape.num_elements()) * int(sent.dtype.size)
