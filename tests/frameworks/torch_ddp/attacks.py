"""Jobs that were found to break dpro, or to be broken by it (see ``jobs.py``): each was once a wrong result,
a crash or a noise. ``tune`` as in :func:`jobs.tuned`, and "activated": an unchanged script with DPRO set, whose
tuner is made inside ``optimizer.step()``.
"""

from __future__ import annotations

import copy
import importlib
import io
import os
import pickle
import random
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler, _enable_profiler, _prepare_profiler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule

from tests.frameworks.patches import patch
from tests.frameworks.torch_ddp.jobs import batch, decide, fit, force_plans, group, mlp, report, settle, tuned


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


def activate(tune: str) -> str:
    """For ``tuned()``: "" where the environment does it, as the ``.pth`` file would."""
    if tune != "activated":
        return tune
    decide(True)
    force_plans()
    sys.modules.pop("dpro_integrations.autoload", None)
    importlib.import_module("dpro_integrations.autoload")
    return ""


def scheduled_profiler(tune: str, wait: int, warmup: int) -> dict[str, Any]:
    """The user's profiler is only *prepared* for a while, which torch does not tell."""
    seen: list[int] = []
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=wait, warmup=warmup, active=3, repeat=1),
            on_trace_ready=lambda p: seen.append(sum(event.name == "aten::addmm" for event in p.events())),
        ) as users:
            found = fit(ddp, optimizer, tuner, 14, each=lambda *_: users.step())
        if tuner is not None:
            tuner.close()
        return found | report(ddp, tuner, addmm=seen)


def raw_profiler(tune: str) -> dict[str, Any]:
    """The user's profiler is started and stopped by functions that we can't patch: he has them by name."""
    config = ProfilerConfig(
        ProfilerState.KINETO, False, False, False, False, False, torch._C._profiler._ExperimentalConfig()
    )

    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        seen: list[bool] = []
        for step in range(12):
            optimizer.zero_grad()
            if step in (6, 7):
                _prepare_profiler(config, {ProfilerActivity.CPU})
                _enable_profiler(config, {ProfilerActivity.CPU})
            ddp(batch(step)).square().mean().backward()
            if step in (6, 7):
                seen.append(len(_disable_profiler().events()) > 0)
            optimizer.step()
        return report(ddp, tuner, seen=seen)


def seeded(tune: str) -> dict[str, Any]:
    """The ranks decide alike by Python's seeded generator; what dpro imports late draws from it, too."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich" or name.startswith("dpro.report")]:
        del sys.modules[name]  # as in a fresh process
    decide(True)
    random.seed(5)
    torch.manual_seed(7)
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        found = fit(ddp, optimizer, tuned(ddp, optimizer, tune), 80)
        return found | {"drawn": random.random(), "drawn_by_torch": float(torch.rand(()))}


def large_capture(tune: str, nbytes: int) -> dict[str, Any]:
    """A trace of ``nbytes`` goes through the store; then the job needs its store."""
    import dpro.tuner
    from dpro.planning import Planned

    sizes: list[int] = []

    def planner(blobs: list[bytes], *_: Any) -> Planned:
        sizes.extend(len(blob) for blob in blobs)
        return Planned(unprofiled_ms=[1.0], replayed_ms=1.0, capture_overhead_pct=0.0)

    patch(dpro.tuner, "pack_trace", lambda _: os.urandom(1 << 20) * (nbytes >> 20))
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        if tuner is not None:
            tuner._planner = planner
        found = fit(ddp, optimizer, tuner, 12)
        total = torch.ones(())
        dist.all_reduce(total, group=dist.new_group([0, 1]))
        return found | {"total": float(total), "sizes": sizes}


def late_comm_hook(tune: str, at: int) -> dict[str, Any]:
    """Before step ``at`` the user registers a hook that halves the gradients."""

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotations
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / (2 * dist.get_world_size()))

    decide(True)
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)

        def each(step: int, *_: Any) -> None:
            if step == at - 1:
                ddp.register_comm_hook(None, hook)

        return fit(ddp, optimizer, tuner, 30, each=each)


def failing_constructor(tune: str) -> dict[str, Any]:
    """There is no room for a second set of buckets."""

    class Small(DDP):
        made = False

        def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
            if Small.made:
                raise MemoryError("no room for buckets")
            Small.made = True
            super()._ddp_init_helper(*args, **kwargs)

    with group():
        ddp = Small(mlp())
        optimizer = sgd(ddp)
        return fit(ddp, optimizer, tuned(ddp, optimizer, tune), 30)


def frozen_in_step(tune: str, layers: int) -> dict[str, Any]:
    """The first ``layers`` layers need no gradient while the optimizer steps."""
    with group():
        tune = activate(tune)
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        for step in range(30):
            optimizer.zero_grad()
            ddp(batch(step)).square().mean().backward()
            ddp.module[:layers].requires_grad_(False)
            optimizer.step()
            ddp.module[:layers].requires_grad_(True)
        return report(ddp, tuner)


def unfrozen(tune: str) -> dict[str, Any]:
    """A layer starts to train in the midst of the tuning; DDP never learns of it."""
    with group():
        module = mlp()
        module[0].requires_grad_(False)
        ddp = DDP(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        tuner = tuned(ddp, optimizer, tune)

        def each(step: int, *_: Any) -> None:
            if step == 3:
                module[0].requires_grad_(True)

        return fit(ddp, optimizer, tuner, 30, each=each)


def other_module(tune: str) -> dict[str, Any]:
    """The module that trains is not the one DDP was made with: nothing is synchronised, and stays so."""
    with group():
        tune = activate(tune)
        ddp = DDP(mlp())
        ddp.module = mlp()
        optimizer = sgd(ddp)
        return fit(ddp, optimizer, tuned(ddp, optimizer, tune), 30)


def delayed_gradients(tune: str) -> dict[str, Any]:
    """The forward of the next batch runs before the optimizer's step."""
    decide(True)
    with group():
        torch.manual_seed(1)
        ddp = DDP(nn.Linear(64, 8))
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        loss = ddp(batch(0)).square().mean()
        for step in range(30):
            optimizer.zero_grad()
            loss.backward()
            following = ddp(batch(step + 1)).sum() * 0.1
            optimizer.step()
            loss = following
        hooks = len(ddp._forward_pre_hooks) + sum(len(p._post_accumulate_grad_hooks or ()) for p in ddp.parameters())
        return report(ddp, tuner, hooks=hooks)


