"""Keras jobs with layers that XLA compiles (see ``jobs.py``)."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.keras as hvd
from tensorflow import keras

from tests.frameworks.horovod_keras.jobs import GROUPS, compiled, decide, dense, fit, job, net, report
from tests.frameworks.patches import patch


class Twice(keras.layers.Layer):
    """A layer of the user's, with control flow that AutoGraph must convert and a layer in it."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.inner = dense("inner", 7)

    def call(self, x: Any, training: Any = None) -> Any:
        for _ in range(2):
            x = keras.activations.swish(self.inner(x))
        if keras.backend.sum(x) > 1e6:
            x = x / 2.0
        return x


def model_of(kind: str) -> Any:
    if kind == "lstm":
        layers = [keras.layers.Reshape((8, 4)), keras.layers.LSTM(8, name="lstm")]
        return keras.Sequential([keras.Input((32,)), *layers, dense("head", 4, 1)])
    if kind == "dropout":
        return net(keras.layers.Dropout(0.1, name="drop"))
    if kind == "norms":
        return net(keras.layers.BatchNormalization(name="bn"), keras.layers.LayerNormalization(name="ln"))
    return net(Twice(name="twice"))


def regions(tune: str, kind: str, names: list[str], kept: bool = True, groups: bool = False) -> dict[str, Any]:
    """Weights as numbers, and what XLA was told to compile in the train function."""
    from dpro.plan import Plan
    from dpro_integrations.keras import DproCallback

    decide(kept)
    with job():
        model = compiled(model_of(kind), keras.optimizers.SGD(0.01))
        plan = Plan(compile_regions=names, tensor_groups=GROUPS if groups else None)
        found = fit(model, [DproCallback(plan=plan)] if tune else [], validation_data=None)
        concrete = model.train_function._list_all_concrete_functions()[-1]
        marked = {
            node.attr["_XlaScope"].s.decode()
            for function in concrete.graph.as_graph_def().library.function
            for node in function.node_def
            if node.attr["_XlaCompile"].b
        }
        return found | {
            "numbers": {v.name: v.numpy().ravel().tolist() for v in model.weights},
            "scopes": sorted(marked),
            "wrapped": sorted(layer.name for layer in model._flatten_layers() if "call" in vars(layer)),
            "rank": hvd.rank(),
        }


def evaluated(tune: str) -> dict[str, Any]:
    """What ``predict`` gives with compiled layers in force is what the same weights give without."""
    from dpro.plan import Plan
    from dpro_integrations.keras import DproCallback

    decide(True)
    with job():
        model = compiled(model_of("norms"), keras.optimizers.SGD(0.01))
        plan = Plan(compile_regions=["a", "b", "bn", "ln"])
        found = fit(model, [DproCallback(plan=plan)] if tune else [])
        other = compiled(model_of("norms"))
        other.set_weights(model.get_weights())
        import numpy as np

        x = np.ones((4, 32), np.float32)
        same = bool((model.predict(x, verbose=0) == other.predict(x, verbose=0)).all())
        return report(model, None) | {"verdict": found["verdict"], "same": same}


def searched(mode: str) -> dict[str, Any]:
    """The whole way, and what was timed on it. ``mode``: "" without dpro.

    In ``apply`` the times that a region was measured to take compiled are halved: tiny layers gain nothing of it, and a
    region is to be proposed and put in force.
    """
    import dpro.tuner
    from dpro.plan import Plan
    from dpro.planning import make_plans
    from dpro.trace.regions import Region, RegionTime
    from dpro_integrations import keras as integration
    from dpro_integrations import keras_horovod
    from dpro_integrations.keras import DproCallback

    timed: list[Region] = []
    time_regions = keras_horovod.time_regions

    def halved(*args: Any) -> list[Region]:
        timed.extend(time_regions(*args))
        if mode != "apply":
            return timed
        half = [(t.forward_ns, t.backward_ns, t.forward_ns // 2, t.backward_ns // 2) for t in (r.time for r in timed)]
        return [Region(r.layers, r.tensors, r.kind, RegionTime(*ns)) for r, ns in zip(timed, half, strict=True)]

    def planner(*args: Any) -> Any:
        planned = make_plans(*args)
        if not any(plan.compile_regions for _, plan in planned.plans):  # no step is the same twice on a busy machine
            planned.plans = [("forced", Plan(compile_regions=["bn", "ln"]))]
        return planned

    decide(True)
    patch(keras_horovod, "time_regions", halved)
    patch(integration, "Tuner", lambda *args, **given: dpro.tuner.Tuner(*args, planner=planner, **given))
    with job():
        model = compiled(model_of("norms"), keras.optimizers.SGD(0.01))
        ours = [DproCallback(mode=mode, regions_s=60.0)] if mode else []
        found = fit(model, ours, validation_data=None)
        return found | {
            "numbers": {v.name: v.numpy().ravel().tolist() for v in model.weights},
            "timed": [[*region.layers] for region in timed],
            "ns": [[r.time.plain_ns, r.time.fused_ns] for r in timed],
            "wrapped": sorted(layer.name for layer in model._flatten_layers() if "call" in vars(layer)),
        }


def split() -> dict[str, Any]:
    """What is made of times of calls, ns: of an empty one, and forward and both passes without and with a compiler."""
    from dataclasses import astuple

    from dpro_integrations.keras_clusters import _split

    told = [(10, (40, 110), (30, 70)), (10, (12, 100), (40, 70)), (10, (40, 100), (70, 60)), (10, (5, 8), (9, 9))]
    return {"times": [astuple(_split(*one)) for one in told]}
