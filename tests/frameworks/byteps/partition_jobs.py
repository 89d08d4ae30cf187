"""What one worker does in the tests of partitions that change in the running job; returns what tests look at."""

from __future__ import annotations

import ctypes
import hashlib
import os
from dataclasses import replace
from typing import Any

import byteps.mxnet as bps
import mxnet as mx
from byteps.mxnet.ops import MXNET_LIB_CTYPES, byteps_declare_tensor, byteps_push_pull
from mxnet import autograd, gluon

from dpro.adapter import Knob
from dpro.errors import PlanError
from dpro.plan import Plan
from dpro_integrations import byteps_partitions, mxnet_partitions
from dpro_integrations.mxnet_byteps import BytePSMXNetAdapter
from tests.frameworks.byteps import mxnet_job, sums
from tests.frameworks.byteps.forced import SMALL, force
from tests.frameworks.launch import QUICK

#: (Nearly) one part for each gradient.
LARGE = sums.PARTITION_BYTES * 2
RATE = 0.01


class Alone:
    """Nobody is asked: every rank calls the same at the same step."""

    def __init__(self) -> None:
        self.rank, self.world_size = bps.rank(), bps.size()


def adapter(trainer: Any) -> BytePSMXNetAdapter:
    return BytePSMXNetAdapter(trainer, Alone())  # type: ignore[arg-type]


def plan_of(made: BytePSMXNetAdapter, bound: int) -> Plan:
    return Plan(fingerprint=made.fingerprint(), partitions=dict.fromkeys(made._places(), bound))


def flow_of(made: BytePSMXNetAdapter, at_once: int) -> Plan:
    """Parts of :data:`SMALL` bytes, the last layer's first."""
    return replace(plan_of(made, SMALL), in_flight_bytes=at_once * SMALL, push_order=[*made._places()][::-1])


def attached(trainer: Any) -> list[Any]:
    push = MXNET_LIB_CTYPES.byteps_mxnet_push_pull_async
    bound = ctypes.c_uint32.in_dll(MXNET_LIB_CTYPES, "_ZN6byteps6common12BytePSGlobal16_partition_bytesE").value
    return [id(push), bound, sorted(vars(trainer)), id(bps.byteps_push_pull)]


def sums_under_plans(rounds: int) -> dict[str, Any]:
    """Gradients of every size, and a large array that the job pushes itself, in every round."""
    parameters = gluon.ParameterDict()
    for n in sums.ELEMENTS:
        parameters.get(f"p{n:05d}", shape=(n,), init="zeros")
    parameters.initialize()
    trainer = bps.DistributedTrainer(parameters, "sgd", {"learning_rate": RATE})
    made = adapter(trainer)
    own = mx.nd.zeros(sums.ELEMENTS[-1])
    byteps_declare_tensor("own")
    rank, ranks = bps.rank(), bps.size()
    wrong: list[str] = []
    seen, checks, at = [], 0, 0

    def some_rounds(label: str) -> None:
        nonlocal checks, at
        for _ in range(rounds):
            at += 1
            for parameter in trainer._params:
                # the trainer divides by the number of workers before it sums
                parameter.grad()[:] = mx.nd.array(sums.pushed(parameter.shape[0], at, rank) * ranks)
            own[:] = mx.nd.array(sums.pushed(own.size, at, rank))
            trainer.allreduce_grads()
            byteps_push_pull(own, name="own", is_average=False)
            for array in (*(p.grad() for p in trainer._params), own):
                checks += 1
                if said := sums.judge(array.asnumpy(), at, ranks):
                    wrong.append(f"{label}: {said}")
        seen.append([label, attached(trainer)])

    some_rounds("before")
    plans = {"small": plan_of(made, SMALL), "large": plan_of(made, LARGE)}
    plans |= {f"flow{n}": flow_of(made, n) for n in (1, 3)}
    order = ["small", "", "large", "small", "", "flow1", "large", "flow3", "", "flow1", "", "copies", "large"]
    for label in order:
        if label == "copies":  # of the pieces, as on a GPU: under names of their own
            mxnet_partitions.SHARES_MEMORY = False
            plans[label] = replace(plans["flow3"], push_order=[*made._places()])
        if label:
            made.prepare(plans[label])
            made.apply(plans[label])
            made.apply(plans[label])
        else:
            made.revert()
            made.revert()
        some_rounds(label or "after")
    made.revert()
    some_rounds("after")
    mxnet_partitions.SHARES_MEMORY = True
    return {"wrong": wrong, "checks": checks, "seen": seen}


def digest(net: Any) -> str:
    found = hashlib.sha256()
    for _, array in sorted(mxnet_job.weights(net).items()):
        found.update(array.tobytes())
    return found.hexdigest()


