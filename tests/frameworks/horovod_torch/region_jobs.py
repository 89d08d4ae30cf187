"""A Horovod job with submodules that torch.compile compiles (see ``jobs.py``)."""

from __future__ import annotations

from typing import Any

from tests.frameworks.horovod_torch.jobs import distribute, fingerprint, fit, job
from tests.frameworks.torch_ddp.jobs import decide
from tests.frameworks.torch_ddp.region_jobs import compiled_in, net, reached


def regions(tune: str, names: list[str], groups: list[list[str]] | None = None) -> dict[str, Any]:
    """As ``tests.frameworks.torch_ddp.region_jobs:regions``; and what is known of the model that nobody named."""
    import torch

    from dpro.adapter import Knob
    from dpro.plan import Plan
    from dpro_integrations import horovod_torch

    decide(True)
    with job() as rank:
        model = net()
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
        torch.manual_seed(rank)
        tuner = None
        if tune:
            plan = Plan(fingerprint=fingerprint(optimizer), compile_regions=names, tensor_groups=groups)
            tuner = horovod_torch.autotune(optimizer, plan=plan, regions_s=10.0)
        found = fit(model, optimizer, tuner)
        return found | {
            "numbers": {name: t.double().flatten().tolist() for name, t in model.state_dict().items()},
            "compiled": compiled_in(model, reached(model)),
            "allowed": tuner is not None and Knob.COMPILE_REGIONS in tuner.adapter.capabilities(),
        }
