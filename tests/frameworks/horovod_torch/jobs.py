"""Small Horovod jobs on the CPU: each function here is what one rank does, and returns what tests look at.

As in ``tests/frameworks/torch_ddp/jobs.py``, weights are compared as digests, and inputs depend on the rank
and the step only. ``tune``: "" no dpro, "plan" a given plan, "search" the whole way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import optimizer as horovod_optimizer
from torch import nn

from tests.frameworks.patches import patch
from tests.frameworks.torch_ddp.jobs import batch, decide, digest, mlp

#: Two groups; the head's bias is in none.
GROUPS = [["8.weight", "6.bias", "6.weight"], ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]]
Each = Callable[[int, Any, Any], None]


@contextmanager
def job() -> Iterator[int]:
    """What the launcher sets, then hvd.init(); gives the rank."""
    torch.set_num_threads(1)
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    place |= {"HOSTNAME": "localhost", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    os.environ.update({f"HOROVOD_{name}": value for name, value in place.items()})
    hvd.init()
    try:
        yield hvd.rank()
    finally:
        hvd.shutdown()


def distribute(net: nn.Module, inner: torch.optim.Optimizer | None = None, **arguments: Any) -> Any:
    """The optimizer of a job that follows Horovod's guide."""
    inner = inner or torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), **arguments)


def group_plan(optimizer: Any, groups: list[list[str]] | None = None, **more: Any) -> Any:
    """A plan that fits this job."""
    from dpro.plan import Plan

    return Plan(fingerprint=fingerprint(optimizer), tensor_groups=groups or GROUPS, **more)


def fingerprint(optimizer: Any) -> dict[str, str]:
    from dpro_integrations.horovod_torch import HorovodTorchAdapter

    class Alone:
        rank, world_size = hvd.rank(), hvd.size()

    return HorovodTorchAdapter(optimizer, Alone()).fingerprint()  # type: ignore[arg-type]


def tuned(optimizer: Any, tune: str, groups: list[list[str]] | None = None) -> Any:
    """Gives the tuner."""
    from dpro_integrations import horovod_torch

    if not tune:
        return None
    if tune == "search":
        force_plans(groups)
    return horovod_torch.autotune(optimizer, plan=group_plan(optimizer, groups) if tune == "plan" else None)


def force_plans(groups: list[list[str]] | None = None) -> None:
    """The real planner; where its search finds nothing better on these tiny nets, one plan anyhow."""
    import dpro.tuner
    from dpro.plan import Plan
    from dpro.planning import Planned, make_plans
    from dpro_integrations import horovod_torch

    def planner(blobs: Any, knobs: Any, fingerprint: Any, *rest: Any) -> Any:
        try:
            planned = make_plans(blobs, knobs, fingerprint, *rest)
        except ValueError as error:
            if "cost of synchronisation is unknown" not in str(error):
                raise
            planned = Planned(unprofiled_ms=[1.0], replayed_ms=1.0, capture_overhead_pct=0.0)
        if knobs and not planned.plans:
            forced = Plan(fingerprint=fingerprint, tensor_groups=groups or GROUPS, predicted_ms=1.0)
            planned.plans = [("forced", forced)]
        return planned

    def tuner(*args: Any, **kwargs: Any) -> Any:
        return dpro.tuner.Tuner(*args, planner=planner, **kwargs)

    patch(horovod_torch, "Tuner", tuner)


class Submissions:
    """What the optimizers of this process hand to Horovod, in order: [name] or the group's first name and size."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []
        single, grouped = horovod_optimizer.allreduce_async_, horovod_optimizer.grouped_allreduce_async_

        def one(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append([kwargs["name"]])
            return single(tensor, *args, **kwargs)

        def many(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append([kwargs["name"], len(tensors)])
            return grouped(tensors, *args, **kwargs)

        patch(horovod_optimizer, "allreduce_async_", one)
        patch(horovod_optimizer, "grouped_allreduce_async_", many)

    def take(self) -> list[list[Any]]:
        """Sorted, since the last call."""
        found, self.seen = sorted(self.seen), []
        return found


def groups_of(optimizer: Any) -> list[list[str]] | None:
    """Names, as Horovod's hooks have them."""
    if optimizer._groups is None:
        return None
    return [[optimizer._parameter_names[p] for p in group] for group in optimizer._group_counts]


def report(net: nn.Module, optimizer: Any, tuner: Any, **more: Any) -> dict[str, Any]:
    outcome = tuner.outcome if tuner is not None else None
    return {
        "weights": digest(net),
        "verdict": outcome.verdict.name if outcome else "",
        "reason": outcome.reason if outcome else "",
        "groups": groups_of(optimizer),
    } | more


def fit(
    net: nn.Module,
    optimizer: Any,
    tuner: Any,
    steps: int = 50,
    each: Each = lambda step, optimizer, tuner: None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """A plain loop; ``each`` is called after every step."""
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(step, dtype, hvd.rank())).float().square().mean().backward()
        optimizer.step()
        each(step, optimizer, tuner)
    return report(net, optimizer, tuner)


def plain(tune: str = "", steps: int = 50, kept: bool | None = True, **arguments: Any) -> dict[str, Any]:
    """The ordinary job."""
    if kept is not None:
        decide(kept)
    if "compression" in arguments:
        arguments["compression"] = getattr(hvd.Compression, arguments["compression"])
    if "op" in arguments:
        arguments["op"] = getattr(hvd, arguments["op"])
    with job():
        net = mlp()
        optimizer = distribute(net, **arguments)
        tuner = tuned(optimizer, tune)
        found = fit(net, optimizer, tuner, steps)
        if tuner is not None:
            tuner.close()
            found = report(net, optimizer, tuner)
        return found
