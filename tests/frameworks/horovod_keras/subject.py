"""The conformance tests' job for Keras with Horovod (see ``tests/frameworks/conformance.py``)."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
from horovod.tensorflow import mpi_ops
from tensorflow import keras
from tensorflow.python.profiler import profiler_v2
from tensorflow.python.profiler.internal import _pywrap_profiler

from dpro.plan import Plan
from dpro_integrations.horovod_exchange import join_exchange
from dpro_integrations.keras import trace
from dpro_integrations.keras_horovod import KerasHorovodAdapter
from tests.frameworks.horovod_keras.jobs import BATCH, GROUPS, batch, compiled, digest, job, net, reductions


class KerasSubject:
    """Two layers and a head, trained batch by batch; things of the user's on the model."""

    def __init__(self) -> None:
        self._job = job()
        self.rank = self._job.__enter__()
        self._model = compiled(net(), keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)))
        self._optimizer = self._model.optimizer
        self._model.note = "the user's"
        self._steps = 0
        self._losses: list[float] = []
        self.adapter = KerasHorovodAdapter(trace(self._model), join_exchange(hvd.rank(), hvd.size(), "subject", 20.0))
        self.step()
        self._objects = self._identities()

    def _identities(self) -> list[int]:
        model, optimizer = self._model, self._optimizer
        return [id(model), id(model.optimizer), *map(id, model.weights), *map(id, optimizer.variables())]

    def step(self) -> None:
        x, y = batch(self._steps, self.rank)
        self._losses.append(float(self._model.train_on_batch(x, y, reset_metrics=False)[0]))
        self._steps += 1

    def weights(self) -> str:
        return digest(self._model)

    def tensors(self) -> dict[str, int]:
        return {v.name.removesuffix(":0"): 4 * int(v.shape.num_elements()) for v in self._model.trainable_variables}

    def settings(self) -> Any:
        return reductions(self._model)

    def plan(self) -> Plan:
        return Plan(fingerprint=self.adapter.fingerprint(), tensor_groups=GROUPS)

    def expected(self, plan: Plan, ready: list[str]) -> Any:
        """An op is named after its first and last gradient; the head's bias, in no group, is one of its own."""
        assert plan.tensor_groups is not None
        numbers = {name: i for i, name in enumerate(self.tensors())}
        groups = [*plan.tensor_groups, ["head/bias"]]
        found = []
        for group in groups:
            first, last = (f"grads_{number}_0" if (number := numbers[group[end]]) else "grads_0" for end in (0, -1))
            found.append([f"HorovodGroupedAllreduce_{first}_{last}", len(group)])
        return sorted(found)

    def foreign(self) -> list[Plan]:
        own = self.adapter.fingerprint()
        return [
            Plan(fingerprint=own | {"model": "another"}, tensor_groups=GROUPS),
            Plan(fingerprint=own | {"world_size": "3"}, tensor_groups=GROUPS),
            Plan(fingerprint=own | {"unheard": "of"}, tensor_groups=GROUPS),
            Plan(fingerprint=own, tensor_groups=GROUPS, bucket_caps=[1.0]),
            Plan(fingerprint=own, tensor_groups=[["a/kernel", "nowhere/kernel"]]),
            Plan(fingerprint=own),
        ]

    def attached(self) -> dict[str, Any]:
        model, optimizer = self._model, self._optimizer
        return {
            "profiler": profiler_v2._profiler is None,
            "sessions": id(_pywrap_profiler.ProfilerSession),
            "functions": [id(function) for function in (mpi_ops.join, hvd.DistributedOptimizer, keras.Model.fit)],
            "on_model": sorted(vars(model)),
            "on_optimizer": sorted(vars(optimizer)),
            "steps": [id(model.train_function), id(model.train_tf_function), id(optimizer._allreduce_grads)],
        }

    def user_state(self) -> dict[str, Any]:
        model, optimizer = self._model, self._optimizer
        return {
            "same_objects": self._identities() == self._objects,
            "note": model.note,
            "updates": int(optimizer.iterations) == self._steps,
            "rate": bool(np.isclose(float(optimizer._current_learning_rate), 0.01 * 0.9 ** ((self._steps - 1) / 5))),
            # the metric is a running mean over all samples, and goes on whatever is applied
            "metric_counts": int(model.metrics[0].count) == BATCH * self._steps,
        }

    def close(self) -> None:
        self.adapter.close()
        self._job.__exit__(None, None, None)


def make() -> KerasSubject:
    return KerasSubject()
