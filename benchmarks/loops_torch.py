"""Training loops in torch: DistributedDataParallel, and Horovod's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.loops import MEET_S, MOMENTUM, RATE
from benchmarks.models import Task, make
from dpro.adapter import Adapter
from dpro.plan import Plan
from dpro.tuner import Tuner


def _task(model: str, seed: int, emulated: bool) -> Task:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return make(model, emulated)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)


def _ready(model: torch.nn.Module, step: Callable[[], None]) -> list[tuple[str, int]]:
    """The order in which one ``step`` accumulates the gradients of ``model``."""
    order: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[torch.Tensor], None]:
        return lambda p: order.append((name, p.numel() * p.element_size()))

    hooks = [p.register_post_accumulate_grad_hook(note(name)) for name, p in model.named_parameters()]
    step()
    for hook in hooks:
        hook.remove()
    return order


def _blocks(model: torch.nn.Module, emulated: bool) -> list[str]:
    """All that a compiler can have, for ``Plan.compile_regions``: every candidate."""
    from dpro_integrations.torch_regions import candidates

    return [] if emulated else list(candidates(model))


class DDPLoop:
    """DistributedDataParallel over gloo, found by torchrun's environment."""

    runs_behind = False

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from dpro_integrations.torch_ddp import TorchDDPAdapter

        task = _task(model, seed, emulated)
        dist.init_process_group("gloo")
        self._dist, self._task = dist, task
        self.rank = dist.get_rank()
        self._ddp = DistributedDataParallel(task.model)
        self._optimizer = _optimizer(task.model)
        self._emulated = emulated
        self.adapter: Adapter = TorchDDPAdapter(self._ddp, tag="benchmark")

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._task.loss(self._ddp).backward()
        self._optimizer.step()

    def ready(self) -> list[tuple[str, int]]:
        return _ready(self._task.model, self.step)

    def prepare(self, plans: Sequence[Plan]) -> None:
        pass  # nothing is

    def barrier(self) -> None:
        self._dist.barrier()

    def layers(self) -> list[str]:
        return _blocks(self._task.model, self._emulated)

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        from dpro_integrations.torch_ddp import autotune

        return autotune(self._ddp, optimizer=self._optimizer, **settings)[1]

    def close(self) -> None:
        self.barrier()
        self._dist.destroy_process_group()


class HorovodLoop:
    """``hvd.DistributedOptimizer`` over gloo, found by horovodrun's environment."""

    runs_behind = False

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        import horovod.torch as hvd

        from dpro_integrations.horovod_exchange import join_exchange
        from dpro_integrations.horovod_torch import HorovodTorchAdapter

        task = _task(model, seed, emulated)
        hvd.init()
        self._hvd, self._task = hvd, task
        self.rank = hvd.rank()
        named = list(task.model.named_parameters())
        self._optimizer = hvd.DistributedOptimizer(_optimizer(task.model), named_parameters=named)
        hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
        exchange = join_exchange(hvd.rank(), hvd.size(), "benchmark", MEET_S)
        self.adapter: Adapter = HorovodTorchAdapter(self._optimizer, exchange)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._task.loss(self._task.model).backward()
        self._optimizer.step()

    def ready(self) -> list[tuple[str, int]]:
        return _ready(self._task.model, self.step)

    def prepare(self, plans: Sequence[Plan]) -> None:
        pass  # nothing is

    def barrier(self) -> None:
        self._hvd.allreduce(torch.zeros(1), name="benchmark.barrier")

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        from dpro_integrations.horovod_torch import autotune

        return autotune(self._optimizer, **settings)

    def close(self) -> None:
        self.barrier()
        self._hvd.shutdown()
