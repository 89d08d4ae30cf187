"""The conformance tests' job for Gluon with BytePS (see ``tests/frameworks/conformance.py``)."""

from __future__ import annotations

from typing import Any

import byteps.mxnet as bps
import mxnet as mx
from byteps.mxnet.ops import MXNET_LIB_CTYPES
from mxnet import autograd, gluon
from mxnet.gluon import Block

from dpro.plan import Plan
from tests.frameworks.byteps import mxnet_job
from tests.frameworks.byteps.partition_jobs import RATE, SMALL, adapter, digest, plan_of


class GluonSubject:
    """Two dense layers, one weight of which takes two partitions; things of the user's on the trainer."""

    def __init__(self) -> None:
        self.rank = bps.rank()
        mx.random.seed(1)
        self._net = mxnet_job.network()
        self._net.initialize(mx.init.Xavier())
        self._net.hybridize()
        self._trainer = bps.DistributedTrainer(self._net.collect_params(), "sgd", {"learning_rate": RATE})
        self._trainer.note = "the user's"
        self._x, self._y = mxnet_job.data()
        self._loss, self._steps = gluon.loss.L2Loss(), 0
        self.adapter = adapter(self._trainer)

    def step(self) -> None:
        at = self._steps % len(self._x)
        with autograd.record():
            error = self._loss(self._net(mx.nd.array(self._x[at, self.rank])), mx.nd.array(self._y[at, self.rank]))
        error.backward()
        self._trainer.step(self._x.shape[2])
        error.asnumpy()
        self._steps += 1

    def weights(self) -> str:
        return digest(self._net)

    def tensors(self) -> dict[str, int]:
        return {name: p.data().size * 4 for name, p in self._net.collect_params().items()}

    def settings(self) -> Any:
        return self.adapter._bounds.now

    def plan(self) -> Plan:
        return plan_of(self.adapter, SMALL)

    def expected(self, plan: Plan, ready: list[str]) -> Any:
        return SMALL

    def foreign(self) -> list[Plan]:
        own, alike = self.adapter.fingerprint(), dict.fromkeys(self.tensors(), SMALL)
        return [
            Plan(fingerprint=own | {"model": "another"}, partitions=alike),
            Plan(fingerprint=own, bucket_caps=[1.0]),
        ]

    def attached(self) -> dict[str, Any]:
        functions = [bps.byteps_push_pull, Block.__call__, type(self._trainer._optimizer).update_multi_precision]
        return {
            "functions": [*map(id, functions), id(MXNET_LIB_CTYPES.byteps_mxnet_push_pull_async)],
            "on_trainer": sorted(vars(self._trainer)),
            "bound": self.settings(),
        }

    def user_state(self) -> dict[str, Any]:
        arrays = [id(array) for p in self._trainer._params for array in (*p.list_data(), *p.list_grad())]
        return {"note": self._trainer.note, "same": arrays, "steps": self._trainer._optimizer.num_update - self._steps}

    def close(self) -> None:
        self.adapter.revert()
        self.adapter.close()


def make() -> GluonSubject:
    return GluonSubject()
