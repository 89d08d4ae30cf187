"""What one worker does in the tests of partitions that change in a running Keras job; returns what tests look at."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import Any

import byteps.tensorflow as bps
import byteps.tensorflow.keras as bps_keras
import numpy as np
import tensorflow as tf
from byteps.tensorflow import ops

from dpro.errors import PlanError
from dpro.plan import Plan
from dpro_integrations import byteps_partitions
from dpro_integrations.keras import trace
from dpro_integrations.keras_byteps import KerasBytePSAdapter
from dpro_integrations.keras_version import name_of
from tests.frameworks.byteps import keras_job, sums
from tests.frameworks.byteps.forced import SMALL, force
from tests.frameworks.launch import QUICK

#: (Nearly) one part for each gradient.
LARGE = sums.PARTITION_BYTES * 2
RATE = 0.01


class Alone:
    """Nobody is asked: every rank calls the same at the same step."""

    def __init__(self) -> None:
        self.rank, self.world_size = bps.rank(), bps.size()


class Held(tf.keras.layers.Layer):
    """Its weight's gradient is what the model is given, as far as the weight goes."""

    def __init__(self, elements: int) -> None:
        super().__init__(name=f"held_{elements}")
        self.elements = elements

    def build(self, shape: Any) -> None:
        self.held = self.add_weight("held", (self.elements,), initializer="zeros")

    def call(self, given: Any) -> Any:
        return tf.reduce_sum(self.held * given[:, : self.elements], axis=1, keepdims=True)


def adapter(model: Any) -> KerasBytePSAdapter:
    return KerasBytePSAdapter(trace(model), Alone())  # type: ignore[arg-type]


def plan_of(made: KerasBytePSAdapter, bound: int) -> Plan:
    return Plan(fingerprint=made.fingerprint(), partitions=dict.fromkeys(made._sizes(), bound))


def flow_of(made: KerasBytePSAdapter, at_once: int) -> Plan:
    """Parts of :data:`SMALL` bytes, the last variable's first."""
    return replace(plan_of(made, SMALL), in_flight_bytes=at_once * SMALL, push_order=[*made._sizes()][::-1])


def attached(model: Any, made: KerasBytePSAdapter) -> list[Any]:
    return [
        id(bps._push_pull),
        id(bps.shutdown),
        made._bounds.now,
        sorted(vars(model.optimizer)),
        bool(made._now or made._flow),
    ]


def sums_under_plans(rounds: int) -> dict[str, Any]:
    """SGD with a rate of 1 takes the mean of all ranks' gradients off the weights: their sum shows, to the bit."""
    given = tf.keras.Input((sums.ELEMENTS[-1],))
    model = tf.keras.Model(given, tf.keras.layers.Add()([Held(n)(given) for n in sums.ELEMENTS]))
    optimizer = bps_keras.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(1.0))
    model.compile(optimizer, lambda _, out: tf.reduce_sum(out))
    made = adapter(model)
    rank, ranks = bps.rank(), bps.size()
    wrong: list[str] = []
    seen, checks, at = [], 0, 0

    def some_rounds(label: str) -> None:
        nonlocal checks, at
        for _ in range(rounds):
            at += 1
            before = model.get_weights()
            model.train_on_batch(sums.pushed(sums.ELEMENTS[-1], at, rank)[None], np.zeros((1, 1)))
            made.obstacle()
            for old, new in zip(before, model.get_weights(), strict=True):
                checks += 1
                if said := sums.judge((old - new) * ranks, at, ranks):
                    wrong.append(f"{label}: {said}")
        seen.append([label, attached(model, made)])

    some_rounds("before")
    some_rounds("before")
    plans = {"small": plan_of(made, SMALL), "large": plan_of(made, LARGE)}
    plans |= {f"flow{n}": flow_of(made, n) for n in (1, 3)}
    for label in ("small", "", "large", "small", "", "flow1", "large", "flow3", ""):
        if label:
            made.prepare(plans[label])
            made.apply(plans[label])
            made.apply(plans[label])
        else:
            made.revert()
            made.revert()
        some_rounds(label or "after")
    return {"wrong": wrong, "checks": checks, "seen": seen, "foreign": _foreign(made), "error": made.obstacle()}


def _foreign(made: KerasBytePSAdapter) -> list[str]:
    own, alike = made.fingerprint(), dict.fromkeys(made._sizes(), SMALL)
    errors = []
    for plan in (
        Plan(fingerprint=own | {"model": "another"}, partitions=alike),
        Plan(fingerprint=own, partitions=alike, bucket_caps=[1.0]),
        Plan(fingerprint=own, partitions=alike | {"nowhere": SMALL}),
        Plan(fingerprint=own, partitions=dict.fromkeys(alike, SMALL + 1)),
        Plan(fingerprint=own),
        replace(flow_of(made, 2), push_order=[*alike][1:]),
    ):
        try:
            made.prepare(plan)
            errors.append("accepted")
        except PlanError as error:
            errors.append(str(error))
    return errors


def tuned(kept: bool, dpro: bool, runs: str, fp16: bool = False, flow: bool = False) -> dict[str, Any]:
    """``model.fit`` with the callback, from capture to the verdict, which is ``kept`` whatever the clock says."""
    from dpro_integrations.keras import DproCallback

    os.environ.update(QUICK, DPRO_RUNS_DIR=runs, DPRO_CAPTURE_STEPS="2")
    force(kept, flow)
    x, y = keras_job.data()
    compression = bps.Compression.fp16 if fp16 else bps.Compression.none
    optimizer = bps_keras.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(RATE, 0.9), compression=compression)
    net = keras_job.network(seed=10)
    tuning = DproCallback()
    rank = bps.rank()
    keras_job.fit(net, optimizer, x[:, rank], y[:, rank], *([tuning] if dpro else []))
    keras_job.fit(net, optimizer, x[:, rank], y[:, rank], *([tuning] if dpro else []))
    digest = hashlib.sha256(b"".join(w.tobytes() for w in net.get_weights())).hexdigest()
    told = {"weights": digest, "names": sorted(map(name_of, net.trainable_variables))}
    if dpro:
        assert tuning.outcome is not None
        told["tried"] = [arm.name for arm in tuning.outcome.arms]
        start = tuning.outcome.at_start()
        told |= {"verdict": tuning.outcome.verdict.name, "reason": tuning.outcome.reason}
        told |= {"start": start[1].partition_bytes if start else 0, "shutdown": bps.shutdown is ops.shutdown}
    return told


def several(calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What these functions return, one after the other in this process: a job takes seconds to start."""
    # each has a model of its own, with bounds that nobody else uses
    byteps_partitions.MOST_BOUNDS, byteps_partitions.MOST_GRADIENTS = 40, 64
    return [globals()[name](**arguments) for name, arguments in calls]