def short_timeout(tune: str) -> dict[str, Any]:
    """Rank 1 leaves out one step of the optimizer, and a collective waits for 4 s only."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    ddp = DDP(mlp())
    optimizer = sgd(ddp)
    tuner = tuned(ddp, optimizer, tune)
    for step in range(30):
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        if dist.get_rank() == 0 or step != 4:
            optimizer.step()
    found = report(ddp, tuner)
    settle()
    dist.destroy_process_group()
    return found


def broken_stderr(tune: str, kind: str) -> dict[str, Any]:
    """``kind``: "full" disk, "closed" file, or "none"."""
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        out = io.StringIO()
        streams = sys.stdout, sys.stderr
        full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
        if kind == "closed":
            full.close()
        sys.stdout, sys.stderr = out, None if kind == "none" else full
        try:
            found = fit(ddp, optimizer, tuned(ddp, optimizer, tune), 80)
        finally:
            sys.stdout, sys.stderr = streams
        if kind == "full":
            full.flush()  # as Python does at the end, with an exit code if it fails
        return found | {"printed": out.getvalue()}


def copied(tune: str) -> dict[str, Any]:
    """The whole wrapper is pickled and copied after every step, as dpro's hooks come and go."""
    decide(True)
    foreign: list[bool] = []
    left: list[int] = []
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)

        def each(step: int, *_: Any) -> None:
            if step not in (0, 1, 2, 3, 6, 21, 22, 23):
                return
            foreign.append(b"dpro" in pickle.dumps(ddp))
            twin = copy.deepcopy(ddp)
            with twin.no_sync(), torch.no_grad():
                twin(batch(step))
            left.append(len(twin._forward_pre_hooks))

        found = fit(ddp, optimizer, tuner, 30, each=each)
        return found | {"left": sum(left), "foreign": sum(foreign)}


def replaced_optimizer(tune: str) -> dict[str, Any]:
    """While we profile, the job goes on with another optimizer: no step of ours ever comes."""
    import dpro_integrations.torch_capture as torch_capture

    patch(torch_capture, "LEAST_LIMIT_S", 0.2)
    patch(torch_capture, "LIMIT_STEPS", 0.0)
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        tuner = tuned(ddp, optimizer, tune)
        fit(ddp, optimizer, None, 6)
        running = torch.autograd._profiler_enabled()
        optimizer = sgd(ddp)
        fit(ddp, optimizer, None, 2)
        time.sleep(0.3)
        fit(ddp, optimizer, None, 2)
        still = torch.autograd._profiler_enabled()
        if tuner is not None:
            tuner.close()
        return report(ddp, tuner, running=running, still=still)


def child_ends(tune: str) -> dict[str, Any]:
    """A forked child that ends, exit handlers and all, in mid-tuning is no rank that leaves."""
    import atexit

    decide(True)
    statuses: list[int] = []

    def each(step: int, *_: Any) -> None:
        if step in (4, 9):
            child = os.fork()
            if child == 0:
                atexit._run_exitfuncs()
                os._exit(0)
            statuses.append(os.waitpid(child, 0)[1])

    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        return fit(ddp, optimizer, tuned(ddp, optimizer, tune), each=each) | {"statuses": statuses}


def proxies(tune: str) -> dict[str, Any]:
    """The job holds an object that answers the question for its class with an exception."""

    class Lazy:
        def __getattribute__(self, name: str) -> Any:
            raise ReferenceError("gone")

    kept = [Lazy()]
    with group(), nullcontext(kept):
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        decide(True)
        return fit(ddp, optimizer, tuned(ddp, optimizer, tune))


def views(tune: str, allowed: bool) -> dict[str, Any]:
    """What the search was allowed to change."""
    import dpro.planning
    from dpro.search import critical_path

    offered: list[str] = []
    optimize = critical_path.optimize

    def spy(graph: Any, *, knobs: Any, **more: Any) -> Any:
        offered.extend(knob.name for knob in knobs)
        return optimize(graph, knobs=knobs, **more)

    patch(critical_path, "optimize", spy)
    assert dpro.planning  # its import of optimize is late
    if allowed:
        os.environ["DPRO_BUCKET_VIEWS"] = "on"
    with group():
        ddp = DDP(mlp())
        optimizer = sgd(ddp)
        decide(False)
        return fit(ddp, optimizer, tuned(ddp, optimizer, tune)) | {"offered": sorted(set(offered))}
