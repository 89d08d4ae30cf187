"""Training loops in MXNet: a hybridised Gluon network that trains on the same batch again and again.

A step ends when its loss is known, as in a job that looks at it: MXNet's engine may still be at its backward pass.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from benchmarks.loops import MOMENTUM, RATE, captured_ready
from benchmarks.models_mxnet import make
from dpro.adapter import Adapter
from dpro.plan import Plan
from dpro.tuner import Tuner
from dpro_integrations import byteps_partitions

#: Of the loop's own meeting; a tuner counts its own from 1.
_TAG = "1000"
_SGD = {"learning_rate": RATE, "momentum": MOMENTUM}


class _Loop:
    """What does not depend on who sums the gradients."""

    rank: int
    runs_behind = True

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        if emulated:
            raise ValueError("the models in MXNet have no emulated compute")
        self._task = make(model, seed)
        self._loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self._loss.hybridize()

    def _train_by(self, trainer: Any) -> None:
        from dpro_integrations.mxnet import library

        knows = library(trainer)
        self._trainer = trainer
        self.adapter: Adapter = knows.adapter(trainer, knows.meet(_TAG))

    def step(self) -> None:
        task = self._task
        with mx.autograd.record():
            loss = self._loss(task.net(task.inputs), task.labels)
        loss.backward()
        self._trainer.step(len(task.inputs))
        loss.wait_to_read()

    def ready(self) -> list[tuple[str, int]]:
        order = captured_ready(self.adapter, self.step)
        self.barrier()  # who has read its capture sooner does not train meanwhile
        return order

    def prepare(self, plans: Sequence[Plan]) -> None:
        pass  # nothing is

    def barrier(self) -> None:
        raise NotImplementedError

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        from dpro_integrations.mxnet import autotune

        return autotune(self._trainer, **settings)


class HorovodLoop(_Loop):
    """``hvd.DistributedTrainer`` over gloo, found by horovodrun's environment."""

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        import horovod.mxnet as hvd

        hvd.init()
        self._hvd, self.rank = hvd, hvd.rank()
        super().__init__(model, seed, emulated)
        parameters = self._task.net.collect_params()
        hvd.broadcast_parameters(parameters, root_rank=0)
        self._train_by(hvd.DistributedTrainer(parameters, "sgd", dict(_SGD)))

    def barrier(self) -> None:
        self._hvd.allreduce(mx.nd.zeros(1), name="benchmark.barrier").wait_to_read()

    def close(self) -> None:
        mx.nd.waitall()
        self.barrier()
        self._hvd.shutdown()


def _make_room() -> None:
    """A sweep tries more bounds than a user's job may."""
    byteps_partitions.MOST_BOUNDS, byteps_partitions.MOST_GRADIENTS = 20, 1024


class BytePSLoop(_Loop):
    """``bps.DistributedTrainer``, found by bpslaunch's environment."""

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        import byteps.mxnet as bps
        from byteps.mxnet import ops

        # declaring a tensor returns nothing, in C; what Python finds in its place is no error code
        ops.MXNET_LIB_CTYPES.byteps_mxnet_declare_tensor.restype = lambda _: 0
        _make_room()
        bps.init()
        self._bps, self.rank = bps, bps.rank()
        self._push_pull = ops.byteps_push_pull
        super().__init__(model, seed, emulated)
        self._folder = tempfile.TemporaryDirectory(prefix="dpro-lr-")
        os.chdir(self._folder.name)  # the trainer writes its learning rate to a file in the current folder
        self._token = mx.nd.zeros(1)
        self._token.wait_to_read()  # BytePS asks for its memory at once
        ops.byteps_declare_tensor("benchmark.barrier")
        self._train_by(bps.DistributedTrainer(self._task.net.collect_params(), "sgd", dict(_SGD)))

    def barrier(self) -> None:
        self._push_pull(self._token, name="benchmark.barrier", is_average=False)
        self._token.wait_to_read()

    def close(self) -> None:
        mx.nd.waitall()
        self.barrier()
        self._bps.shutdown()
