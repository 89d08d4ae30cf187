"""What the cut models in Keras or MXNet are made of, told by a Python that has the framework.

``python -m tests.testbed.cut_models keras`` prints JSON: for each model the bytes of its gradients, the sizes in its
module, and whether it is the same every time, its noise is the seed's, and all gradients of a step are finite.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def keras_gradients(task: Any) -> list[Any]:
    import tensorflow as tf

    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        value = loss(task.labels, task.model(task.inputs, training=True))
    found = tape.gradient(value, task.model.trainable_variables)
    return [None if grad is None else tf.convert_to_tensor(grad).numpy() for grad in found]


def keras_weights(task: Any) -> list[Any]:
    return [weight.numpy() for weight in task.model.trainable_variables]


def mxnet_gradients(task: Any) -> list[Any]:
    import mxnet as mx

    with mx.autograd.record():
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(task.net(task.inputs), task.labels)
    loss.backward()
    return [p.grad().asnumpy() for p in mxnet_parameters(task)]


def mxnet_weights(task: Any) -> list[Any]:
    return [p.data().asnumpy() for p in mxnet_parameters(task)]


def mxnet_parameters(task: Any) -> list[Any]:
    return [p for _, p in sorted(task.net.collect_params().items()) if p.grad_req != "null"]


def tell(models: Any, name: str, gradients: Callable[[Any], list[Any]], weights: Callable[[Any], list[Any]]) -> Any:
    one, other = models.make(name, seed=1), models.make(name, seed=2)
    pairs = list(zip(weights(one), weights(other), strict=True))
    found = gradients(one)
    module = importlib.import_module(f"{models.__name__}.{models._MODULES[name]}")
    noise = [
        np.asarray(task.inputs if isinstance(task.inputs, np.ndarray) else task.inputs.asnumpy())
        for task in (one, other)
    ]
    return {
        "bytes": models.gradient_bytes(getattr(one, "model", None) or one.net),
        "sizes": {key: value for key, value in vars(module).items() if key.isupper() and isinstance(value, int)},
        "same_weights": all(np.array_equal(a, b) for a, b in pairs),
        "own_noise": not np.array_equal(*noise),
        "finite": all(g is not None and np.isfinite(g).all() for g in found),
        "shapes": [a.shape for a, _ in pairs] == [g.shape for g in found if g is not None],
    }


def main() -> None:
    framework = sys.argv[1]
    models = importlib.import_module(f"benchmarks.models_{framework}")
    gradients = {"keras": keras_gradients, "mxnet": mxnet_gradients}[framework]
    weights = {"keras": keras_weights, "mxnet": mxnet_weights}[framework]
    print(json.dumps({name: tell(models, name, gradients, weights) for name in models.NAMES}))


if __name__ == "__main__":
    main()