def train(plans: bool, steps: int = 50, **arguments: Any) -> dict[str, Any]:
    """Put in and out of force in mid-training."""
    mx.random.seed(1)
    net = mxnet_job.network()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE, "momentum": 0.9}, **arguments)
    made = adapter(trainer)
    flows = made.capabilities()
    x, y = mxnet_job.data()
    loss = gluon.loss.L2Loss()
    begun = digest(net)
    for step in range(steps):
        if plans and step in (10, 30):
            made.apply(plan_of(made, SMALL if step == 10 else LARGE))
        if plans and step == 37 and Knob.IN_FLIGHT in flows:
            made.apply(flow_of(made, 2))
        if plans and step in (20, 45):
            made.revert()
        at = step % len(x)
        with autograd.record():
            error = loss(net(mx.nd.array(x[at, bps.rank()])), mx.nd.array(y[at, bps.rank()]))
        error.backward()
        trainer.step(x.shape[2])
    return {"weights": digest(net), "moved": digest(net) != begun, "checksum": made.checksum()}


def noting(push: Any, names: list[str]) -> Any:
    """``push``, with the names that it is given in ``names``."""

    def noted(array: Any, name: Any, *rest: Any) -> Any:
        names.append(name.value.decode())
        return push(array, name, *rest)

    return noted


def frozen(flow: bool, steps: int = 30) -> dict[str, Any]:
    """A layer is frozen and trained again later, with another array for its gradient, while gradients go in turn."""
    mx.random.seed(2)
    net = mxnet_job.network()
    net.initialize(mx.init.Xavier())
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    made = adapter(trainer)
    x, y = mxnet_job.data()
    loss = gluon.loss.L2Loss()
    first = max(trainer._params, key=lambda parameter: parameter.data().size if parameter.shape else 0)
    stock = MXNET_LIB_CTYPES.byteps_mxnet_push_pull_async
    names: list[str] = []
    for step in range(steps):
        if step in (10, 20):
            first.grad_req = "null" if step == 10 else "write"
        if flow and step == 4:
            made.apply(flow_of(made, 2))
            made._partitions._stock = noting(stock, names)
        if step in (12, steps - 1):
            names.append(f"step {step}")
        at = step % len(x)
        with autograd.record():
            error = loss(net(mx.nd.array(x[at, bps.rank()])), mx.nd.array(y[at, bps.rank()]))
        error.backward()
        trainer.step(x.shape[2])
    made._partitions._stock = stock
    made.revert()
    frozen_at, again_at = names.index("step 12"), names.index(f"step {steps - 1}")
    place = made._places()[first.name]
    return {
        "weights": digest(net),
        "frozen": sorted({name for name in names[frozen_at : frozen_at + 4] if name.startswith("gradient_")}),
        "at the end": sorted(names[again_at + 1 :]),
        "place": place,
    }


def foreign() -> dict[str, Any]:
    """Plans that don't fit, and what stands in the way of any."""
    net = mxnet_job.network()
    net.initialize(mx.init.Xavier())
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    made = adapter(trainer)
    names, own = list(made._places()), made.fingerprint()
    before = attached(trainer)
    alike = dict.fromkeys(names, SMALL)
    first = max(names, key=lambda name: net.collect_params()[name].data().size)
    plans = [
        Plan(fingerprint=own | {"model": "another"}, partitions=alike),
        Plan(fingerprint=own | {"world_size": "3"}, partitions=alike),
        Plan(fingerprint=own, partitions=alike, bucket_caps=[1.0]),
        Plan(fingerprint=own, partitions=alike | {"nowhere": SMALL}),
        Plan(fingerprint=own, partitions=dict.fromkeys(names, SMALL + 1)),
        Plan(fingerprint=own),
        replace(flow_of(made, 2), push_order=names[1:]),
        replace(flow_of(made, 2), fingerprint=own | {"model": "another"}),
    ]
    errors = []
    for plan in plans:
        for call in (made.prepare, made.apply):
            try:
                call(plan)
                errors.append("accepted")
            except PlanError as error:
                errors.append(str(error))
    # the one gradient of more than a part is what has to be cut as it says
    made.prepare(Plan(fingerprint=own, partitions={first: SMALL}))
    made.prepare(Plan(fingerprint=own, partitions=alike | {first: LARGE}))
    told = {"errors": errors, "same": attached(trainer) == before, "why_not": made.why_not()}
    bound = ctypes.c_uint32.in_dll(MXNET_LIB_CTYPES, "_ZN6byteps6common12BytePSGlobal16_partition_bytesE")
    bound.value += 4096  # as in a build whose global is another
    told["differs"] = [made.why_not(), len(made.capabilities())]
    bound.value -= 4096
    trainer._allreduce_grads = lambda: None
    told["own way"] = made.why_not()
    del trainer._allreduce_grads
    return told


