"""Which of TensorFlow's name scopes is which layer of a Keras 3 model.

Keras 3 opens a layer's scope twice, to build it and to call it, and TensorFlow numbers what is there already: ops of
``norm`` are called ``norm_1/…``, and so may be those of a layer that is called ``norm_1``. So each layer says where it
is when the train step is traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dpro_integrations.base import put_on
from dpro_integrations.keras_regions import layers_of

#: What TensorFlow puts before the names of a function's ops where it is called, and the tape before its backward pass.
_AROUND = re.compile(r"(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)*(gradient_tape/)?(.+)")


class LayerScopes:
    """Looks on while a model's layers are called in a graph, from construction to :meth:`stop`."""

    def __init__(self, model: Any) -> None:
        self._model = model.name
        self._scopes: dict[str, str] = {}
        self._undo = [self._look(layer, name) for name, layer in layers_of(model).items()]

    def stop(self) -> None:
        """Safe to call twice."""
        undone, self._undo = self._undo, []
        for undo in undone:
            undo()

    def renamed(self, op: str) -> str:
        """The op's name as Keras 2 would have it: ``model/layer/…``, behind the tape's."""
        around = _AROUND.fullmatch(op)
        if around is None:
            return op
        tape, path = around[1] or "", around[2].split("/")
        for end in range(len(path) - 1, 0, -1):
            if layer := self._scopes.get("/".join(path[:end])):
                return "/".join([f"{tape}{self._model}", layer, *path[end:]])
        return op

    def _look(self, layer: Any, name: str) -> Callable[[], None]:
        original = layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            # of several calls the first: ops of two would have the same names
            if tf.inside_function() and name not in self._scopes.values():
                self._scopes[tf.get_current_name_scope()] = name
            return original(*args, **kwargs)

        return put_on(layer, "call", tf.autograph.experimental.do_not_convert(call))
