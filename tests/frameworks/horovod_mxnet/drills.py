"""Gluon jobs with a difference: what could go wrong, or is not the ordinary loop (see ``jobs.py``)."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import estimator as estimators

from tests.frameworks.horovod_mxnet.jobs import (
    WIDTH,
    batch,
    decide,
    digest,
    distribute,
    fit,
    force_plans,
    group_plan,
    groups_of,
    initialised,
    job,
    mlp,
    report,
    small_cnn,
    train,
    tuned,
)

CNN_GROUPS = [["cnn_out_weight", "cnn_out_bias", "cnn_hidden_weight"], ["cnn_first_weight", "cnn_norm_gamma"]]


def convolutions(tune: str) -> dict[str, Any]:
    """A branch, and batch norm with its running sums."""
    decide(True)
    with job():
        net = small_cnn()
        trainer = distribute(net)
        return fit(net, trainer, tuned(trainer, tune, CNN_GROUPS), 40, shape=(4, 3, 16, 16))


def accumulated(tune: str, steps: int = 40) -> dict[str, Any]:
    """``grad_req="add"``; every fifth step has half of its micro-batches."""
    decide(True)
    with job() as rank:
        net = mlp()
        for parameter in net.collect_params().values():
            parameter.grad_req = "add"
        trainer = distribute(net)
        tuner = tuned(trainer, tune)
        for step in range(steps):
            for k in range(2 if step % 5 == 4 else 4):
                with autograd.record():
                    loss = net(batch(100 * step + k, rank)).square().mean()
                loss.backward()
            trainer.step(4)
            for parameter in net.collect_params().values():
                parameter.zero_grad()
            loss.asscalar()
        return report(net, trainer, tuner, steps=tuner.steps if tuner else steps)


def clipped(tune: str) -> dict[str, Any]:
    """``allreduce_grads()`` and ``update()`` with clipping between them, bound before the tuning."""
    decide(True)
    with job() as rank:
        net = mlp()
        trainer = distribute(net)
        allreduce, update = trainer.allreduce_grads, trainer.update
        tuner = tuned(trainer, tune)
        gradients = [p.grad() for p in net.collect_params().values()]
        for step in range(50):
            with autograd.record():
                loss = net(batch(step, rank)).square().mean()
            loss.backward()
            allreduce()
            gluon.utils.clip_global_norm(gradients, 0.05)
            update(1)
        return report(net, trainer, tuner, steps=tuner.steps if tuner else 0)


def halves(tune: str) -> dict[str, Any]:
    """Two layers whose weights are kept in fp16 beside two in fp32, in one group of the plan."""
    decide(True)

    class Half(gluon.HybridBlock):  # type: ignore[misc]
        """MXNet multiplies no halves on a CPU: cast at each use, so that the gradients are halves."""

        def __init__(self, prefix: str) -> None:
            super().__init__(prefix=prefix)
            with self.name_scope():
                self.weight = self.params.get("weight", shape=(WIDTH, WIDTH), dtype="float16")
                self.bias = self.params.get("bias", shape=(WIDTH,), dtype="float16", init="zeros")

        def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any) -> Any:
            weight, bias = F.cast(weight, "float32"), F.cast(bias, "float32")
            return F.tanh(F.FullyConnected(x, weight, bias, num_hidden=WIDTH))

    with job():
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            for k in range(4):
                dense = nn.Dense(WIDTH, activation="tanh", in_units=WIDTH, prefix=f"d{k}_")
                net.add(Half(f"d{k}_") if 0 < k < 3 else dense)
        initialised(net)
        trainer = distribute(net, "adam")
        names = [[f"net_d{k}_{what}" for k in range(4) for what in ("weight", "bias")]]
        return fit(net, trainer, tuned(trainer, tune, names), 40)


def scaled(tune: str) -> dict[str, Any]:
    """Loss scaling as ``mx.contrib.amp`` does it: before an update all gradients are looked at; some steps overflow."""
    from mxnet.contrib.amp.loss_scaler import LossScaler

    decide(True)
    with job() as rank:
        net = mlp()
        trainer = distribute(net)
        trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale
        tuner = tuned(trainer, tune)
        for step in range(40):
            scale = trainer._amp_loss_scaler.loss_scale
            trainer._scale = trainer._amp_original_scale / scale
            with autograd.record():
                loss = net(batch(step, rank)).square().mean() * scale
                if step % 7 == 6:
                    loss = loss * 1e38 * 1e38
            loss.backward()
            trainer.step(1)
        return report(net, trainer, tuner)


def two_trainers(tune: str) -> dict[str, Any]:
    """Two nets with a trainer each; one is tuned."""
    decide(True)
    with job():
        nets = [mlp(), mlp(prefix="other_")]
        trainers = [distribute(net, prefix=f"{k}.") for k, net in enumerate(nets)]
        tuner = tuned(trainers[0], tune)
        for step in range(50):
            for net, trainer in zip(nets, trainers, strict=True):
                train(net, trainer, step)
        return report(nets[0], trainers[0], tuner, other=digest(nets[1]), other_groups=groups_of(trainers[1]))


def own_way(tune: str) -> dict[str, Any]:
    """A trainer that reduces by a method of the job's own."""

    class Own(hvd.DistributedTrainer):  # type: ignore[misc]
        def _allreduce_grads(self) -> None:
            super()._allreduce_grads()

    with job():
        net = mlp()
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
        trainer = Own(net.collect_params(), "sgd", {"learning_rate": 0.01})
        return fit(net, trainer, tuned(trainer, tune), 30)


