"""Small DDP jobs on the CPU: each function here is what one rank does, and returns what tests look at.

Weights are compared as digests, so "bit-equal" is what it says. Inputs depend on the rank and the step
only, never on what dpro does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.frameworks.patches import patch

WIDTH = 64
#: ms by which step times differ does not matter in these jobs: the plan is put in force in any case
CAPS = [0.01, 0.03]
Each = Callable[[int, DDP, Any], None]


@contextmanager
def group() -> Iterator[int]:
    """The job's process group; gives the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        settle()
        dist.destroy_process_group()


def settle() -> None:
    """Let gloo's threads let go of the last all-reduce.

    In torch 2.13 a process group that goes away at that moment, with the reducer that holds it, joins
    these threads with the GIL held, which they wait for: a deadlock at the end of a job, dpro or not.
    """
    time.sleep(0.1)


def mlp(depth: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def digest(module: nn.Module) -> str:
    """Of every bit of every parameter and buffer."""
    found = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def bucket_plan(ddp: DDP, caps: list[float] | None = None, **more: Any) -> Any:
    """A plan that fits this job."""
    from dpro.plan import Plan
    from dpro_integrations.torch_ddp import TorchDDPAdapter

    return Plan(fingerprint=TorchDDPAdapter(ddp, "fingerprint").fingerprint(), bucket_caps=caps or CAPS, **more)


def decide(kept: bool) -> None:
    """Take the clock out of the verdict."""
    import dpro.tuner
    from dpro.verdict import Comparison

    patch(dpro.tuner, "compare", lambda *_: Comparison(0.9 if kept else 1.1, 0.0, kept))


def tuned(ddp: DDP, optimizer: torch.optim.Optimizer, tune: str, caps: list[float] | None = None) -> Any:
    """``tune``: "" no dpro, "plan" a given plan, "search" the whole way; gives the tuner."""
    from dpro_integrations import torch_ddp

    if not tune:
        return None
    if tune == "search":
        force_plans(caps)
    return torch_ddp.autotune(ddp, optimizer=optimizer, plan=bucket_plan(ddp, caps) if tune == "plan" else None)[1]


def force_plans(caps: list[float] | None = None) -> None:
    """The real planner; where its search finds nothing better on these tiny nets, one plan anyhow."""
    import dpro.tuner
    from dpro.plan import Plan
    from dpro.planning import Planned, make_plans
    from dpro_integrations import torch_ddp

    def planner(blobs: Any, knobs: Any, fingerprint: Any, *rest: Any) -> Any:
        try:
            planned = make_plans(blobs, knobs, fingerprint, *rest)
        except ValueError as error:
            if "cost of synchronisation is unknown" not in str(error):
                raise
            # on a busy machine an all-reduce of 64 KiB may be over before the call that launched it
            planned = Planned(unprofiled_ms=[1.0], replayed_ms=1.0, capture_overhead_pct=0.0)
        if knobs and not planned.plans:
            planned.plans = [("forced", Plan(fingerprint=fingerprint, bucket_caps=caps or CAPS, predicted_ms=1.0))]
        return planned

    def tuner(*args: Any, **kwargs: Any) -> Any:
        return dpro.tuner.Tuner(*args, planner=planner, **kwargs)

    patch(torch_ddp, "Tuner", tuner)


def report(ddp: DDP, tuner: Any, **more: Any) -> dict[str, Any]:
    outcome = tuner.outcome if tuner is not None else None
    return {
        "weights": digest(ddp.module),
        "verdict": outcome.verdict.name if outcome else "",
        "reason": outcome.reason if outcome else "",
        "buckets": buckets(ddp),
    } | more


def buckets(ddp: DDP) -> list[list[int]]:
    from dpro_integrations.torch_rewrap import bucket_parameters

    return bucket_parameters(ddp)


def fit(
    ddp: DDP,
    optimizer: torch.optim.Optimizer,
    tuner: Any,
    steps: int = 50,
    *,
    dtype: torch.dtype = torch.float32,
    each: Each = lambda step, ddp, tuner: None,
) -> dict[str, Any]:
    """A plain loop; ``each`` is called after every step."""
    for step in range(steps):
        optimizer.zero_grad()
        ddp(batch(step, dtype)).float().square().mean().backward()
        optimizer.step()
        each(step, ddp, tuner)
    return report(ddp, tuner)


def plain(
    tune: str = "",
    steps: int = 50,
    kept: bool | None = True,
    dtype: str = "float32",
    momentum: float = 0.9,
    **ddp_arguments: Any,
) -> dict[str, Any]:
    """The ordinary job."""
    if kept is not None:
        decide(kept)
    with group():
        ddp = DDP(mlp(dtype=getattr(torch, dtype)), **ddp_arguments)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=momentum)
        tuner = tuned(ddp, optimizer, tune)
        found = fit(ddp, optimizer, tuner, steps, dtype=getattr(torch, dtype))
        if tuner is not None:
            tuner.close()
            found = report(ddp, tuner)
        return found
