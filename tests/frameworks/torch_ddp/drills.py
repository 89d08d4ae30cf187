"""Jobs with a difference: what could go wrong, or is not the ordinary loop (see ``jobs.py``).

``tune`` is as in :func:`jobs.tuned`; with "" the job has never heard of dpro, which is what weights are
held against.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

from tests.frameworks.patches import patch
from tests.frameworks.torch_ddp.jobs import WIDTH, batch, decide, digest, fit, group, mlp, report, settle, tuned


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


def accumulate(tune: str, no_sync: bool, micro: int = 8, steps: int = 40, rest: int = 3) -> dict[str, Any]:
    """``steps`` updates of ``micro`` batches, then one of ``rest``."""
    decide(True)
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        for step in range(steps + 1):
            optimizer.zero_grad()
            count = micro if step < steps else rest
            for k in range(count):
                quiet = no_sync and k < count - 1
                with ddp.no_sync() if quiet else nullcontext():
                    (ddp(batch(100 * step + k)).square().mean() / micro).backward()
            optimizer.step()
        return report(ddp, tuner, steps=tuner.steps if tuner else steps + 1)


class Odd(nn.Module):
    """Frozen, tied and (sometimes) unused parameters, a buffer that changes, two dtypes."""

    def __init__(self, unused: bool = False, halves: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.tied.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16) if halves else nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.tanh(self.tied(self.frozen(torch.tanh(self.first(x))))))
        x = self.norm(x)
        return self.last(x.to(self.last.weight.dtype)).float()


def odd(tune: str, unused: bool = False, halves: bool = False, **ddp_arguments: Any) -> dict[str, Any]:
    decide(True)
    with group():
        ddp = DDP(Odd(unused, halves), **ddp_arguments)
        optimizer = sgd(ddp)
        return fit(ddp, optimizer, tuned(ddp, optimizer, tune))


def two_optimizers(tune: str) -> dict[str, Any]:
    """One model, its layers shared out between two optimizers."""
    decide(True)
    with group():
        ddp = DDP(mlp())
        parameters = list(ddp.parameters())
        first, second = sgd(ddp), torch.optim.SGD(parameters[:4], lr=0.001)
        first.param_groups[0]["params"] = parameters[4:]
        tuner = tuned(ddp, first, tune)
        for step in range(50):
            first.zero_grad()
            second.zero_grad()
            ddp(batch(step)).square().mean().backward()
            second.step()
            first.step()
        return report(ddp, tuner, steps=tuner.steps if tuner else 50)


def gan(tune: str) -> dict[str, Any]:
    """Two models that train each other; the generator is tuned."""
    decide(True)
    with group():
        generator, critic = DDP(Odd()), DDP(mlp(2))
        optimizers = [sgd(generator), sgd(critic)]
        tuner = tuned(generator, optimizers[0], tune)
        for step in range(50):
            optimizers[1].zero_grad()
            (critic(batch(step)).mean() - critic(generator(batch(step)).detach()).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(generator(batch(step))).mean().backward()
            optimizers[0].step()
        return report(generator, tuner, critic=digest(critic.module))


def profiled(tune: str, first: int, until: int, legacy: bool = False) -> dict[str, Any]:
    """The user profiles steps ``first`` to ``until``; the profile must be good."""
    decide(True)
    seen: list[int] = []
    running: list[Any] = []

    def start() -> None:
        if legacy:
            running.append(torch.autograd.profiler.profile())
            running[0].__enter__()
        else:
            running.append(profile(activities=[ProfilerActivity.CPU]))
            running[0].start()

    def each(step: int, ddp: DDP, tuner: Any) -> None:
        if step == first - 1:
            start()
        elif step == until:
            if legacy:
                running[0].__exit__(None, None, None)
                events = running[0].function_events
            else:
                running[0].stop()
                events = running[0].events()
            seen.append(sum(event.name == "aten::addmm" for event in events))

    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        if first == 0:
            start()
        found = fit(ddp, optimizer, tuner, each=each)
        return found | {"addmm": seen[0], "profiling": torch.autograd._profiler_enabled()}


def comm_hook(tune: str, late: bool = False) -> dict[str, Any]:
    """The user halves what is sent; before tuning begins, or in the midst of it."""

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotations
        halved = bucket.buffer().to(torch.bfloat16)
        work = dist.all_reduce(halved, async_op=True).get_future()
        return work.then(lambda future: future.value()[0].to(bucket.buffer().dtype) / dist.get_world_size())

    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        if not late:
            ddp.register_comm_hook(None, hook)
        tuner = tuned(ddp, optimizer, tune)
        if late:
            ddp.register_comm_hook(None, hook)
        return fit(ddp, optimizer, tuner)


def uneven(tune: str) -> dict[str, Any]:
    """Rank 1 has fewer batches; the user has thought of it."""
    with group() as rank:
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        start = time.monotonic()
        with Join([ddp]):
            for step in range(30 if rank == 0 else 9):
                optimizer.zero_grad()
                ddp(batch(step)).square().mean().backward()
                optimizer.step()
        took_s = time.monotonic() - start
        if tuner is not None:
            tuner.close()
        return report(ddp, tuner, took_s=took_s)


def broken_search(tune: str) -> dict[str, Any]:
    from dpro.search import critical_path

    def optimize(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("out of luck")

    patch(critical_path, "optimize", optimize)
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        return fit(ddp, optimizer, tuned(ddp, optimizer, tune))


def other_hash(tune: str) -> dict[str, Any]:
    """Rank 1 holds another plan."""
    with group() as rank:
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune, caps=[0.01, 0.03] if rank == 0 else [0.02])
        return fit(ddp, optimizer, tuner)


def failing_apply(tune: str, method: str) -> dict[str, Any]:
    """One of the adapter's methods fails on rank 1."""
    decide(False)
    with group() as rank:
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        if tuner is not None and rank == 1:

            def fail(*_: Any) -> Any:
                raise OSError("no luck")

            setattr(tuner.adapter, method, fail)
        return fit(ddp, optimizer, tuner)


