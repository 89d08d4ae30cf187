"""A captured Keras job: what one rank does, and what it leaves for the test to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
from tensorflow import keras

from tests.frameworks.horovod_keras.jobs import job

STEPS, BATCH = 3, 16


def cnn(filters: int = 32) -> Any:
    """Convolutions, batch norm and a wide layer: gradients of 128 bytes to some MiB."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(filters, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(2 * filters, 3, strides=2, activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def data(rank: int, steps: int) -> tuple[Any, Any]:
    drawn = np.random.RandomState(rank)
    return drawn.normal(size=(steps * BATCH, 32, 32, 3)).astype("f"), drawn.randint(10, size=steps * BATCH)


def captured(into: str, how: str) -> dict[str, Any]:
    """Capture three steps into ``into``, in ``fit`` or in a ``loop``; ``accumulated``: of two batches each."""
    from dpro_integrations.keras import trace
    from dpro_integrations.keras_horovod import KerasHorovodAdapter
    from dpro_integrations.keras_steps import StepCallback

    class Alone:
        rank, world_size = 0, 2

    with job() as rank:
        model = cnn()
        passes = 2 if how == "accumulated" else 1
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=passes)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        adapter = KerasHorovodAdapter(trace(model), Alone())  # type: ignore[arg-type]
        steps = 0

        def stepped() -> None:
            nonlocal steps
            steps += 1
            adapter.obstacle()
            if steps == 8:
                adapter.start_capture()
            elif 8 < steps <= 8 + STEPS:
                adapter.mark_step()
            if steps == 8 + STEPS:
                adapter.stop_capture().save(Path(into) / f"rank{rank}.npz")

        x, y = data(rank, 14 * passes)
        if how == "loop":
            for at in range(0, len(x), BATCH):
                model.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])
                stepped()
        else:
            model.fit(x, y, BATCH, verbose=0, shuffle=False, callbacks=[StepCallback(stepped, lambda: None)])
        adapter.close()
        return {"steps": steps, "variables": [v.name.removesuffix(":0") for v in model.trainable_variables]}
