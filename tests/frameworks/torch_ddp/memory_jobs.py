"""Jobs whose activations are most of their memory (see ``jobs.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.frameworks.patches import patch
from tests.frameworks.torch_ddp.jobs import WIDTH, batch, digest, group

#: Blocks of :func:`net`: a run of modules, and one.
RUN_AND_ONE = ["1.0..3", "2.0"]


def over_budget(budget: int = 0, steps: int = 26, parts: bool = False, dropout: float = 0.1) -> dict[str, Any]:
    """``budget``: bytes, 0: no dpro. ``parts``: its batches can be cut, and there is nothing else to choose."""
    from dpro_integrations import torch_ddp

    if parts:
        without_blocks(torch_ddp.TorchDDPAdapter)
    with group() as rank:
        ddp = DDP(net(dropout))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        tuner = torch_ddp.autotune(ddp, optimizer=optimizer, memory_bytes=budget)[1] if budget else None
        return trained(ddp, optimizer, tuner, rank, steps, parts)


def to_and_fro(plans: bool) -> dict[str, Any]:
    """See :func:`switched`."""
    from dpro_integrations.torch_ddp import TorchDDPAdapter

    with group() as rank:
        ddp = DDP(net())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        adapter = TorchDDPAdapter(ddp) if plans else None
        return switched(ddp, ddp.module, optimizer, adapter, rank, {"bucket_caps": [0.01]})


def user_error(plans: bool) -> dict[str, Any]:
    """See :func:`broken_off`."""
    from dpro_integrations.torch_ddp import TorchDDPAdapter

    with group() as rank:
        ddp = DDP(net(0.0))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        return broken_off(ddp, optimizer, TorchDDPAdapter(ddp) if plans else None, rank)


def net(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def without_blocks(adapter: Any) -> None:
    """Have an adapter's class offer none."""
    from dpro.adapter import Knob

    offered = adapter.capabilities
    patch(adapter, "capabilities", lambda self: offered(self) - {Knob.RECOMPUTE})


def loss_of(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    loss: Tensor = (model(data["x"]) - data["y"]).square().mean()
    return loss


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range,
    parts: bool = False,
) -> list[float]:
    """The plain loop, or that of batches that can be cut, whose losses it gives."""
    from dpro_integrations import torch_micro

    losses = []
    for step in steps:
        optimizer.zero_grad()
        data = {"x": batch(step, rank=rank).repeat(256, 1), "y": batch(step, rank=rank).repeat(256, 1)[:, :1]}
        if parts:
            losses.append(float(torch_micro.step(model, loss_of, data)))
        else:
            loss_of(model, data).backward()
        optimizer.step()
    return losses


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tuner: Any,
    rank: int,
    steps: int,
    parts: bool = False,
) -> dict[str, Any]:
    """Train, and close ``tuner`` (None: no dpro). Gives weights, and what came of it."""
    losses = train(model, optimizer, rank, range(steps), parts)
    found = {
        "weights": digest(model),
        "forwards": len(recomputed(model)),
        "losses": losses,
        "values": [float(p.double().sum()) for p in model.parameters()],
    }
    if tuner is not None:
        tuner.close()
        outcome = tuner.outcome
        found["verdict"], found["reason"] = outcome.verdict.name, outcome.reason
        found["plan"] = outcome.plan.settings() if outcome.plan else {}
        found["predicted_bytes"] = outcome.plan.predicted_bytes if outcome.plan else None
        found["peak"] = outcome.planned.peak_bytes if outcome.planned else None
        found["warnings"] = outcome.planned.warnings if outcome.planned else []
        found["measured"] = [arm.peak_bytes for arm in outcome.arms[1:]]
    return found


def switched(
    model: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, adapter: Any, rank: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Blocks recomputed, others with ``more`` of a plan, none, ``more`` alone, none: two steps each. Then plans that
    don't fit.

    Args:
        inner: what names are below.
        adapter: of the job; None: no dpro.
    """
    from dpro.errors import PlanError
    from dpro.plan import Plan

    found: dict[str, Any] = {"in_force": [], "errors": []}
    turns: list[dict[str, Any]] = [{"recompute": RUN_AND_ONE}, {"recompute": ["0.0..1"]} | more, {}, more, {}]
    for turn, settings in enumerate(turns):
        if adapter is not None and settings:
            adapter.apply(Plan(fingerprint=adapter.fingerprint(), **settings))
        elif adapter is not None:
            adapter.revert()
        found["in_force"].append(recomputed(inner))
        train(model, optimizer, rank, range(2 * turn, 2 * turn + 2))
    for block in ("1.9", "1.0..9") if adapter is not None else ():
        for call in (adapter.prepare, adapter.apply):
            try:
                call(Plan(fingerprint=adapter.fingerprint(), recompute=["0.0", block]))
            except PlanError as error:
                found["errors"].append(str(error))
    if adapter is not None:
        adapter.close()
    return found | {"weights": digest(model), "left": recomputed(inner)}


def recomputed(model: nn.Module) -> list[str]:
    """Modules that have a forward pass of their own put on them."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def broken_off(model: nn.Module, optimizer: torch.optim.Optimizer, adapter: Any, rank: int) -> dict[str, Any]:
    """Batches in two parts (``adapter`` None: whole). The job's loss raises in step 3, where there are parts in the
    second one; the job leaves that batch out. Gives what the weights are."""
    from dpro.plan import Plan
    from dpro_integrations import torch_micro

    torch_micro.cutting(model)
    if adapter is not None:
        adapter.apply(Plan(fingerprint=adapter.fingerprint(), accumulate=2))
    skipped = 0
    for step in range(6):
        optimizer.zero_grad()
        calls = 0

        def loss_of(model: nn.Module, x: Tensor, step: int = step) -> Tensor:
            nonlocal calls
            calls += 1
            if step == 3 and calls == (1 if adapter is None else 2):
                raise ArithmeticError("the user's own mistake")
            loss: Tensor = model(x).square().mean()
            return loss

        try:
            torch_micro.step(model, loss_of, batch(step, rank=rank))
        except ArithmeticError:
            skipped += 1
            continue
        optimizer.step()
    if adapter is not None:
        adapter.revert()
        adapter.close()
    return {"values": [p.flatten().tolist() for p in model.parameters()], "skipped": skipped}