def alone(tune: str) -> dict[str, Any]:
    """Rank 1 was started with DPRO=off."""
    with group() as rank:
        if rank == 1:
            os.environ["DPRO"] = "off"
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        start = time.monotonic()
        found = fit(ddp, optimizer, tuner)
        return found | {"took_s": time.monotonic() - start}


def bystander(tune: str) -> dict[str, Any]:
    """The user has an optimizer hook that was registered after ours, and drops the model at the end."""
    decide(True)
    runs: list[int] = []
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        optimizer.register_step_post_hook(lambda *_: runs.append(1))
        found = fit(ddp, optimizer, tuner)
        hooks = len(optimizer._optimizer_step_post_hooks)
        forward_hooks = len(ddp._forward_pre_hooks)
        left = weakref.ref(ddp)
        del ddp, optimizer, tuner
        gc.collect()
        return found | {"runs": len(runs), "hooks": hooks, "forward_hooks": forward_hooks, "freed": left() is None}


def checkpoints(tune: str) -> dict[str, Any]:
    """Save after 10, 20, … steps, of the wrapper and the optimizer, and load the last one into a new job."""
    decide(True)
    keys: list[list[str]] = []

    def each(step: int, ddp: DDP, tuner: Any) -> None:
        if step % 10 == 9:
            keys.append(sorted(ddp.state_dict()))

    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        found = fit(ddp, optimizer, tuned(ddp, optimizer, tune), each=each)
        again = DDP(mlp())
        again.load_state_dict(ddp.state_dict())
        follower = sgd(again)
        follower.load_state_dict(optimizer.state_dict())
        fit(again, follower, None, 5)
        return found | {"keys": keys, "resumed": digest(again.module)}


def kill(tune: str, state: str, victim: int, note: str) -> dict[str, Any]:
    """``victim`` dies when the tuner is in ``state``: between two steps, or in the midst of a meeting."""
    decide(True)

    def die() -> None:
        Path(note).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def each(step: int, ddp: DDP, tuner: Any) -> None:
        if dist.get_rank() == victim and (step == 10 if tuner is None else tuner.state.name == state):
            die()

    with group() as rank:
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        if tuner is not None and rank == victim:
            if state == "PLAN":
                tuner.adapter.exchange.agree = lambda *_: die()
            elif state == "APPLY":
                tuner.adapter.apply = lambda *_: die()
        return fit(ddp, optimizer, tuner, each=each)


def unfinished(tune: str, steps: int, tidy: bool) -> None:
    """Ends in the midst of the tuning, without closing the tuner; ``tidy``: with destroy_process_group()."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp = DDP(mlp())
    optimizer = sgd(ddp)
    tuner = tuned(ddp, optimizer, tune)
    fit(ddp, optimizer, tuner, steps)
    globals()["kept_alive"] = (ddp, optimizer, tuner)
    settle()
    if tidy:
        dist.destroy_process_group()


def activated(tune: str, models: int = 1, own_call: bool = False) -> dict[str, Any]:
    """An unchanged script, DPRO set; ``own_call``: it tunes itself as well."""
    from torch.optim import optimizer as optimizers

    construct = DDP.__init__
    if tune:
        from tests.frameworks.torch_ddp.jobs import force_plans

        decide(True)
        force_plans()
        sys.modules.pop("dpro_integrations.autoload", None)
        importlib.import_module("dpro_integrations.autoload")  # as the .pth file does

    with group():
        ddp = DDP(mlp())
        others = [DDP(mlp(1)) for _ in range(models - 1)]
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, "search") if tune and own_call else None
        found = fit(ddp, optimizer, tuner)
        for other in others:
            fit(other, sgd(other), None, 2)
        return found | {
            "restored": DDP.__init__ is construct,
            "hooks": len(optimizers._global_optimizer_post_hooks),
        }
