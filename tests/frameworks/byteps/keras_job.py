"""One rank of a BytePS job under TensorFlow: sums of tensors, then Keras' ``model.fit`` and the same in one process.

Writes what came of it to ``<folder>/<rank>.json`` and the weights to ``<folder>/<rank>.npz``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import byteps.tensorflow as bps
import byteps.tensorflow.keras as bps_keras
import numpy as np
import tensorflow as tf

from tests.frameworks.byteps import sums

STEPS, BATCH, WIDTH = 40, 8, 64


def sum_rounds(rank: int, ranks: int, rounds: int) -> dict[str, object]:
    """All tensors are pushed by one graph, and the next round follows at once."""

    @tf.function
    def push_all(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [bps.push_pull(tensor, scope="sums/", average=False) for tensor in tensors]

    wrong = []
    for i in range(rounds):
        results = push_all([tf.constant(sums.pushed(n, i, rank)) for n in sums.ELEMENTS])
        wrong += [said for result in results if (said := sums.judge(result.numpy(), i, ranks))]
    return {"checks": rounds * len(sums.ELEMENTS), "wrong": wrong}


def data() -> tuple[np.ndarray, np.ndarray]:
    """[steps, ranks, batch, width] and [steps, ranks, batch, 1]: what each rank gets at each step."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((STEPS, 2, BATCH, WIDTH)).astype(np.float32)
    return x, np.tanh(x.mean(axis=-1, keepdims=True) * 8)


def network(seed: int) -> tf.keras.Model:
    """Its first kernel takes two partitions of ``sums.PARTITION_BYTES``."""
    first, second = (tf.keras.initializers.GlorotUniform(seed + k) for k in range(2))
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(400, activation="relu", kernel_initializer=first, input_shape=(WIDTH,)),
            tf.keras.layers.Dense(1, kernel_initializer=second),
        ]
    )


def fit(net: tf.keras.Model, optimizer: object, x: np.ndarray, y: np.ndarray, *callbacks: object) -> None:
    net.compile(optimizer, "mse")
    net.fit(x.reshape(-1, WIDTH), y.reshape(-1, 1), x.shape[1], shuffle=False, verbose=0, callbacks=list(callbacks))


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    bps.init()
    rank, ranks = bps.rank(), bps.size()
    told = {"sums": sum_rounds(rank, ranks, rounds)}
    if "train" in sys.argv[3:]:
        x, y = data()
        net = network(seed=10)  # all ranks begin with the same: BytePS broadcasts only after a first step
        first = net.get_weights()
        optimizer = bps_keras.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.01, 0.9))
        fit(net, optimizer, x[:, rank], y[:, rank], bps_keras.callbacks.BroadcastGlobalVariablesCallback(0))
        trained = net.get_weights()
        if rank == 0:
            alone = network(seed=10)
            whole = [part.reshape(STEPS, 2 * BATCH, -1) for part in (x, y)]
            fit(alone, tf.keras.optimizers.legacy.SGD(0.01, 0.9), *whole)
            told["moved"] = max(float(abs(a - b).max()) for a, b in zip(trained, first, strict=True))
            told["off"] = max(float(abs(a - b).max()) for a, b in zip(trained, alone.get_weights(), strict=True))
        np.savez(folder / f"{rank}.npz", *trained)
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
