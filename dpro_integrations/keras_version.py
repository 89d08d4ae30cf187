"""What Keras 2 and Keras 3 (on TensorFlow) have under different names. The rest of dpro knows it by those here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow import keras

# tf.keras may be either, or Keras 2 by another name (tf_keras)
_module = str(keras.Model.__module__)
KERAS3 = ".engine." not in _module
VERSION = str(importlib.import_module(_module.partition(".")[0]).__version__)

if KERAS3:
    from keras.src.backend.common import global_state

    def in_training() -> bool:
        """Whether the layer that is being called is called in training."""
        context = global_state.get_global_attribute("current_call_ctx")
        return bool(getattr(context, "training", None))

    def calling() -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What layers that are called now know of the call around them, to be entered again."""
        return contextlib.nullcontext

else:
    _calls = importlib.import_module(f"{_module.rpartition('.')[0]}.base_layer_utils")

    def in_training() -> bool:
        """Whether the layer that is being called is called in training."""
        return bool(_calls.call_context().training)

    def calling() -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What layers that are called now know of the call around them, to be entered again."""
        now = _calls.call_context()
        held = now.layer, now.inputs, now.build_graph, now.training, now.saving
        return lambda: now.enter(*held)


def name_of(variable: Any) -> str:
    """A variable's name in traces and plans, with those of the layers around it."""
    return str(variable.path) if KERAS3 else str(variable.name).removesuffix(":0")


def shape_of(value: Any) -> list[int | None]:
    """Of a variable or tensor, symbolic ones too."""
    return [None if size is None else int(size) for size in value.shape]


def dtype_of(value: Any) -> str:
    """Its name."""
    return str(getattr(value.dtype, "name", value.dtype))


def value_of(variable: Any) -> Any:
    """A tensor that stays as it is when the variable changes."""
    return tf.identity(tf.convert_to_tensor(variable.value if KERAS3 else variable.value()))


def inner_layers(layer: Any) -> list[Any]:
    """The layers right in it."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def layers_within(layer: Any) -> list[Any]:
    """The layer, and all that are in it."""
    return list(layer._flatten_layers())


def takes_training(layer: Any) -> bool:
    """Whether it is told that it is called in training."""
    return bool(layer._call_has_training_arg if KERAS3 else layer._expects_training_arg)


def steps_per_execution(model: Any) -> int:
    """0: TensorFlow chooses."""
    if getattr(model, "autotune_steps_per_execution", False):
        return 0
    steps = getattr(model, "steps_per_execution" if KERAS3 else "_steps_per_execution", None)
    return 1 if steps is None else int(steps)


def traced_step(function: Any) -> Any:
    """The ``tf.function`` that a model's train function is, or calls for each step of ``fit``; None: there is none.

    Keras 3.6 and later have a plain function around it.
    """
    while function is not None and not hasattr(function, "get_concrete_function"):
        function = closed_over(function).get("multi_step_on_iterator")
    return function


def closed_over(function: Any) -> dict[str, Any]:
    """What a function made by another has of it, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


class CallNode:
    """A call of a layer in a model's functional graph.

    Attributes:
        layer: the one that is called.
        inputs: (id of the tensor, symbolic tensor) of all that it takes.
        outputs: ids of what it gives.
        made: the symbolic tensors of those.
    """

    def __init__(self, node: Any) -> None:
        #: Keras' own
        self.known = node
        self.layer = node.operation if KERAS3 else node.layer
        taken = node.input_tensors if KERAS3 else node.keras_inputs
        self.inputs = [(str(id(tensor)), tensor) for tensor in taken]
        self.made = tf.nest.flatten(node.outputs)
        self.outputs = [str(id(tensor)) for tensor in self.made]

    def call(self, values: dict[str, Any], **more: Any) -> Any:
        """Call the layer as in the graph, with ``values`` by id in the place of its tensors."""
        if KERAS3:
            args, kwargs = self.known.arguments.fill_in({int(key): value for key, value in values.items()})
        else:
            counted = [key for key, _ in self.inputs]
            args, kwargs = self.known.map_arguments({key: [values[key]] * counted.count(key) for key in counted})
        return self.layer(*args, **{**kwargs, **more})
