"""One process that trains a small convolutional network with Keras 3; ``job.py KIND ARGUMENTS``, arguments in JSON.

Prints what the tests look at as one line of JSON, the last one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import dpro.tuner
from dpro.plan import Plan
from dpro.verdict import Comparison
from dpro_integrations.keras import DproCallback, autotune
from dpro_integrations.keras_graph import traced_functions

STEPS, BATCH = 60, 8


def network(kind: str) -> Any:
    """Two blocks of a convolution, a norm and an activation; the first norm's name is what TensorFlow calls the
    second scope of a ``norm``."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    given = keras.Input((12, 12, 4))
    out = given
    for name in ("norm_1", "norm"):
        out = layers.Conv2D(8, 3, padding="same", name=f"conv_{name}")(out)
        out = layers.BatchNormalization(name=name)(out)
        out = layers.Activation("swish", name=f"act_{name}")(out)
    if kind == "seeded":
        out = layers.Dropout(0.5, seed=3)(out)
    out = layers.Dense(1, name="head")(layers.GlobalAveragePooling2D()(out))
    return keras.Model(given, out)


def main() -> None:
    kind, given = sys.argv[1], json.loads(sys.argv[2])
    kept = given.pop("kept", True)
    dpro.tuner.compare = lambda *_: Comparison(0.9 if kept else 1.1, 0.0, kept)
    if layers := given.pop("layers", None):
        given["plan"] = Plan(compile_regions=layers)
    if blocks := given.pop("blocks", None):
        given["plan"] = Plan(recompute=blocks)
    model = network(kind)
    more = {"jit_compile": True} if kind == "jit" else {}
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], **more)
    drawn = np.random.RandomState(0)
    x = drawn.randn(STEPS * BATCH, 12, 12, 4).astype(np.float32)
    y = drawn.randn(STEPS * BATCH, 1).astype(np.float32)
    outcome = None
    if kind == "loop":
        tuner = autotune(model, **given) if given else None
        for at in range(STEPS):
            rows = slice(at * BATCH, (at + 1) * BATCH)
            model.train_on_batch(x[rows], y[rows])
        outcome = tuner.outcome if tuner else None
    else:
        ours = [DproCallback(**given)] if given else []
        model.fit(x, y, BATCH, 1, 0, ours, validation_data=(x[:8], y[:8]), shuffle=False)
        outcome = ours[0].outcome if ours else None
    compiled = {
        node.attr["_XlaScope"].s.decode()
        for concrete in traced_functions(model.train_function)
        for function in concrete.graph.as_graph_def().library.function
        for node in function.node_def
        if node.attr["_XlaCompile"].b
    }
    told = {
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "weights": [np.asarray(weight).ravel().tolist() for weight in model.get_weights()],
        "verdict": outcome.verdict.name if outcome else "",
        "reason": outcome.reason if outcome else "",
        "compiled": len(compiled),
        "left": sorted(layer.name for layer in model.layers if "call" in vars(layer)),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
