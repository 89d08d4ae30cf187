"""Jobs whose gradients are reduced in 16 bit by torch's own hooks (see ``jobs.py``)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from dpro.plan import Plan
from tests.frameworks.patches import patch
from tests.frameworks.torch_ddp.jobs import batch, bucket_plan, decide, fit, group, mlp, tuned


def hooks(ddp: DDP) -> list[str]:
    """The communication hooks in force, as DDP has noted them and as its reducer says."""
    return [hook.__name__ for hook, _ in ddp._comm_hooks] + [ddp._get_ddp_logging_data().get("comm_hook", "")]


def given(tune: str, file: str = "", kept: bool = True, dtype: str = "float16", **more: Any) -> dict[str, Any]:
    """A plan file of this job that compresses; ``tune`` "" runs without dpro."""
    from dpro_integrations import torch_ddp

    decide(kept)
    seen: list[list[str]] = []
    with group() as rank:
        ddp = DDP(mlp())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        tuner = None
        if tune:
            path = Path(f"{file}{rank}.json")
            bucket_plan(ddp, gradient_dtype=dtype, **more).save(path)
            tuner = torch_ddp.autotune(ddp, optimizer=optimizer, plan=path)[1]
        found = fit(ddp, optimizer, tuner, each=lambda step, ddp, tuner: seen.append(hooks(ddp)))
        measured = tuner.outcome.measured_ms if tuner else None
        values = torch.cat([p.detach().flatten() for p in ddp.parameters()])[::16].tolist()
        return found | {
            "hooks": hooks(ddp),
            "seen": sorted({name for names in seen for name in names}),
            "values": values,
            "measured_ms": measured,
        }


def offered(tune: str) -> dict[str, Any]:
    """What the search was allowed to change, and in which formats."""
    from dpro.search import critical_path

    told: list[Any] = []
    optimize = critical_path.optimize

    def spy(graph: Any, *, knobs: Any, **more: Any) -> Any:
        told.append((sorted(knob.name for knob in knobs), graph.info["gradient_dtypes"]))
        return optimize(graph, knobs=knobs, **more)

    patch(critical_path, "optimize", spy)
    decide(False)
    with group():
        ddp = DDP(mlp())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        return fit(ddp, optimizer, tuned(ddp, optimizer, tune)) | {"told": told[:1]}


def switched() -> dict[str, Any]:
    """From 16 bit to other buckets to 16 bit and back, without a tuner; a hook of the user's is another matter."""
    from dpro_integrations.torch_ddp import TorchDDPAdapter

    with group():
        ddp = DDP(mlp())
        adapter = TorchDDPAdapter(ddp, "switched")
        narrow, wide = Plan(gradient_dtype="float16"), Plan(bucket_caps=[0.01, 0.03])
        found: list[Any] = []

        def look() -> None:
            for step in range(2):
                ddp(batch(step)).square().mean().backward()
            found.append([hooks(ddp), adapter.why_not(), adapter.obstacle(), bool(pickle.dumps(ddp))])

        for plan in (narrow, wide, narrow):
            adapter.apply(plan)
            look()
        adapter.revert()
        look()
        ddp.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
        foreign = [adapter.why_not(), adapter.obstacle()]
        return {"found": found, "foreign": foreign}


def halves() -> dict[str, Any]:
    """Gradients that are 16 bit already: there is nothing to cast."""
    from dpro_integrations.torch_ddp import TorchDDPAdapter

    with group():
        ddp = DDP(mlp(dtype=torch.bfloat16))
        return {"knobs": sorted(knob.name for knob in TorchDDPAdapter(ddp, "halves").capabilities())}
