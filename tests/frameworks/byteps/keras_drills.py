"""Keras jobs with BytePS and a difference: each is trained without dpro and with it, all in one process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import byteps.tensorflow as bps
import byteps.tensorflow.keras as bps_keras
import tensorflow as tf
from tensorflow.python.profiler import profiler_v2

from dpro_integrations import byteps_partitions
from dpro_integrations.keras import DproCallback, autotune
from tests.frameworks.byteps import keras_job
from tests.frameworks.byteps.forced import force
from tests.frameworks.launch import QUICK

RATE = 0.01


class OwnStep(tf.keras.Model):
    """A train step of the user's."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) + 0.001 * tf.nn.l2_loss(self.weights[0])
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


def own_step(net: Any) -> Any:
    return OwnStep(inputs=net.inputs, outputs=net.outputs)


class Profiler(tf.keras.callbacks.Callback):
    """The user's own runs from the second step on."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            tf.profiler.experimental.start(f"own-{bps.rank()}")

    def on_train_end(self, logs: Any = None) -> None:
        if profiler_v2._profiler is None:
            raise RuntimeError("somebody ended the user's profiler")
        tf.profiler.experimental.stop()


def fitted(
    dpro: bool,
    steps: int = keras_job.STEPS,
    make: Callable[[Any], Any] = lambda net: net,
    policy: str = "float32",
    more: Callable[[], list[Any]] = list,
    loop: bool = False,
    evaluated: bool = False,
) -> dict[str, Any]:
    """``make``: the model of the layers; ``more``: callbacks of the job's own; ``loop``: of ``train_on_batch``."""
    rank = bps.rank()
    x, y = (part[:steps, rank] for part in keras_job.data())
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        net = make(keras_job.network(seed=10))
        optimizer = bps_keras.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(RATE, 0.9))
        net.compile(optimizer, "mse")
        tuning = DproCallback() if dpro and not loop else None
        tuner = autotune(net) if dpro and loop else None
        if loop:
            for at in range(steps):
                net.train_on_batch(x[at], y[at])
        else:
            given = [*more(), *([tuning] if tuning else [])]
            rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, 1)
            held = (rows[0][:8], rows[1][:8]) if evaluated else None
            epochs = 2 if evaluated else 1
            net.fit(*rows, x.shape[1], epochs, 0, given, shuffle=False, validation_data=held)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    told = {"weights": hashlib.sha256(b"".join(w.tobytes() for w in net.get_weights())).hexdigest()}
    if tuner is not None:
        tuner.close()
    outcome = tuner.outcome if tuner else tuning.outcome if tuning else None
    if outcome is not None:
        told |= {"verdict": outcome.verdict.name, "reason": outcome.reason}
    return told


DRILLS: dict[str, dict[str, Any]] = {
    "short": {"steps": 5},
    "own step": {"make": own_step},
    "bfloat16": {"policy": "mixed_bfloat16"},
    "float16": {"policy": "mixed_float16"},
    "evaluated": {"evaluated": True},
    "loop": {"loop": True},
    "own profiler": {"more": lambda: [Profiler()]},
}


def all_drills(runs: str) -> dict[str, Any]:
    """By drill, what came of it without dpro and with it."""
    os.environ.update(QUICK, DPRO_RUNS_DIR=runs, DPRO_CAPTURE_STEPS="2")
    # every drill has a model of its own, with bounds that nobody else uses
    byteps_partitions.MOST_BOUNDS, byteps_partitions.MOST_GRADIENTS = 40, 64
    force(kept=True)
    return {name: [fitted(False, **what), fitted(True, **what)] for name, what in DRILLS.items()}
