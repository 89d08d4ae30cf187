"""Small Keras jobs with Horovod on the CPU: each function here is what one rank does, and returns what tests look at.

Weights are compared as digests, and inputs depend on the rank and the step only. ``tune``: "" no dpro, "plan" a given
plan, "search" the whole way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

from tests.frameworks.patches import patch

# in the same order on all ranks, and gentle with a small machine
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

WIDTH, BATCH = 32, 8
LAYERS = ("a", "b", "head")
#: Two groups; the head's bias is in none.
GROUPS = [["head/kernel", "b/bias", "b/kernel"], ["a/bias", "a/kernel"]]


@contextmanager
def job() -> Iterator[int]:
    """What the launcher sets, then hvd.init(); gives the rank."""
    keras.backend.clear_session()
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    place |= {"HOSTNAME": "localhost", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    os.environ.update({f"HOROVOD_{name}": value for name, value in place.items()})
    hvd.init()
    try:
        yield hvd.rank()
    finally:
        hvd.shutdown()


def dense(name: str, number: int, width: int = WIDTH, **more: Any) -> Any:
    return keras.layers.Dense(
        width, name=name, kernel_initializer=keras.initializers.GlorotUniform(seed=number), **more
    )


def net(*behind: Any) -> Any:
    """Two layers of tanh and a head, few enough to be traced fast; ``behind`` are layers before the head."""
    tanh = [dense(name, i, activation="tanh") for i, name in enumerate(LAYERS[:-1])]
    return keras.Sequential([keras.Input((WIDTH,)), *tanh, *behind, dense("head", 2, 1)])


def batch(step: int, rank: int) -> tuple[Any, Any]:
    """Inputs and targets."""
    drawn = np.random.RandomState(1000 * step + rank).normal(size=(BATCH, WIDTH + 1)).astype(np.float32)
    return drawn[:, :-1], drawn[:, -1:]


def batches(steps: int, rank: int) -> tuple[Any, Any]:
    """All of ``steps``, one after the other."""
    x, y = zip(*(batch(step, rank) for step in range(steps)), strict=True)
    return np.concatenate(x), np.concatenate(y)


def compiled(model: Any, inner: Any = None, **arguments: Any) -> Any:
    """``model`` as Horovod's guide has it; ``arguments`` are those of the optimizer."""
    inner = inner or keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer=hvd.DistributedOptimizer(inner, **arguments), loss="mse", metrics=["mae"])
    return model


def digest(model: Any) -> str:
    """Of what is trained; metrics are variables of the model as well, and each rank's own."""
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest()


def reductions(model: Any) -> list[list[Any]]:
    """What the model's present train function hands to Horovod: the ops' names, and how many gradients are in one."""
    concrete = model.train_function._list_all_concrete_functions()[-1]
    found = set()
    for function in concrete.graph.as_graph_def().library.function:
        for node in function.node_def:
            if node.op in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
                size = node.attr["num_tensors"].i if "num_tensors" in node.attr else 1
                found.add((node.name.rpartition("/")[2], size))
    return [list(entry) for entry in sorted(found)]


def group_sizes(model: Any) -> list[int] | None:
    """Of the groups in force; None where gradients go one by one."""
    found = reductions(model)
    return sorted(size for _, size in found) if any("Grouped" in name for name, _ in found) else None


def decide(kept: bool) -> None:
    """Take the clock out of the verdict."""
    import dpro.tuner
    from dpro.verdict import Comparison

    patch(dpro.tuner, "compare", lambda *_: Comparison(0.9 if kept else 1.1, 0.0, kept))


def group_plan(groups: list[list[str]] | None = None) -> Any:
    from dpro.plan import Plan

    return Plan(fingerprint={"world_size": "2"}, tensor_groups=groups or GROUPS)


def callback(tune: str, groups: list[list[str]] | None = None, **settings: Any) -> list[Any]:
    """The line that a user adds, in a list; empty without dpro."""
    from dpro_integrations.keras import DproCallback

    if not tune:
        return []
    if tune == "search":
        force_plans(groups)
    return [DproCallback(plan=group_plan(groups) if tune == "plan" else None, **settings)]


def force_plans(groups: list[list[str]] | None = None) -> None:
    """The real planner; where its search finds nothing better on these tiny nets, one plan anyhow."""
    import dpro.tuner
    from dpro.plan import Plan
    from dpro.planning import Planned, make_plans
    from dpro_integrations import keras as integration

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

    patch(integration, "Tuner", tuner)


def report(model: Any, outcome: Any, **more: Any) -> dict[str, Any]:
    return {
        "weights": digest(model),
        "verdict": outcome.verdict.name if outcome else "",
        "reason": outcome.reason if outcome else "",
        "groups": group_sizes(model),
    } | more


def fit(
    model: Any, ours: Sequence[Any], steps: int = 50, epochs: int = 2, callbacks: Sequence[Any] = (), **arguments: Any
) -> dict[str, Any]:
    """``steps`` in all; ``ours`` is what :func:`callback` gave, ``callbacks`` are the job's."""
    x, y = batches(steps // epochs, hvd.rank())
    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    history = model.fit(
        x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[*first, *ours], **arguments
    )
    outcome = ours[0].outcome if ours else None
    return report(model, outcome, history={key: list(map(float, of)) for key, of in history.history.items()})


def plain(
    tune: str = "", kept: bool | None = True, steps: int = 50, epochs: int = 2, **arguments: Any
) -> dict[str, Any]:
    """The ordinary job."""
    if kept is not None:
        decide(kept)
    if "compression" in arguments:
        arguments["compression"] = getattr(hvd.Compression, arguments["compression"])
    if "op" in arguments:
        arguments["op"] = getattr(hvd, arguments["op"])
    with job():
        return fit(compiled(net(), **arguments), callback(tune), steps, epochs)