def left_alone() -> dict[str, str]:
    """Why the adapter changes nothing under trainers of several kinds, none of which has to make a step for it."""
    from dpro_integrations.mxnet_horovod import HorovodMXNetAdapter

    class Alone:
        rank, world_size = 0, 2

    def why_not(net: Any, **arguments: Any) -> str:
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, **arguments)
        return HorovodMXNetAdapter(trainer, Alone()).why_not()  # type: ignore[arg-type]

    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    with job(process_sets=sets) as rank:
        embedding = nn.Embedding(10, 4, sparse_grad=True)
        embedding.initialize()
        found = {
            "stock": why_not(mlp()),
            "process set": why_not(mlp(), process_set=sets[rank]),
            "sparse": why_not(embedding),
        }
        os.environ["HOROVOD_AUTOTUNE"] = "1"
        found["autotune"] = why_not(mlp())
        # process sets are gone as soon as one rank shuts down
        hvd.allreduce(mx.nd.zeros((1,)), name="all are through").wait_to_read()
        return found


def uneven(tune: str, ended: list[int]) -> dict[str, Any]:
    """Ranks have ``ended[rank]`` batches; who has none left shuts Horovod down, as at a script's end."""
    decide(True)
    told = ""
    with job() as rank:
        net = mlp()
        trainer = distribute(net)
        tuner = tuned(trainer, tune)
        try:
            fit(net, trainer, tuner, ended[rank])
        except mx.MXNetError as error:
            told = str(error)
            for _ in range(3):
                with contextlib.suppress(mx.MXNetError):
                    mx.nd.waitall()
    return {"told": "Horovod has been shut down" in told, "verdict": tuner.outcome.verdict.name if tuner else ""}


def frozen(tune: str, at: int) -> dict[str, Any]:
    """The job freezes a layer after step ``at``."""
    decide(True)

    def each(step: int, trainer: Any, tuner: Any) -> None:
        if step == at - 1:
            for name in ("net_d1_weight", "net_d1_bias"):
                net.collect_params()[name].grad_req = "null"

    with job():
        net = mlp()
        trainer = distribute(net)
        return fit(net, trainer, tuned(trainer, tune), 40, each)


