"""Keras with Horovod, tuned: ``horovodrun --gloo -np 2 -H localhost:2 python examples/horovod_keras.py``."""

import horovod.tensorflow.keras as hvd
import numpy as np
from tensorflow import keras

from dpro_integrations.keras import DproCallback


def main() -> None:
    hvd.init()
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss=loss, metrics=["accuracy"])
    drawn = np.random.default_rng(hvd.rank())
    x, y = drawn.normal(size=(60 * 32, 512)).astype("f"), drawn.integers(10, size=60 * 32)
    tuning = DproCallback()
    model.fit(
        x,
        y,
        batch_size=32,
        epochs=2,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), tuning],
    )
    if tuning.outcome is not None and hvd.rank() == 0:
        print(tuning.outcome.verdict.value, tuning.outcome.reason)


if __name__ == "__main__":
    main()
