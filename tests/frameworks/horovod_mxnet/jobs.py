"""Small Gluon jobs with Horovod on the CPU: each function here is what one rank does, and returns what tests look at.

Weights are compared as digests of their bits, and inputs depend on the rank and the step only. ``tune``: "" no dpro,
"plan" a given plan, "search" the whole way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from tests.frameworks.patches import patch

WIDTH = 16
#: Two groups; the head's bias is in none.
GROUPS = [
    ["net_head_weight", "net_d3_bias", "net_d3_weight"],
    ["net_d2_bias", "net_d2_weight", "net_d1_bias", "net_d1_weight", "net_d0_bias", "net_d0_weight"],
]
Each = Callable[[int, Any, Any], None]


@contextmanager
def job(**arguments: Any) -> Iterator[int]:
    """What the launcher sets, then hvd.init() with ``arguments``; gives the rank."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    place |= {"HOSTNAME": "localhost", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    os.environ.update({f"HOROVOD_{name}": value for name, value in place.items()})
    hvd.init(**arguments)
    try:
        yield hvd.rank()
    finally:
        mx.nd.waitall()
        hvd.shutdown()


def initialised(net: Any, hybrid: bool = True, **flags: Any) -> Any:
    """``net`` with weights that are the same in every job.

    It must not have run before they are broadcast: inference leaves weights of convolutions in oneDNN's own layout,
    which Horovod can't send.
    """
    mx.random.seed(7)
    net.initialize(mx.init.Xavier())
    if hybrid:
        net.hybridize(**flags)
    return net


def mlp(hybrid: bool = True, prefix: str = "net_", **flags: Any) -> Any:
    """Four layers and a head."""
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        for k in range(4):
            net.add(nn.Dense(WIDTH, activation="tanh", in_units=WIDTH, prefix=f"d{k}_"))
        net.add(nn.Dense(1, in_units=WIDTH, prefix="head_"))
    return initialised(net, hybrid, **flags)


def batch(step: int, rank: int = 0, shape: tuple[int, ...] = (8, WIDTH), dtype: str = "float32") -> Any:
    values = np.random.RandomState(1000 * step + rank).randn(*shape)
    return mx.nd.array(values, dtype=dtype)


def digest(net: Any, trained: bool = True) -> str:
    """Of the weights, or of what a rank has for itself (the running sums of batch norm)."""
    found = hashlib.sha256()
    for name, parameter in sorted(net.collect_params().items()):
        if ("running" not in name) == trained:
            found.update(parameter.data().asnumpy().tobytes())
    return found.hexdigest()


def distribute(net: Any, optimizer: str = "sgd", **arguments: Any) -> Any:
    """The trainer of a job that follows Horovod's guide."""
    parameters = net.collect_params()
    hvd.broadcast_parameters(parameters, root_rank=0)
    inner = {"learning_rate": 0.01} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    return hvd.DistributedTrainer(parameters, optimizer, inner, **arguments)


def fingerprint(trainer: Any) -> dict[str, str]:
    from dpro_integrations.mxnet_horovod import HorovodMXNetAdapter

    class Alone:
        rank, world_size = hvd.rank(), hvd.size()

    return HorovodMXNetAdapter(trainer, Alone()).fingerprint()  # type: ignore[arg-type]


def group_plan(trainer: Any, groups: list[list[str]] | None = None, **more: Any) -> Any:
    """A plan that fits this job."""
    from dpro.plan import Plan

    return Plan(fingerprint=fingerprint(trainer), tensor_groups=groups or GROUPS, **more)


def decide(kept: bool) -> None:
    """Take the clock out of the verdict."""
    import dpro.tuner
    from dpro.verdict import Comparison

    patch(dpro.tuner, "compare", lambda *_: Comparison(0.9 if kept else 1.1, 0.0, kept))


def tuned(trainer: Any, tune: str, groups: list[list[str]] | None = None) -> Any:
    """Gives the tuner."""
    from dpro_integrations import mxnet

    if not tune:
        return None
    if tune == "search":
        force_plans(groups)
    return mxnet.autotune(trainer, plan=group_plan(trainer, groups) if tune == "plan" else None)


