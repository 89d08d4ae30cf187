"""Training loops of the matrices, one per way to synchronise, with what a benchmark asks of them.

Knows how a job of DDP or of Horovod is made, stepped, tuned by dpro and put under a plan; not what is measured.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from benchmarks.models import Task
from dpro.adapter import Adapter
from dpro.plan import Plan
from dpro.tuner import Tuner

#: Learning rate so small that noise trained for hundreds of steps stays finite.
_RATE = 1e-4
_MEET_S = 60.0


class Loop(Protocol):
    """A job of one rank. ``model`` is the bare one; ``adapter`` is dpro's, for captures and plans without a tuner."""

    rank: int
    model: torch.nn.Module
    adapter: Adapter

    def step(self) -> None:
        """One training step, optimizer included."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        """A tuner that moves on at every :meth:`step`."""

    def close(self) -> None:
        """Leave the job; a collective."""


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9, fused=True)


class DDPLoop:
    """DistributedDataParallel over gloo, found by torchrun's environment."""

    def __init__(self, task: Task) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from dpro_integrations.torch_ddp import TorchDDPAdapter

        dist.init_process_group("gloo")
        self._dist, self._task = dist, task
        self.rank = dist.get_rank()
        self.model, self._ddp = task.model, DistributedDataParallel(task.model)
        self._optimizer = _optimizer(task.model)
        self.adapter: Adapter = TorchDDPAdapter(self._ddp, tag="benchmark")

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._task.loss(self._ddp).backward()
        self._optimizer.step()

    def barrier(self) -> None:
        self._dist.barrier()

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        from dpro_integrations.torch_ddp import autotune

        return autotune(self._ddp, optimizer=self._optimizer, **settings)[1]

    def close(self) -> None:
        self.barrier()
        self._dist.destroy_process_group()


class HorovodLoop:
    """``hvd.DistributedOptimizer`` over gloo, found by horovodrun's environment."""

    def __init__(self, task: Task) -> None:
        import horovod.torch as hvd

        from dpro_integrations.horovod_exchange import join_exchange
        from dpro_integrations.horovod_torch import HorovodTorchAdapter

        hvd.init()
        self._hvd, self._task = hvd, task
        self.rank, self.model = hvd.rank(), task.model
        named = list(task.model.named_parameters())
        self._optimizer = hvd.DistributedOptimizer(_optimizer(task.model), named_parameters=named)
        hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
        exchange = join_exchange(hvd.rank(), hvd.size(), "benchmark", _MEET_S)
        self.adapter: Adapter = HorovodTorchAdapter(self._optimizer, exchange)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._task.loss(self.model).backward()
        self._optimizer.step()

    def barrier(self) -> None:
        self._hvd.allreduce(torch.zeros(1), name="benchmark.barrier")

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        from dpro_integrations.horovod_torch import autotune

        return autotune(self._optimizer, **settings)

    def close(self) -> None:
        self.barrier()
        self._hvd.shutdown()


LOOPS: dict[str, Any] = {"ddp": DDPLoop, "horovod": HorovodLoop}


def put(adapter: Adapter, plan: Plan | None) -> None:
    """Put ``plan`` in force, None: the job's own settings."""
    adapter.revert()
    if plan is not None:
        adapter.apply(plan)
