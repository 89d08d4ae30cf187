"""Jobs whose ranks share each batch (see ``jobs.py``)."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.torch_ddp.jobs import WIDTH, decide, group

RATE = 0.05
#: What the first layer takes for a sample, by rank, besides its arithmetic. Ranks sleep, once per pass, so that what
#: else runs on the machine does not make them equals.
SAMPLE_S = (0.7e-3, 4.2e-3)


class Slow(nn.Module):
    """A linear layer that takes ``sample_s`` longer for each sample."""

    def __init__(self, width: int, sample_s: float) -> None:
        super().__init__()
        self.linear, self.sample_s = nn.Linear(width, width), sample_s

    def forward(self, x: Tensor) -> Tensor:
        if self.sample_s:
            time.sleep(len(x) * self.sample_s)
        out: Tensor = self.linear(x)
        return out.tanh()


def dealt() -> dict[str, Any]:
    """See :func:`dealt_out`."""
    from dpro_integrations.torch_ddp import TorchDDPAdapter

    with group() as rank:
        model = net(rank)
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
        return dealt_out(ddp, model, optimizer, TorchDDPAdapter(ddp), rank)


def slow_rank(norm: bool = False) -> dict[str, Any]:
    """``norm``: the model has batch norm."""
    from dpro_integrations.torch_ddp import autotune

    with group() as rank:
        decide(kept=True)
        model = net(rank, width=4 * WIDTH, layers=6, norm=norm)
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
        sampler = sampler_of(64, rank)
        tuner = autotune(ddp, optimizer=optimizer, sampler=sampler, regions_s=0.0, trials=1, search_s=5.0)[1]
        return found(ddp, model, optimizer, tuner, sampler)


def net(rank: int, width: int = WIDTH, layers: int = 3, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    more = [nn.BatchNorm1d(width)] if norm else []
    layers_s = [SAMPLE_S[rank]] + [0.0] * (layers - 1)
    return nn.Sequential(*(Slow(width, sample_s) for sample_s in layers_s), *more, nn.Linear(width, 1))


def loss_of(model: nn.Module, data: Any) -> Tensor:
    x, y = data
    loss: Tensor = (model(x)[:, 0] - y).square().mean()
    return loss


def data_of(width: int, samples: int = 64 * 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(samples, width, generator=generator), torch.randn(samples, generator=generator))


def sampler_of(batch: int, rank: int) -> Any:
    from dpro_integrations.torch_shares import SharedBatchSampler

    return SharedBatchSampler(64 * 8, batch, seed=7, rank=rank, world_size=2)


def train(model: nn.Module, optimizer: Any, sampler: Any, width: int, steps: int) -> list[int]:
    """``steps`` steps of one epoch after another; samples of each."""
    from dpro_integrations import torch_micro

    sizes: list[int] = []
    while len(sizes) < steps:
        for x, y in DataLoader(data_of(width), batch_sampler=sampler):
            optimizer.zero_grad()
            torch_micro.step(model, loss_of, (x, y))
            optimizer.step()
            sizes.append(len(x))
            if len(sizes) == steps:
                break
    return sizes


def alone(model: nn.Module, batch: int, width: int, epochs: list[int]) -> list[float]:
    """What one device's weights are after so many steps of each epoch with whole batches."""
    from dpro_integrations.torch_shares import SharedBatchSampler

    for module in model.modules():
        if isinstance(module, Slow):
            module.sample_s = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for steps in epochs:
        sampler = SharedBatchSampler(64 * 8, batch, seed=7, rank=0, world_size=1)
        for number, data in enumerate(DataLoader(data_of(width), batch_sampler=sampler)):
            if number == steps:
                break
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[float]:
    """Of every parameter a sum and a value."""
    return [float(value) for p in model.parameters() for value in (p.double().mean(), p.flatten()[0])]


def dealt_out(called: nn.Module, model: nn.Module, optimizer: Any, adapter: Any, rank: int) -> dict[str, Any]:
    """Shares put in force and taken back by the adapter between epochs; then some that are none.

    Args:
        called: what a step calls: ``model`` or its wrapper.
    """
    from dpro.errors import PlanError
    from dpro.plan import Plan

    reference, sampler = copy.deepcopy(model), sampler_of(16, rank)
    adapter.share_batches(sampler)
    sizes: list[int] = []
    for shares in (None, [12, 4], [1, 15], None):
        if shares is None:
            adapter.revert()
        else:
            adapter.apply(Plan(fingerprint=adapter.fingerprint(), batch_shares=shares))
        sizes += train(called, optimizer, sampler, WIDTH, 2)
    errors = []
    for wrong in ([9, 9], [16, 0], [8, 4, 4]):
        try:
            sampler.check(wrong)
        except PlanError as error:
            errors.append(str(error))
    adapter.close()
    return {"sizes": sizes, "weights": weights(model), "alone": alone(reference, 16, WIDTH, [2] * 4), "errors": errors}


def found(called: nn.Module, model: nn.Module, optimizer: Any, tuner: Any, sampler: Any) -> dict[str, Any]:
    """Train until the tuner is done, and close it."""
    reference, width = copy.deepcopy(model), 4 * WIDTH
    sizes = train(called, optimizer, sampler, width, 64)
    tuner.close()
    outcome = tuner.outcome
    return {
        "sizes": sizes,
        "verdict": outcome.verdict.name,
        "plan": outcome.plan.settings() if outcome.plan else {},
        "warnings": outcome.planned.warnings if outcome.planned else [],
        "weights": weights(model),
        "alone": alone(reference, 64, width, [8] * 8),
    }