def bounds_without_end() -> list[str]:
    """One new bound after the other."""
    net = mxnet_job.network()
    net.initialize(mx.init.Xavier())
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    made = adapter(trainer)
    said = []
    for k in range(1, 8):
        try:
            made.apply(plan_of(made, 4096 * k))
            said.append("")
        except PlanError as error:
            said.append(str(error))
    made.apply(plan_of(made, 4096))  # one that was tried
    made.revert()
    return said


def one_rank_fails() -> dict[str, Any]:
    """``apply`` fails on rank 1 before it has declared anything: afterwards all are alike, and a name of the job's
    that comes later has the same number everywhere."""
    net = mxnet_job.network()
    net.initialize(mx.init.Xavier())
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    made = adapter(trainer)
    settle = mxnet_partitions._settle

    def fail() -> None:
        raise RuntimeError("on purpose")

    failed = ""
    if bps.rank() == 1:
        mxnet_partitions._settle = fail
    try:
        made.apply(plan_of(made, SMALL))
    except RuntimeError as error:
        failed = str(error)
    mxnet_partitions._settle = settle
    made.revert()
    later = mx.nd.zeros(sums.ELEMENTS[-1])
    byteps_declare_tensor("later")
    wrong = []
    for at in range(5):
        later[:] = mx.nd.array(sums.pushed(later.size, at, bps.rank()))
        byteps_push_pull(later, name="later", is_average=False)
        wrong += [said for said in [sums.judge(later.asnumpy(), at, bps.size())] if said]
    return {"failed": failed, "wrong": wrong}


def meeting(absent: bool = False) -> dict[str, Any]:
    """Two meetings one after the other; ``absent``: rank 1 does not come to the first, and trains on."""
    from dpro.errors import DproError
    from dpro_integrations import mxnet_byteps

    met: list[Any] = []
    error = ""
    if absent:
        os.environ["DPRO_TIMEOUT_S"] = "3"
    for tag in "12":
        if absent and (bps.rank() == 1 or tag == "2"):
            continue
        try:
            exchange = mxnet_byteps.meet(tag)
            exchange.post("place", str(bps.rank()).encode())
            met.append([blob.decode() for blob in exchange.collect("place", 10.0)] if bps.rank() == 0 else [])
            met.append(exchange.agree("who", str(bps.rank())) if bps.rank() == 0 else exchange.wait("who", 10.0))
        except DproError as trouble:
            error = str(trouble)
    return {"met": met, "error": error, "weights": train(plans=False)["weights"]}


def tuned(plan: bool, kept: bool, runs: str, steps: int = 50, flow: bool = False) -> dict[str, Any]:
    """A plain loop with one line more. ``kept``: the verdict, whatever the clock says."""
    from dpro_integrations import mxnet as dpro_mxnet

    os.environ.update(QUICK, DPRO_RUNS_DIR=runs, DPRO_CAPTURE_STEPS="2")
    force(kept, flow)
    mx.random.seed(1)
    net = mxnet_job.network()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE, "momentum": 0.9})
    before = attached(trainer)
    tuner = dpro_mxnet.autotune(trainer, plan=plan_of(adapter(trainer), SMALL) if plan else None)
    x, y = mxnet_job.data()
    loss = gluon.loss.L2Loss()
    bounds, pushed = [], set()
    for step in range(steps):
        at = step % len(x)
        with autograd.record():
            error = loss(net(mx.nd.array(x[at, bps.rank()])), mx.nd.array(y[at, bps.rank()]))
        error.backward()
        trainer.step(x.shape[2])
        error.asnumpy()
        bounds.append(attached(trainer)[1])
        if tuner is not None:
            pushed.add(tuner.adapter._partitions._flow is not None)  # type: ignore[attr-defined]
    told = {"weights": digest(net), "bounds": bounds, "tuner": tuner is not None}
    if tuner is not None:
        tuner.close()
        assert tuner.outcome is not None
        start = tuner.outcome.at_start()
        told |= {"verdict": tuner.outcome.verdict.name, "reason": tuner.outcome.reason}
        told["flowed"] = sorted(pushed)
        told["start"] = start[1].partition_bytes if start else 0
    told |= {"left": attached(trainer) == before, "under": attached(trainer)[1]}
    if tuner is not None:
        tuner.adapter.revert()  # what comes next in this process finds the job's own bound
    return told


def several(calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What these functions return, one after the other in this process: a job takes seconds to start."""
    # each has trainers of its own, with bounds that nobody else uses
    byteps_partitions.MOST_BOUNDS, byteps_partitions.MOST_GRADIENTS = 40, 64
    return [globals()[name](**arguments) for name, arguments in calls]