def started_anew(tune: str, at: int) -> dict[str, Any]:
    """The job shuts Horovod down after step ``at`` and starts it again."""
    decide(True)

    def each(step: int, trainer: Any, tuner: Any) -> None:
        if step == at - 1:
            mx.nd.waitall()
            hvd.shutdown()
            time.sleep(1.0)  # Horovod that is started again while other ranks still end crashes
            hvd.init()

    with job():
        net = mlp()
        trainer = distribute(net)
        shutdown = hvd.shutdown
        found = fit(net, trainer, tuned(trainer, tune), 30, each)
        return found | {"restored": hvd.shutdown == shutdown if not tune else "_update" not in vars(trainer)}


def failing_apply(tune: str, method: str) -> dict[str, Any]:
    """One of the adapter's methods fails on rank 1."""
    decide(False)

    def fail(*_: Any) -> Any:
        raise OSError("no luck")

    with job() as rank:
        net = mlp()
        trainer = distribute(net)
        tuner = tuned(trainer, tune)
        if tuner is not None and rank == 1:
            setattr(tuner.adapter, method, fail)
        return fit(net, trainer, tuner)


def alone(tune: str, off: int) -> dict[str, Any]:
    """Rank ``off`` was started with DPRO=off."""
    with job() as rank:
        if rank == off:
            os.environ["DPRO"] = "off"
        net = mlp()
        trainer = distribute(net)
        tuner = tuned(trainer, tune)
        start = time.monotonic()
        found = fit(net, trainer, tuner)
        return found | {"took_s": time.monotonic() - start}


def kill(tune: str, state: str, victim: int, note: str) -> dict[str, Any]:
    """``victim`` dies when the tuner is in ``state``: between two steps, or in the midst of a meeting."""
    decide(True)

    def die() -> None:
        Path(note).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def each(step: int, trainer: Any, tuner: Any) -> None:
        if hvd.rank() == victim and tuner.state.name == state:
            die()

    with job() as rank:
        net = mlp()
        trainer = distribute(net)
        tuner = tuned(trainer, tune)
        if rank == victim and state == "APPLY":
            tuner.adapter.apply = lambda *_: die()
        return fit(net, trainer, tuner, each=each)


def raising(tune: str, at: int) -> None:
    """An exception of the user's ends rank 1 after step ``at``."""
    decide(True)

    def each(step: int, trainer: Any, tuner: Any) -> None:
        if step == at - 1 and hvd.rank() == 1:
            raise ZeroDivisionError("the user's own")

    with job():
        net = mlp()
        trainer = distribute(net)
        fit(net, trainer, tuned(trainer, tune), each=each)


def failing_op(tune: str, at: int) -> dict[str, Any]:
    """An operation of the job's own fails in the engine, behind Python's back, in step ``at`` of every rank."""
    decide(True)
    told: list[str] = []

    class Failing(mx.operator.CustomOp):  # type: ignore[misc]
        def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            if in_data[0].asnumpy()[0] > 0:
                raise ZeroDivisionError("the job's own")
            self.assign(out_data[0], req[0], in_data[0])

        def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
            self.assign(in_grad[0], req[0], out_grad[0])

    class Register(mx.operator.CustomOpProp):  # type: ignore[misc]
        def create_operator(self, *_: Any) -> Any:
            return Failing()

    mx.operator.register("failing")(Register)
    with job() as rank:
        net = mlp()
        trainer = distribute(net)
        tuner = tuned(trainer, tune)
        step = 0
        while step < 12 and not told:
            with autograd.record():
                switch = mx.nd.Custom(mx.nd.array([float(step == at)]), op_type="failing")
                loss = (net(batch(step, rank)) + switch).square().mean()
            loss.backward()
            try:
                trainer.step(1)
                loss.asscalar()
            except Exception as error:
                told.append(type(error).__name__)
            step += 1
        for _ in range(3):  # the engine tells it once for each array that has to do with it
            with contextlib.suppress(mx.MXNetError):
                mx.nd.waitall()
        return {"told": told, "step": step, "verdict": tuner.outcome.verdict.name if tuner and tuner.outcome else ""}