def force_plans(groups: list[list[str]] | None = None) -> None:
    """The real planner; where its search finds nothing better on these tiny nets, one plan anyhow."""
    import dpro.tuner
    from dpro.plan import Plan
    from dpro.planning import Planned, make_plans
    from dpro_integrations import mxnet

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

    patch(mxnet, "Tuner", tuner)


class Submissions:
    """What the trainers of this process hand to Horovod: its name, or the group's and its size."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []
        single, grouped = hvd.allreduce_, hvd.grouped_allreduce_

        def one(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append([kwargs["name"]])
            return single(tensor, *args, **kwargs)

        def many(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append([kwargs["name"], len(tensors)])
            return grouped(tensors, *args, **kwargs)

        patch(hvd, "allreduce_", one)
        patch(hvd, "grouped_allreduce_", many)


def groups_of(trainer: Any) -> list[list[str]] | None:
    """Names, as they are handed in; None where the stock method does it."""
    own = vars(trainer).get("_allreduce_grads")
    if own is None:
        return None
    return [[trainer._params[i].name for i in group] for group in own.__self__.made()]


def report(net: Any, trainer: Any, tuner: Any, **more: Any) -> dict[str, Any]:
    outcome = tuner.outcome if tuner is not None else None
    return {
        "weights": digest(net),
        "sums": digest(net, trained=False),
        "verdict": outcome.verdict.name if outcome else "",
        "reason": outcome.reason if outcome else "",
        "groups": groups_of(trainer),
    } | more


def train(net: Any, trainer: Any, step: int, look: bool = True, **kind: Any) -> None:
    """One iteration; ``look``: at its loss, as most jobs do, so that Python does not run ahead."""
    x = batch(step, hvd.rank(), **kind)
    with autograd.record():
        loss = net(x).square().mean()
    loss.backward()
    trainer.step(1)
    if look:
        loss.asscalar()


def fit(
    net: Any,
    trainer: Any,
    tuner: Any,
    steps: int = 50,
    each: Each = lambda step, trainer, tuner: None,
    look: bool = True,
    **kind: Any,
) -> dict[str, Any]:
    """A plain loop; ``each`` is called after every step."""
    for step in range(steps):
        train(net, trainer, step, look, **kind)
        each(step, trainer, tuner)
    return report(net, trainer, tuner)


def plain(
    tune: str = "", steps: int = 50, kept: bool | None = True, look: bool = True, hybrid: bool = True,
    flags: dict[str, Any] | None = None, **arguments: Any,
) -> dict[str, Any]:  # fmt: skip
    """The ordinary job."""
    if kept is not None:
        decide(kept)
    if "compression" in arguments:
        arguments["compression"] = getattr(hvd.Compression, arguments["compression"])
    with job():
        net = mlp(hybrid, **(flags or {}))
        trainer = distribute(net, **arguments)
        tuner = tuned(trainer, tune)
        found = fit(net, trainer, tuner, steps, look=look)
        if tuner is not None:
            tuner.close()
            found = report(net, trainer, tuner)
        return found


def small_cnn(prefix: str = "cnn_") -> Any:
    """Two convolutions with batch norm, a branch that is added, two dense layers."""

    class Net(gluon.HybridBlock):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(prefix=prefix)
            with self.name_scope():
                self.first = nn.Conv2D(8, 3, padding=1, in_channels=3, prefix="first_")
                self.norm = nn.BatchNorm(in_channels=8, prefix="norm_")
                self.second = nn.Conv2D(8, 3, padding=1, in_channels=8, prefix="second_")
                self.hidden = nn.Dense(64, in_units=8 * 8 * 8, prefix="hidden_")
                self.out = nn.Dense(10, in_units=64, prefix="out_")

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            x = F.relu(self.norm(self.first(x)))
            x = F.Pooling(x + F.relu(self.second(x)), kernel=(2, 2), stride=(2, 2), pool_type="max")
            return self.out(F.relu(self.hidden(F.flatten(x))))

    return initialised(Net())
