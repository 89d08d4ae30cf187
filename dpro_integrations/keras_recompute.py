"""Re-computation in a Keras job: chosen blocks run their forward pass again instead of keeping what it made.

As ``tf.recompute_grad`` does it: a block is a function with a gradient of its own, which calls the layers once more on
the block's input when the gradient of its output is there. Control dependencies on that gradient keep the second pass
apart from the first (TensorFlow's optimiser merges nodes only where they have the same inputs, these among them), and
cost no copy of the input. What the second pass would change is held still: moving averages of batch norm. Whatever else
leaves something behind, or draws random numbers, is refused when the step is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow import keras

from dpro.errors import PlanError
from dpro_integrations.base import put_on
from dpro_integrations.keras_units import UnitLayers, blocks_of, why_not_again
from dpro_integrations.keras_version import calling, in_training, layers_within

#: Scope of what runs a second time.
SCOPE = "recompute"


class Recomputed:
    """The recomputed blocks of one model; none at first."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._undo: Callable[[], None] | None = None
        self._blocks: list[_Block] = []
        #: blocks that are recomputed when the step is traced
        self.names: tuple[str, ...] = ()

    def set(self, names: tuple[str, ...]) -> None:
        """Recompute these blocks, and no others, when the step is traced next.

        Raises:
            PlanError: see :func:`~dpro_integrations.keras_units.blocks_of`; nothing was changed.
        """
        if names == self.names:
            return
        blocks = [_Block(name, run) for name, run in zip(names, blocks_of(self._model, names), strict=True)]
        if self._undo is not None:
            self._undo()
        self._undo = _put_in(self._model, blocks) if blocks else None
        self._blocks, self.names = blocks, names

    def check(self) -> None:
        """To be called after the step was traced.

        Raises:
            PlanError: a block does what must not be done twice, or was not called.
        """
        for block in self._blocks:
            if block.refused:
                raise PlanError(f"block {block.name!r} can't be recomputed: {block.refused}")


def _put_in(model: Any, blocks: list[_Block]) -> Callable[[], None]:
    """Have the model call the blocks in the place of their layers, where it is called in training in a graph."""
    inside = {id(node.known) for block in blocks for node in block.nodes}
    cut = {depth: [node for node in nodes if id(node) not in inside] for depth, nodes in model._nodes_by_depth.items()}
    for block in blocks:
        depth = next(d for d, nodes in model._nodes_by_depth.items() if block.nodes[-1].known in nodes)
        cut[depth].append(block)
    original = model._run_internal_graph

    def run(*args: Any, **kwargs: Any) -> Any:
        if not in_training() or not tf.inside_function():
            return original(*args, **kwargs)
        undo = put_on(model, "_nodes_by_depth", cut)
        try:
            return original(*args, **kwargs)
        finally:
            undo()

    return put_on(model, "_run_internal_graph", run)


class _Block:
    """Stands for a run of units among the nodes of a functional graph, and for the layer of that node."""

    is_input = False

    def __init__(self, name: str, run: list[UnitLayers]) -> None:
        self.name = name
        #: why it must not be recomputed, as seen when it was traced; "" it may
        self.refused = "it has no gradient, or is not called on its own in training"
        self.nodes = [node for unit in run for node in unit.nodes]
        self._taken, self._given = run[0].taken, run[-1].given
        self.flat_input_ids, self.flat_output_ids = [self._taken], [self._given]
        self.layer = self._recomputed

    def map_arguments(self, values: dict[str, list[Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As of Keras' nodes: what the layer is called with, taken from what was computed."""
        value = values[self._taken].pop()
        values[self._taken].clear()
        return (value,), {}

    def _recomputed(self, value: Any) -> Any:
        again = calling()

        def once(taken: Any) -> tuple[Any, Callable[..., Any]]:
            def gradient(upstream: Any, variables: Any = None) -> Any:
                with again():
                    return self._gradient(taken, upstream, list(variables or ()))

            return self._run(taken), gradient

        return tf.custom_gradient(once)(value)

    def _gradient(self, taken: Any, upstream: Any, variables: list[Any]) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        floats = taken.dtype.is_floating
        with tf.name_scope(SCOPE), tf.control_dependencies([upstream]), tf.GradientTape() as tape:
            value = tf.identity(taken)
            sources = [*([value] if floats else []), *variables]
            tape.watch(sources)
            with _statistics_held(node.layer for node in self.nodes):
                out = self._run(value)
        made = graph.get_operations()[before:]
        self.refused = why_not_again(op.type for op in made)
        found = tape.gradient(out, sources, output_gradients=upstream)
        towards = found.pop(0) if floats else None
        # No update before the second pass has read the weights. TensorFlow's optimiser drops what orders these two: all
        # gradients pass one node of Keras' optimizer, which it takes out later. (tf.recompute_grad has that race.)
        reads = [op for op in made if any(given.dtype == tf.resource for given in op.inputs)]
        with tf.control_dependencies(reads):
            found = [None if one is None else tf.identity(one) for one in found]
        # What the second pass made is let go of before the blocks before it need room: else TensorFlow runs weights'
        # gradients when it has nothing else to do, and keeps what they take until then.
        if towards is not None:
            of_weights = tf.nest.flatten([one for one in found if one is not None], expand_composites=True)
            with tf.control_dependencies(of_weights):
                towards = tf.identity(towards)
        return (towards, found) if variables else towards

    def _run(self, value: Any) -> Any:
        values = {self._taken: value}
        for node in self.nodes:
            values.update(zip(node.outputs, tf.nest.flatten(node.call(values)), strict=True))
        return values[self._given]


@contextlib.contextmanager
def _statistics_held(layers: Iterable[Any]) -> Iterator[None]:
    """Moving averages stay as they are: what normalises is the batch's own mean and variance."""
    with contextlib.ExitStack() as undo:
        for layer in (inner for outer in layers for inner in layers_within(outer)):
            if isinstance(layer, keras.layers.BatchNormalization):
                undo.callback(put_on(layer, "_assign_moving_average", _unchanged))
                undo.callback(put_on(layer, "_assign_new_value", _unchanged))
        yield


def _unchanged(variable: Any, *_: Any) -> Any:
    return variable
