"""Horovod jobs whose activations are most of their memory (as ``tests/frameworks/torch_ddp/memory_jobs.py``)."""

from __future__ import annotations

from typing import Any

from tests.frameworks.horovod_torch.jobs import distribute, job
from tests.frameworks.torch_ddp.memory_jobs import broken_off, net, switched, trained, without_blocks


def over_budget(budget: int = 0, steps: int = 26, parts: bool = False, dropout: float = 0.1) -> dict[str, Any]:
    """As :func:`tests.frameworks.torch_ddp.memory_jobs.over_budget`."""
    from dpro_integrations import horovod_torch

    if parts:
        without_blocks(horovod_torch.HorovodTorchAdapter)
    with job() as rank:
        model = net(dropout)
        optimizer = distribute(model)
        tuner = horovod_torch.autotune(optimizer, memory_bytes=budget) if budget else None
        return trained(model, optimizer, tuner, rank, steps, parts)


def to_and_fro(plans: bool) -> dict[str, Any]:
    """See :func:`tests.frameworks.torch_ddp.memory_jobs.switched`."""
    with job() as rank:
        model = net()
        optimizer = distribute(model)
        more = {"tensor_groups": [["6.weight", "5.0.bias"]]}
        return switched(model, model, optimizer, adapter_of(optimizer) if plans else None, rank, more)


def user_error(plans: bool) -> dict[str, Any]:
    """See :func:`tests.frameworks.torch_ddp.memory_jobs.broken_off`."""
    with job() as rank:
        model = net(0.0)
        optimizer = distribute(model)
        return broken_off(model, optimizer, adapter_of(optimizer) if plans else None, rank)


def adapter_of(optimizer: Any) -> Any:
    import horovod.torch as hvd

    from dpro_integrations.horovod_exchange import join_exchange
    from dpro_integrations.horovod_torch import HorovodTorchAdapter

    return HorovodTorchAdapter(optimizer, join_exchange(hvd.rank(), hvd.size(), "memory", 20.0))
