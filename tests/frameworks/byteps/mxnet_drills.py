"""Gluon jobs with BytePS and a difference: each is trained without dpro and with it, all in one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import byteps.mxnet as bps
import mxnet as mx
from mxnet import autograd, gluon

from dpro_integrations import byteps_partitions
from dpro_integrations.mxnet import autotune
from tests.frameworks.byteps import mxnet_job
from tests.frameworks.byteps.forced import force
from tests.frameworks.byteps.partition_jobs import RATE, attached, digest
from tests.frameworks.launch import QUICK

STEPS = 40


def trained(
    dpro: bool,
    steps: int = STEPS,
    passes: int = 1,
    before: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    each: Callable[[Any, Any], None] = lambda net, tuner: None,
) -> dict[str, Any]:
    """A plain loop. ``passes``: micro-batches of a step; ``before``: is around it; ``each``: is called after steps."""
    mx.random.seed(1)
    net = mxnet_job.network()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    if passes > 1:
        net.collect_params().setattr("grad_req", "add")
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE, "momentum": 0.9})
    x, y = mxnet_job.data()
    loss, rank = gluon.loss.L2Loss(), bps.rank()
    with before():
        stock = attached(trainer)
        tuner = autotune(trainer) if dpro else None

        def train(step: int) -> None:
            for part in range(passes):
                at = (step * passes + part) % len(x)
                with autograd.record():
                    error = loss(net(mx.nd.array(x[at, rank])), mx.nd.array(y[at, rank]))
                error.backward()
            trainer.step(x.shape[2] * passes)
            error.asnumpy()
            if passes > 1:
                for parameter in net.collect_params().values():
                    parameter.zero_grad()

        for step in range(steps):
            train(step)
            each(net, tuner)
        if tuner is not None:
            tuner.close()
            tuner.adapter.revert()
        train(steps)  # what follows the steps lets go at the next one
        if tuner is None:
            return {"weights": digest(net)}
        outcome = tuner.outcome
        told = {"verdict": outcome.verdict.name, "reason": outcome.reason, "steps": tuner.steps}
        return {**told, "weights": digest(net), "left": attached(trainer) != stock}


@contextlib.contextmanager
def own_profiler() -> Iterator[None]:
    mx.profiler.set_config(profile_imperative=True, aggregate_stats=False, filename=f"own-{bps.rank()}.json")
    mx.profiler.set_state("run")
    try:
        yield
    finally:
        mx.nd.waitall()
        mx.profiler.set_state("stop")


def evaluate(net: Any, tuner: Any) -> None:
    """Work that is no training, between two steps."""
    net(mx.nd.ones((4, mxnet_job.WIDTH))).asnumpy()


DRILLS: dict[str, dict[str, Any]] = {
    "short": {"steps": 5},
    "accumulated": {"passes": 2},
    "evaluated": {"each": evaluate},
    "own profiler": {"before": own_profiler},
}


def all_drills(runs: str) -> dict[str, Any]:
    """By drill, what came of it without dpro and with it."""
    os.environ.update(QUICK, DPRO_RUNS_DIR=runs, DPRO_CAPTURE_STEPS="2")
    # every drill has trainers of its own, with bounds that nobody else uses
    byteps_partitions.MOST_BOUNDS, byteps_partitions.MOST_GRADIENTS = 40, 64
    force(kept=True)
    return {name: [trained(False, **what), trained(True, **what)] for name, what in DRILLS.items()}


def dying(state: str, runs: str) -> None:
    """Rank 1 kills itself when the tuner is in ``state``; APPLY: rank 0 waits for it then."""
    os.environ.update(QUICK, DPRO_RUNS_DIR=runs, DPRO_CAPTURE_STEPS="2", DPRO_TIMEOUT_S="10")
    force(kept=True)

    def die() -> None:
        Path("died").write_text(json.dumps(state))
        os.kill(os.getpid(), signal.SIGKILL)

    def each(net: Any, tuner: Any) -> None:
        if bps.rank() != 1:
            return
        if state == "APPLY":
            tuner.adapter.apply = lambda *_: die()
        elif tuner.state.name == state:
            die()

    trained(True, 10**6, each=each)


def endless(runs: str) -> None:
    """Says when it is captured, and tunes on."""
    os.environ.update(QUICK, DPRO_RUNS_DIR=runs, DPRO_CAPTURE_STEPS="100000", DPRO_TIMEOUT_S="10")

    def each(net: Any, tuner: Any) -> None:
        if tuner.state.name == "CAPTURE":
            Path(f"captured-{bps.rank()}").touch()

    trained(True, 10**6, each=each)
