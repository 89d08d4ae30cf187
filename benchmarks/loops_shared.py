"""Loops in torch whose ranks share each batch: what a slow rank can be spared (:mod:`benchmarks.hetero`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops_torch import DDPLoop, HorovodLoop
from benchmarks.models import make
from dpro.tuner import Tuner
from dpro_integrations import torch_micro
from dpro_integrations.torch_shares import SharedBatchSampler

#: Global batches in the data set.
_BATCHES = 8


class _Shared:
    """The part that both have: data, sampler, a step that counts a batch by its size."""

    def __init__(self, name: str, model: nn.Module, rank: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)  # all ranks walk through one data set
            task = make(name)
        size = 2 * len(task.inputs)
        copies = [_BATCHES * size // len(task.inputs)]
        inputs = task.inputs.repeat(*copies, *[1] * (task.inputs.ndim - 1))
        if inputs.is_floating_point():
            inputs = inputs + 0.01 * torch.arange(len(inputs)).reshape(-1, *[1] * (inputs.ndim - 1)) / len(inputs)
        labels = torch.arange(len(inputs)) % (int(task.labels.max()) + 1)
        self.data = TensorDataset(inputs, labels)
        self.sampler = SharedBatchSampler(self.data, size, rank=rank, world_size=2)
        self._model = model
        self._batches = self._endless()

    def _endless(self) -> Iterator[list[Tensor]]:
        epoch = 0
        while True:
            self.sampler.set_epoch(epoch)
            yield from DataLoader(self.data, batch_sampler=self.sampler)
            epoch += 1

    def backward(self) -> None:
        """Of the next batch."""
        torch_micro.step(self._model, _loss, next(self._batches))

    def off(self, model: nn.Module, shares: list[int], reduce_: Any) -> float:
        """The ranks' gradient of the first batch dealt out by ``shares`` less one device's, over the largest of it."""
        model.zero_grad()
        dealt: list[list[int]] = []
        for rank in range(2):
            here = SharedBatchSampler(self.data, self.sampler.batch_size, rank=rank, world_size=2)
            here.deal(shares)
            dealt.append(next(iter(here)))
        batch, whole = [column[dealt[self.sampler.rank]] for column in self.data.tensors], [*dealt[0], *dealt[1]]
        torch_micro.step(self._model, _loss, batch)
        reduce_()
        ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        alone = torch.autograd.grad(_loss(model, [c[whole] for c in self.data.tensors]), list(model.parameters()))
        largest = max(float(g.abs().max()) for g in alone)
        return max(float((a - b).abs().max()) for a, b in zip(ours, alone, strict=True)) / largest


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


class _SharedStep:
    """A step of the batch that was dealt out, whoever synchronises it."""

    _shared: _Shared
    _optimizer: Any

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._shared.backward()
        self._optimizer.step()


class SharedDDPLoop(_SharedStep, DDPLoop):
    """DistributedDataParallel."""

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        super().__init__(model, seed, emulated)
        self._shared = _Shared(model, self._ddp, self.rank)
        self.adapter.share_batches(self._shared.sampler)  # type: ignore[attr-defined]

    def gradients_off(self, shares: list[int]) -> float:
        """See :meth:`_Shared.off`."""
        return self._shared.off(self._task.model, shares, lambda: None)

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        from dpro_integrations.torch_ddp import autotune

        return autotune(self._ddp, optimizer=self._optimizer, sampler=self._shared.sampler, **settings)[1]


class SharedHorovodLoop(_SharedStep, HorovodLoop):
    """``hvd.DistributedOptimizer``."""

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        super().__init__(model, seed, emulated)
        self._shared = _Shared(model, self._task.model, self.rank)
        self.adapter.share_batches(self._shared.sampler)  # type: ignore[attr-defined]

    def gradients_off(self, shares: list[int]) -> float:
        """See :meth:`_Shared.off`."""
        off = self._shared.off(self._task.model, shares, self._optimizer.synchronize)
        self._optimizer.zero_grad()
        return off

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        from dpro_integrations.horovod_torch import autotune

        return autotune(self._optimizer, sampler=self._shared.sampler, **settings)
