"""A captured Horovod job: what one rank does, and what it leaves for the test to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import optimizer as horovod_optimizer
from torch import nn

from tests.frameworks.horovod_torch.jobs import distribute, job

LAYERS, WIDTH, STEPS = 8, 192, 3


def captured(into: str, grouped: bool) -> dict[str, Any]:
    """Capture three steps into ``into``; what was left behind on the optimizer and the module."""
    with job():
        return _capture(Path(into), grouped)


def _capture(folder: Path, grouped: bool) -> dict[str, Any]:
    from dpro_integrations.horovod_capture import Capture
    from dpro_integrations.host_load import StepCpu

    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    parameters = list(net.parameters())
    groups = [parameters[i : i + 5] for i in range(0, len(parameters), 5)] if grouped else None
    optimizer = distribute(net, groups=groups)
    before = set(vars(optimizer)), horovod_optimizer.synchronize

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(256, WIDTH)).sum().backward()
        optimizer.step()

    for _ in range(4):
        step()
    capture = Capture(optimizer, usual_s=10.0, cpu=StepCpu())
    for _ in range(STEPS):
        step()
        capture.mark_step()
    capture.finish().save(folder / f"rank{hvd.rank()}.npz")
    Capture(optimizer, usual_s=10.0, cpu=StepCpu()).abort()
    step()
    return {"clean": before == (set(vars(optimizer)), horovod_optimizer.synchronize)}