def profiled(tune: str, when: str, into: str) -> dict[str, Any]:
    """The job uses MXNet's profiler itself: ``before`` the tuning, in step ``7`` or ``8`` (captured), ``after`` it."""
    decide(True)
    file = Path(into) / f"own-{when}-{os.environ['RANK']}-{tune}.json"

    def run() -> None:
        mx.profiler.set_config(
            profile_imperative=True, aggregate_stats=False, continuous_dump=False, filename=str(file)
        )
        mx.profiler.set_state("run")

    def stop() -> None:
        mx.nd.waitall()
        mx.profiler.set_state("stop")
        mx.profiler.dump()

    def each(step: int, trainer: Any, tuner: Any) -> None:
        if when.isdecimal() and step == int(when) - 1:
            run()
            train(net, trainer, 100)
            stop()

    with job():
        net = mlp()
        trainer = distribute(net)
        if when == "before":
            run()
        tuner = tuned(trainer, tune)
        found = fit(net, trainer, tuner, 50, each)
        if when == "after":
            run()
            train(net, trainer, 100)
            found["weights"] = digest(net)
        if not when.isdecimal():
            stop()
        text = file.read_text()
        try:
            whole = isinstance(json.loads(text)["traceEvents"], list)
        except ValueError:
            whole = False
        return found | {
            "updates": text.count("sgd_mom_update"),
            "whole": whole,
            "clean": type(mx.profiler.set_state).__name__ == "function",  # nothing is left to be noted
        }


def estimated(tune: str, epochs: int = 2, mode: str | None = None) -> dict[str, Any]:
    """``Estimator.fit`` with the handler, validation after every epoch."""
    decide(True)
    from dpro_integrations.mxnet import DproHandler

    with job() as rank:
        net = mlp()
        trainer = distribute(net)
        xs = mx.nd.concat(*[batch(step, rank) for step in range(30)], dim=0)
        data = gluon.data.DataLoader(gluon.data.ArrayDataset(xs, mx.nd.zeros((len(xs), 1))), batch_size=8)
        made = estimators.Estimator(net, gluon.loss.L2Loss(), train_metrics=mx.metric.MAE(), trainer=trainer)
        made.logger.handlers.clear()
        handler = DproHandler(mode=mode, plan=group_plan(trainer) if tune == "plan" else None)
        if tune == "search":
            force_plans()
        made.fit(data, val_data=data, epochs=epochs, event_handlers=[handler] if tune else [])
        outcome = handler.outcome
        return {
            "weights": digest(net),
            "verdict": outcome.verdict.name if outcome else "",
            "groups": groups_of(trainer),
            "clean": "_update" not in vars(trainer) and "evaluate_batch" not in vars(made.batch_processor),
        }


def resumed(tune: str, plan: str = "") -> dict[str, Any]:
    """A job that is started again with the plan file that an earlier run of it left."""
    decide(True)
    from dpro_integrations import mxnet

    with job():
        net = mlp()
        trainer = distribute(net)
        tuner = mxnet.autotune(trainer, plan=plan) if tune and plan else tuned(trainer, tune)
        return fit(net, trainer, tuner)


def activated(tune: str, trainers: int = 1, own_call: bool = False) -> dict[str, Any]:
    """An unchanged script, DPRO set; ``own_call``: it tunes itself as well."""
    construct = hvd.DistributedTrainer.__init__
    if tune:
        decide(True)
        force_plans()
        sys.modules.pop("dpro_integrations.autoload", None)
        importlib.import_module("dpro_integrations.autoload")  # as the .pth file does
    with job():
        net = mlp()
        trainer = distribute(net)
        for k in range(trainers - 1):
            distribute(mlp(prefix=f"other{k}_"), prefix=f"{k}.")
        tuner = tuned(trainer, "search") if tune and own_call else None
        found = fit(net, trainer, tuner)
        return found | {
            "restored": hvd.DistributedTrainer.__init__ is construct,
            "on_trainer": sorted(set(vars(trainer)) & {"_update", "_allreduce_grads", "step", "update"}),
        }
