"""DDP jobs with submodules that torch.compile compiles (see ``jobs.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.frameworks.patches import patch
from tests.frameworks.torch_ddp.jobs import CAPS, WIDTH, batch, bucket_plan, decide, fit, group, tuned


class Block(nn.Module):
    """Statistics that a forward pass changes, random numbers that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.drop(torch.tanh(self.wide(self.norm(x)))))


class Breaks(Block):
    """What it computes depends on numbers: no graph can hold it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out / 2 if float(out.abs().max()) > 1e6 else out


def net(last: type[Block] = Block) -> nn.Sequential:
    torch.manual_seed(1)
    blocks = nn.Sequential(Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), last())
    parts = {"stem": nn.Linear(WIDTH, WIDTH), "blocks": blocks, "head": nn.Linear(WIDTH, 1)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def regions(
    tune: str, names: list[str], kept: bool = True, breaks: bool = False, wrong: bool = False, buckets: bool = True
) -> dict[str, Any]:
    """Weights as numbers, and which submodules are called compiled after the last step.

    Args:
        breaks: the last block can't be compiled.
        wrong: the compiler gives other results than the model.
        buckets: the plan sets DDP's as well.
    """
    from dpro_integrations import torch_compile

    if wrong:
        compiled = torch_compile.compiled

        def doubled(module: nn.Module) -> Any:
            fast = compiled(module)
            return lambda *args: 2 * fast(*args)

        patch(torch_compile, "compiled", doubled)
    decide(kept)
    with group():
        ddp = DDP(net(Breaks if breaks else Block))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        before = config()
        torch.manual_seed(torch.distributed.get_rank())
        plan = bucket_plan(ddp, CAPS, compile_regions=names)
        if not buckets:
            plan = replace(plan, bucket_caps=None)
        tuner = given(ddp, optimizer, plan) if tune else tuned(ddp, optimizer, "")
        found = fit(ddp, optimizer, tuner)
        return found | {
            "numbers": {name: t.double().flatten().tolist() for name, t in ddp.module.state_dict().items()},
            "compiled": compiled_in(ddp.module, reached(ddp.module)),
            "wrapped": sorted(name for name, part in ddp.named_modules() if "_compiled_call_impl" in vars(part)),
            "config": sorted(set(config()) ^ set(before)),
        }


def searched(mode: str) -> dict[str, Any]:
    """The whole way, and what was timed on it. ``mode``: "" without dpro.

    In ``apply`` the times that a region was measured to take compiled are a tenth: tiny layers gain nothing of it, and
    a region is to be proposed and put in force.
    """
    import dpro.tuner
    from dpro.planning import make_plans
    from dpro.trace.regions import Region, RegionTime
    from dpro_integrations import torch_adapter, torch_ddp, torch_regions

    timed: list[Region] = []
    ops: list[str] = []
    time_regions = torch_adapter.time_regions

    def shorter(*args: Any) -> list[Region]:
        timed.extend(time_regions(*args))
        if mode != "apply":
            return timed
        less = [(t.forward_ns, t.backward_ns, t.forward_ns // 10, t.backward_ns // 10) for t in (r.time for r in timed)]
        return [Region(r.layers, r.tensors, r.kind, RegionTime(*ns)) for r, ns in zip(timed, less, strict=True)]

    def planner(*args: Any) -> Any:
        planned = make_plans(*args)
        ops.extend(planned.graph.name_table)
        # no step is the same twice on a busy machine: what was found is tried, whatever is before it
        planned.plans = sorted(planned.plans, key=lambda named: not named[1].compile_regions)
        return planned

    decide(True)
    patch(torch_regions, "_LEAST_SHARE", 0.0)  # of a step that waits for its turn on a busy machine
    patch(torch_adapter, "time_regions", shorter)
    patch(torch_ddp, "Tuner", lambda *args, **more: dpro.tuner.Tuner(*args, planner=planner, **more))
    with group():
        ddp = DDP(net())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        torch.manual_seed(torch.distributed.get_rank())
        tuner = None
        if mode:
            tuner = torch_ddp.autotune(ddp, optimizer=optimizer, mode=mode, regions_s=100.0, capture_steps=3)[1]
        found = fit(ddp, optimizer, tuner)
        numbers = {name: t.double().flatten().tolist() for name, t in ddp.module.state_dict().items()}
        outcome = tuner.outcome if tuner is not None else None
        return found | {
            "numbers": numbers,
            "ops": ops,
            "timed": [[*region.layers, *region.tensors] for region in timed],
            "kinds": len({region.kind for region in timed}),
            "ns": [[r.time.forward_ns, r.time.backward_ns, r.time.fused_ns] for r in timed],
            "planned": outcome.plan.compile_regions if outcome is not None and outcome.plan is not None else None,
            "compiled": compiled_in(ddp.module, reached(ddp.module)),
        }


def given(ddp: DDP, optimizer: torch.optim.Optimizer, plan: Any) -> Any:
    from dpro_integrations import torch_ddp

    return torch_ddp.autotune(ddp, optimizer=optimizer, plan=plan)[1]


def reached(model: nn.Sequential) -> torch.Tensor:
    """What the first block is called with."""
    x: torch.Tensor = model.stem(batch(0, rank=0))
    return x


def compiled_in(model: nn.Sequential, x: torch.Tensor) -> list[str]:
    """Of the blocks, those whose result was made by compiled code, by what autograd says of it."""
    found = []
    for name, block in model.blocks.named_children():
        x = block(x)
        if type(x.grad_fn).__name__ == "CompiledFunctionBackward":
            found.append(f"blocks.{name}")
    return found


def config() -> list[str]:
    """Everything that the compilers are set to, for the whole process."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    parts = torch._dynamo.config, torch._functorch.config, torch._inductor.config
    found = []
    for part in parts:
        for key, value in part.get_config_copy().items():
            found.append(f"{part.__name__}.{key}={sorted(value) if isinstance(value, set) else value}")
    return found
