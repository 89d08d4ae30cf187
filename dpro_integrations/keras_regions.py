"""Layers of a Keras model compiled by XLA, each where it is called in training; everything else is left alone.

A chosen layer's ``call`` runs under ``tf.xla.experimental.jit_scope``. It does so in a function of its own: a gradient
tape knows nothing of scopes, while the gradient of a function is made by an older way that hands them on
(``gradients_util._MaybeCompile``). TensorFlow puts the body in the function's place, and makes clusters of what is
marked; layers that follow each other end up in one.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import tensorflow as tf
from tensorflow import keras

from dpro.errors import PlanError
from dpro_integrations.base import put_on
from dpro_integrations.keras_graph import Collection, nodes_of, traced_functions
from dpro_integrations.keras_version import dtype_of, in_training, inner_layers, shape_of, value_of

#: What becomes of a cluster.
_XLA = frozenset({"_XlaRun", "XlaLaunch"})
#: Ops that draw; all of TensorFlow's are called so.
RANDOM = re.compile("Random|Rng|Multinomial|StatefulUniform|StatefulStandardNormal")
#: XLA compiles what has run so often already; after once more it has run compiled.
_TRIAL_RUNS = 3
_TRIAL_BATCH = 8
#: What trying out layers may take in all, s. Those that are left when it is over are taken as they are.
_TRIAL_S = 10.0


def layers_of(model: Any) -> dict[str, Any]:
    """The layers of ``model``, and the layers in them, by their names from the outside in: ``encoder/attention/query``.

    That is how TensorFlow's scopes have it, behind the name of the model. What is not the only one of its name is left
    out.
    """
    found: list[tuple[str, Any]] = []

    def walk(around: Any, prefix: str) -> None:
        for layer in inner_layers(around):
            if not isinstance(layer, keras.layers.InputLayer):
                found.append((prefix + layer.name, layer))
                walk(layer, f"{prefix}{layer.name}/")

    walk(model, "")
    names = Counter(name for name, _ in found)
    return {name: layer for name, layer in found if names[name] == 1 and not isinstance(layer, keras.Model)}


class Regions:
    """The compiled layers of one model; none at first."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._wrapped: dict[str, _Wrapped] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Layers that are compiled when the step is traced."""
        return tuple(sorted(self._wrapped))

    def set(self, names: tuple[str, ...]) -> None:
        """Compile these layers, and no others, when the step is traced next.

        Raises:
            PlanError: the model has no such layer; nothing was changed.
        """
        known = layers_of(self._model)
        for name in set(names) - self._wrapped.keys():
            if name not in known:
                raise PlanError(f"the model has no layer {name!r}")
        for name in self._wrapped.keys() - set(names):
            self._wrapped.pop(name).remove()
        for name in set(names) - self._wrapped.keys():
            self._wrapped[name] = _Wrapped(known[name])

    def try_out(self) -> None:
        """Run every compiled layer, forward and backward, away from the training; call it after the step was traced.

        Raises:
            PlanError: XLA refuses one of them, or draws other random numbers in it than TensorFlow.
        """
        for name, wrapped in sorted(self._wrapped.items()):
            if wrapped.called is None:
                raise PlanError(f"layer {name!r} is not called on its own in training")
            if op := wrapped.draws():
                raise PlanError(f"layer {name!r} draws random numbers ({op}), which XLA draws otherwise")
        deadline = time.monotonic() + _TRIAL_S
        tried = set()
        for name, wrapped in sorted(self._wrapped.items()):
            if wrapped.kind() in tried or time.monotonic() > deadline:
                continue
            tried.add(wrapped.kind())
            try:
                compiled = wrapped.try_out()
            except Exception as error:
                reason = " ".join(str(error).split())[:160]
                raise PlanError(f"XLA does not compile layer {name!r}: {reason}") from error
            if not compiled:
                raise PlanError(f"XLA compiles nothing of layer {name!r}")


class _Wrapped:
    """A layer whose ``call`` is compiled where it is called in training."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._original = layer.call
        self.called: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._function = tf.function(self._scoped)

        # a plain function: Keras has it converted by AutoGraph where the layer is the user's own
        def call(*args: Any, **kwargs: Any) -> Any:
            if not in_training() or not tf.inside_function():
                return self._original(*args, **kwargs)
            self.called = tf.nest.map_structure(_spec, (args, kwargs))
            return self._function(*args, **kwargs)

        #: lets the layer go
        self.remove = put_on(layer, "call", tf.autograph.experimental.do_not_convert(call))

    def _scoped(self, *args: Any, **kwargs: Any) -> Any:
        with tf.xla.experimental.jit_scope(compile_ops=True, separate_compiled_gradients=True):
            return self._original(*args, **kwargs)

    def draws(self) -> str:
        """An op in it that draws random numbers; "" none."""
        for concrete in traced_functions(self._function):
            for node in nodes_of(concrete.graph.as_graph_def()):
                if RANDOM.search(node.op):
                    return str(node.op)
        return ""

    def kind(self) -> Any:
        """Layers of one kind compile alike."""
        shapes = tuple((tuple(shape_of(weight)), dtype_of(weight)) for weight in self._layer.weights)
        return type(self._layer), shapes, repr(self.called), repr(getattr(self._layer, "activation", None))

    def try_out(self) -> bool:
        """Whether XLA compiled anything."""
        assert self.called is not None
        args, kwargs = tf.nest.map_structure(_filled, self.called)
        weights = [(weight, value_of(weight)) for weight in self._layer.weights]

        @tf.function
        def run(*args: Any, **kwargs: Any) -> Any:
            with tf.GradientTape() as tape:
                given = [value for value in tf.nest.flatten((args, kwargs)) if _is_float(value)]
                tape.watch(given)
                out = self._function(*args, **kwargs)
                total = tf.add_n([tf.reduce_sum(tf.cast(o, tf.float32)) for o in tf.nest.flatten(out) if _is_float(o)])
            # with the result: else there would be nothing to compile of a sum, whose gradient needs none of it
            return total, tape.gradient(total, [*given, *self._layer.trainable_weights])

        made = Collection(_XLA)
        try:
            for _ in range(_TRIAL_RUNS):
                run(*args, **kwargs)
        finally:
            for weight, value in weights:  # moving averages, a state
                weight.assign(value)
            seen = made.stop()
        return bool(made.graphs) or not seen


def _is_float(value: Any) -> bool:
    return bool(tf.is_tensor(value) and value.dtype.is_floating)


def _spec(value: Any) -> Any:
    return tf.TensorSpec(value.shape, value.dtype) if tf.is_tensor(value) else value


def _filled(value: Any) -> Any:
    """Something of the shape that was seen."""
    if not isinstance(value, tf.TensorSpec):
        return value
    shape = [size or _TRIAL_BATCH for size in shape_of(value)]
    return tf.ones(shape, value.dtype) if value.dtype != tf.bool else tf.fill(shape, True)
