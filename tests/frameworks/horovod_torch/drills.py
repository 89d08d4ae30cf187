"""Horovod jobs with a difference: what could go wrong, or is not the ordinary loop (see ``jobs.py``)."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import optimizer as horovod_optimizer
from torch import nn

from tests.frameworks.horovod_torch.jobs import (
    GROUPS,
    distribute,
    fit,
    force_plans,
    groups_of,
    job,
    report,
    tuned,
)
from tests.frameworks.torch_ddp.jobs import WIDTH, batch, decide, digest, mlp

#: Across all layers of :class:`Branches`; "spare.bias" is in none.
ACROSS = [["last.weight", "left.weight", "right.bias"], ["last.bias", "left.bias", "right.weight", "spare.weight"]]


class Branches(nn.Module):
    """Two branches and a spare one, in an order that the caller chooses; ``half``: one of them in fp16."""

    def __init__(self, half: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH).to(torch.float16 if half else torch.float32)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, right_first: bool = False, spare: bool = True) -> torch.Tensor:
        branches = [self.left, self.right] if not right_first else [self.right, self.left]
        if spare:
            branches.append(self.spare)
        outs = [torch.tanh(branch(x.to(branch.weight.dtype))).float() for branch in branches]
        # the same sum in whichever order the branches ran
        left, right = (outs[1], outs[0]) if right_first else (outs[0], outs[1])
        return self.last(left + right + outs[2] if spare else left + right)


def branches(
    tune: str, reorder: bool = False, missing: bool = False, half: bool = False, all_sum: bool = False
) -> dict[str, Any]:
    """``reorder``: rank 1 runs the branches the other way round; ``missing``: it has no spare branch now and then;
    ``all_sum``: the job also calls hvd.allreduce itself."""
    decide(True)
    totals: list[float] = []
    with job() as rank:
        net = Branches(half)
        optimizer = distribute(net)
        tuner = tuned(optimizer, tune, ACROSS)
        for step in range(50):
            optimizer.zero_grad()
            out = net(batch(step, rank=rank), reorder and rank == 1, not (missing and rank == 1 and step % 3))
            loss = out.square().mean()
            loss.backward()
            if all_sum:
                totals.append(float(hvd.allreduce(loss.detach(), name="loss")))
            optimizer.step()
        return report(net, optimizer, tuner, totals=totals)


def remainder(tune: str, passes: int = 4, uneven: bool = False, steps: int = 40) -> dict[str, Any]:
    """Every fifth step has half of its micro-batches (``uneven``: on rank 1 only)."""
    decide(True)
    with job() as rank:
        net = mlp()
        optimizer = distribute(net, backward_passes_per_step=passes)
        tuner = tuned(optimizer, tune)
        for step in range(steps):
            optimizer.zero_grad()
            short = step % 5 == 4 and not (uneven and rank == 0)
            for k in range(passes // 2 if short else passes):
                (net(batch(100 * step + k, rank=rank)).square().mean() / passes).backward()
            optimizer.step()
        return report(net, optimizer, tuner, steps=tuner.steps if tuner else steps)


def clipped(tune: str) -> dict[str, Any]:
    """Horovod's own recipe for gradient clipping, the bound method kept from before the tuning."""
    decide(True)
    with job() as rank:
        net = mlp()
        optimizer = distribute(net)
        tuner = tuned(optimizer, tune)
        for step in range(50):
            optimizer.zero_grad()
            net(batch(step, rank=rank)).square().mean().backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        return report(net, optimizer, tuner)


def gan(tune: str) -> dict[str, Any]:
    """Two models with an optimizer each; one is tuned."""
    decide(True)
    with job() as rank:
        nets = [mlp(), mlp(2)]
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=0.01),
                named_parameters=[(f"{k}.{name}", p) for name, p in net.named_parameters()],
            )
            for k, net in enumerate(nets)
        ]
        groups = [["0.8.weight", "0.8.bias", "0.6.weight"], ["0.0.weight", "0.0.bias"]]
        tuner = tuned(optimizers[0], tune, groups)
        for step in range(50):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                net(batch(step, rank=rank)).square().mean().backward()
                optimizer.step()
        return report(nets[0], optimizers[0], tuner, other=digest(nets[1]), other_groups=groups_of(optimizers[1]))


