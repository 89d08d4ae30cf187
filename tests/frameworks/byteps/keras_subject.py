"""The conformance tests' job for Keras with BytePS (see ``tests/frameworks/conformance.py``)."""

from __future__ import annotations

import hashlib
from typing import Any

import byteps.tensorflow as bps
import byteps.tensorflow.keras as bps_keras
import tensorflow as tf
from tensorflow.python.profiler.internal import _pywrap_profiler

from dpro.plan import Plan
from tests.frameworks.byteps import keras_job
from tests.frameworks.byteps.keras_partition_jobs import RATE, SMALL, adapter, attached, plan_of


class KerasSubject:
    """Two dense layers, one kernel of which takes two partitions; things of the user's on the model."""

    def __init__(self) -> None:
        self.rank = bps.rank()
        self._model = keras_job.network(seed=10)
        optimizer = bps_keras.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(RATE, 0.9))
        self._model.compile(optimizer, "mse")
        self._model.note = "the user's"
        self._x, self._y = keras_job.data()
        self._steps = 0
        self.adapter = adapter(self._model)
        self.step()
        self._own = id(self._model.train_function)

    def step(self) -> None:
        at = self._steps % len(self._x)
        self._model.train_on_batch(self._x[at, self.rank], self._y[at, self.rank])
        self.adapter.obstacle()
        self._steps += 1

    def weights(self) -> str:
        return hashlib.sha256(b"".join(weight.tobytes() for weight in self._model.get_weights())).hexdigest()

    def tensors(self) -> dict[str, int]:
        return {v.name.removesuffix(":0"): 4 * int(v.shape.num_elements()) for v in self._model.trainable_variables}

    def settings(self) -> Any:
        return [self.adapter._bounds.now, id(self._model.train_function) == self._own]

    def plan(self) -> Plan:
        return plan_of(self.adapter, SMALL)

    def expected(self, plan: Plan, ready: list[str]) -> Any:
        return [SMALL, False]

    def foreign(self) -> list[Plan]:
        own, alike = self.adapter.fingerprint(), dict.fromkeys(self.tensors(), SMALL)
        return [
            Plan(fingerprint=own | {"model": "another"}, partitions=alike),
            Plan(fingerprint=own, bucket_caps=[1.0]),
        ]

    def attached(self) -> dict[str, Any]:
        steps = [id(self._model.train_function), id(self._model.train_tf_function)]
        return {
            "sessions": id(_pywrap_profiler.ProfilerSession),
            "steps": steps,
            "on_model": sorted(vars(self._model)),
            "library": attached(self._model, self.adapter),
        }

    def user_state(self) -> dict[str, Any]:
        made = self._model
        objects = [id(made.optimizer), *map(id, made.weights), *map(id, made.optimizer.variables())]
        return {"note": made.note, "same": objects, "updates": int(made.optimizer.iterations) == self._steps}

    def close(self) -> None:
        self.adapter.revert()
        self.adapter.close()


def make() -> KerasSubject:
    return KerasSubject()
