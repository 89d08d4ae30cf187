"""Keras with BytePS, tuned: on every worker ``bpslaunch python examples/byteps_keras.py``.

(From a clone, without a GPU, after ``make backends``: ``python -m benchmarks.testbed run --byteps
.venv-backends/bin/python -- .venv-backends/bin/python examples/byteps_keras.py``.)
"""

import byteps.tensorflow.keras as bps
import numpy as np
from tensorflow import keras

from dpro_integrations.keras import DproCallback


def main() -> None:
    bps.init()
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # BytePS 0.2.5 knows the legacy optimizers alone
    model.compile(optimizer=bps.DistributedOptimizer(keras.optimizers.legacy.SGD(0.01)), loss=loss)
    drawn = np.random.default_rng(bps.rank())
    x, y = drawn.normal(size=(75 * 32, 512)).astype("f"), drawn.integers(10, size=75 * 32)
    tuning = DproCallback()  # the added line
    model.fit(
        x,
        y,
        batch_size=32,
        epochs=2,
        verbose=2 if bps.rank() == 0 else 0,
        callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0), tuning],
    )
    if tuning.outcome is not None and bps.rank() == 0:
        print(tuning.outcome.verdict.value, tuning.outcome.reason)


if __name__ == "__main__":
    main()