def sparse(tune: str) -> dict[str, Any]:
    with job() as rank:
        torch.manual_seed(4)
        net = nn.Sequential(nn.EmbeddingBag(50, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
        optimizer = distribute(net, torch.optim.SGD(net.parameters(), lr=0.01))
        tuner = tuned(optimizer, tune, [["1.weight", "1.bias"]])
        for step in range(30):
            optimizer.zero_grad()
            words = torch.randint(50, (8, 4), generator=torch.Generator().manual_seed(1000 * step + rank))
            net(words).square().mean().backward()
            optimizer.step()
        return report(net, optimizer, tuner)


def started_anew(tune: str, at: int) -> dict[str, Any]:
    """The job shuts Horovod down after step ``at`` and starts it again, as an elastic reset does."""
    decide(True)

    def each(step: int, optimizer: Any, tuner: Any) -> None:
        if step == at - 1:
            hvd.shutdown()
            time.sleep(1.0)  # Horovod that is started again while other ranks still end crashes
            hvd.init()

    with job():
        net = mlp()
        optimizer = distribute(net)
        return fit(net, optimizer, tuned(optimizer, tune), 30, each)


def elastic(tune: str) -> dict[str, Any]:
    """A job that says it is elastic (its ranks stay the same here)."""
    with job():
        net = mlp()
        optimizer = distribute(net)
        os.environ["HOROVOD_ELASTIC"] = "1"
        return fit(net, optimizer, tuned(optimizer, tune), 30)


def failing_apply(tune: str, method: str) -> dict[str, Any]:
    """One of the adapter's methods fails on rank 1."""
    decide(False)

    def fail(*_: Any) -> Any:
        raise OSError("no luck")

    with job() as rank:
        net = mlp()
        optimizer = distribute(net)
        tuner = tuned(optimizer, tune)
        if tuner is not None and rank == 1:
            setattr(tuner.adapter, method, fail)
        return fit(net, optimizer, tuner)


def alone(tune: str, off: int) -> dict[str, Any]:
    """Rank ``off`` was started with DPRO=off."""
    with job() as rank:
        if rank == off:
            os.environ["DPRO"] = "off"
        net = mlp()
        optimizer = distribute(net)
        tuner = tuned(optimizer, tune)
        start = time.monotonic()
        found = fit(net, optimizer, tuner)
        return found | {"took_s": time.monotonic() - start}


def kill(tune: str, state: str, victim: int, note: str) -> dict[str, Any]:
    """``victim`` dies when the tuner is in ``state``: between two steps, or in the midst of a meeting."""
    decide(True)

    def die() -> None:
        Path(note).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def each(step: int, optimizer: Any, tuner: Any) -> None:
        if hvd.rank() == victim and tuner.state.name == state:
            die()

    with job() as rank:
        net = mlp()
        optimizer = distribute(net)
        tuner = tuned(optimizer, tune)
        if rank == victim and state == "APPLY":
            tuner.adapter.apply = lambda *_: die()
        return fit(net, optimizer, tuner, each=each)


def late(tune: str, at: int) -> dict[str, Any]:
    """After step ``at`` rank 0 hands in a tensor that rank 1 hands in only when training is over."""
    decide(True)
    handles: list[int] = []

    def hand_in() -> None:
        handles.append(hvd.allreduce_async(torch.ones(3) + hvd.rank(), op=hvd.Sum, name="late on rank 1"))

    def each(step: int, optimizer: Any, tuner: Any) -> None:
        if step == at - 1 and hvd.rank() == 0:
            hand_in()

    with job() as rank:
        net = mlp()
        optimizer = distribute(net)
        found = fit(net, optimizer, tuned(optimizer, tune), each=each)
        if rank == 1:
            hand_in()
        return found | {"sum": hvd.synchronize(handles[0]).tolist()}


def raising(tune: str, at: int) -> None:
    """An exception of the user's in the midst of a backward pass ends rank 1."""
    decide(True)

    def raise_it(_: torch.Tensor) -> None:
        raise ZeroDivisionError("the user's own")

    def each(step: int, optimizer: Any, tuner: Any) -> None:
        if step == at - 1 and hvd.rank() == 1:
            net[2].weight.register_hook(raise_it)

    with job():
        net = mlp()
        optimizer = distribute(net)
        fit(net, optimizer, tuned(optimizer, tune), each=each)


def joined(tune: str, ended: list[int]) -> dict[str, Any]:
    """Ranks have ``ended[rank]`` batches per epoch and join at its end, as Horovod's guide has it for uneven data."""
    decide(True)
    join = hvd.join
    with job() as rank:
        net = mlp()
        optimizer = distribute(net)
        tuner = tuned(optimizer, tune)
        start = time.monotonic()
        for _ in range(2):
            fit(net, optimizer, tuner, ended[rank])
            hvd.join()
            # the one that joined last has all updates
            hvd.broadcast_parameters(net.state_dict(), root_rank=ended.index(max(ended)))
        return report(net, optimizer, tuner, took_s=time.monotonic() - start, restored=hvd.join is join)


def activated(tune: str, optimizers: int = 1, own_call: bool = False) -> dict[str, Any]:
    """An unchanged script, DPRO set; ``own_call``: it tunes itself as well."""
    construct = horovod_optimizer._DistributedOptimizer.__init__
    if tune:
        decide(True)
        force_plans()
        sys.modules.pop("dpro_integrations.autoload", None)
        importlib.import_module("dpro_integrations.autoload")  # as the .pth file does
    with job():
        net, other = mlp(), mlp(1)
        optimizer = distribute(net)
        for _ in range(optimizers - 1):
            hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.01))
        tuner = tuned(optimizer, "search") if tune and own_call else None
        found = fit(net, optimizer, tuner)
        return found | {
            "restored": horovod_optimizer._DistributedOptimizer.__init__ is construct,
            "hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
            "gradient_hooks": sum(len(p._post_accumulate_grad_hooks or {}) for p in net.parameters()),
        }


def captured() -> dict[str, Any]:
    """Two captures of one job, without and with groups: what went together, by the timeline of the last step."""
    from dpro.trace.model import RankTrace
    from dpro_integrations.horovod_capture import Capture
    from dpro_integrations.horovod_groups import Groups
    from dpro_integrations.host_load import StepCpu

    def together(trace: RankTrace) -> list[list[str]]:
        names = [tensor.name for tensor in trace.tensors]
        last = [c for row, c in sorted(trace.collectives.items()) if trace.step[row] == trace.steps - 1]
        return sorted(sorted(names[number] for number in collective.tensors) for collective in last)

    with job():
        net = mlp()
        optimizer = distribute(net)
        fit(net, optimizer, None, 3)
        named = dict(net.named_parameters())
        found = []
        for groups in (GROUPS, [[name] for name in named]):
            Groups(optimizer).set([[named[name] for name in group] for group in groups])
            fit(net, optimizer, None, 3)
            capture = Capture(optimizer, usual_s=1.0, cpu=StepCpu())
            for _ in range(2):
                fit(net, optimizer, None, 1)
                capture.mark_step()
            found.append(together(capture.finish()))
        return {"together": found}
