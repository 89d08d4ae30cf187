"""Horovod jobs whose ranks share each batch (as ``tests/frameworks/torch_ddp/share_jobs.py``)."""

from __future__ import annotations

from typing import Any

from tests.frameworks.horovod_torch.jobs import job
from tests.frameworks.horovod_torch.memory_jobs import adapter_of
from tests.frameworks.torch_ddp.jobs import WIDTH, decide
from tests.frameworks.torch_ddp.share_jobs import RATE, dealt_out, found, net, sampler_of


def dealt() -> dict[str, Any]:
    """See :func:`tests.frameworks.torch_ddp.share_jobs.dealt_out`."""
    with job() as rank:
        model = net(rank)
        optimizer = distributed(model)
        return dealt_out(model, model, optimizer, adapter_of(optimizer), rank)


def slow_rank(norm: bool = False) -> dict[str, Any]:
    """As :func:`tests.frameworks.torch_ddp.share_jobs.slow_rank`."""
    from dpro_integrations.horovod_torch import autotune

    with job() as rank:
        decide(kept=True)
        model = net(rank, width=4 * WIDTH, layers=6, norm=norm)
        optimizer = distributed(model)
        sampler = sampler_of(64, rank)
        tuner = autotune(optimizer, sampler=sampler, regions_s=0.0, trials=1, search_s=5.0)
        return found(model, model, optimizer, tuner, sampler)


def distributed(model: Any) -> Any:
    import horovod.torch as hvd
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
