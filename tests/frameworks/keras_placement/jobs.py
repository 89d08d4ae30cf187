"""Jobs of one process on three logical devices of its CPU, with Keras 2 or Keras 3: layers placed and ordered by plans.

What a job looks at are the graphs that TensorFlow's executor got, one for each device, and the weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python.eager import context

from dpro.errors import PlanError
from dpro.plan import Plan
from dpro_integrations.exchange import Alone
from dpro_integrations.keras_graph import Tracing, traced_functions
from dpro_integrations.keras_single import KerasSingleAdapter
from dpro_integrations.keras_version import KERAS3
from tests.frameworks.patches import patch

KERAS = 3 if KERAS3 else 2
DEVICES = 3
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * DEVICES
)
#: Nothing runs elsewhere than where it was put, unnoticed.
tf.config.set_soft_device_placement(False)
BATCH = 8
#: Ops that move a tensor, or have to do with a variable.
_ASIDE = (
    "_Send",
    "_Recv",
    "_Host",
    "_Arg",
    "_Ret",
    "Const",
    "Identity",
    "NoOp",
    "Switch",
    "Shape",
    "ReadVar",
    "Assign",
)


#: Each in one layer only, but for the last.
OPS = ("Sinh", "Digamma", "Elu", "EluGrad", "Conv2DBackpropFilter")


@tf.custom_gradient
def cosh(x: Any) -> Any:
    """With a gradient function of its own, which makes the model's only ``Sinh``."""
    return tf.cosh(x), lambda upstream: upstream * tf.sinh(x)


class Own(keras.layers.Layer):
    """A layer of the user's: a gradient of its own, a ``tf.function``, control flow for AutoGraph, a layer in it."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.inner = keras.layers.Dense(6, name="inner")

    def build(self, shape: Any) -> None:
        self.inner.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        if not KERAS3 and tf.reduce_sum(x) > 1e6:  # only Keras 2 converts it
            x = x / 2.0
        return 0.1 * cosh(self.function(x))

    @tf.function
    def function(self, x: Any) -> Any:
        """The gradient of ``lgamma`` is the model's only ``Digamma``."""
        return tf.tanh(tf.math.lgamma(1.0 + tf.nn.softplus(self.inner(x))))


class Loop(keras.layers.Layer):
    """Calls one layer in a loop, which makes the model's only ``Elu``, and another one in no training."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.each = keras.layers.Activation("elu", name="each")
        self.never = keras.layers.Activation("relu", name="never")

    def call(self, x: Any) -> Any:
        return tf.map_fn(self.each, x)


def network() -> Any:
    """Three branches that meet: convolution, norm and swish; convolution and pooling; dense and the user's layer."""
    layers = keras.layers
    given = keras.Input((6, 6, 2))
    left = layers.BatchNormalization(name="norm")(layers.Conv2D(6, 3, padding="same", name="convl")(given))
    left = layers.GlobalAveragePooling2D(name="pooll")(layers.Activation("swish", name="act")(left))
    right = layers.GlobalMaxPooling2D(name="poolr")(layers.Conv2D(6, 3, padding="same", name="convr")(given))
    own = Own(name="own")(layers.Dense(6, name="dense")(layers.Flatten(name="flat")(given)))
    met = Loop(name="loop")(layers.Add(name="met")([left, right, own]))
    met = layers.Activation("linear", name="nothing")(met)
    model = keras.Model(given, layers.Dense(1, name="head")(met), name="net")
    drawn = np.random.RandomState(0)
    model.set_weights([abs(drawn.randn(*weight.shape)) * 0.3 for weight in model.get_weights()])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model


def batches(rows: int) -> tuple[Any, Any]:
    drawn = np.random.RandomState(1)
    return drawn.randn(rows, 6, 6, 2).astype(np.float32), drawn.randn(rows, 1).astype(np.float32)


def fit(model: Any, steps: int, **given: Any) -> None:
    """Always the same data."""
    data = tf.data.Dataset.from_tensor_slices(batches(steps * BATCH)).batch(BATCH)
    model.fit(data, verbose=0, shuffle=False, **given)


def weights(model: Any) -> list[list[float]]:
    """Of the model, and the momenta."""
    kept = [*model.weights, *(v() if callable(v := model.optimizer.variables) else v)]
    every = [np.asarray(tf.convert_to_tensor(one)).ravel().tolist() for one in kept]
    return every


def left_behind(model: Any) -> list[str]:
    """Layers and the model, where something has been put on them."""
    every = [inner for layer in model.layers for inner in layer._flatten_layers()]
    return sorted(layer.name for layer in every if "call" in vars(layer)) + ["model"] * ("train_step" in vars(model))


class Executed:
    """Graphs that TensorFlow makes ready to run while this is entered: each node with its device."""

    def __enter__(self) -> Executed:
        context.context().enable_graph_collection()
        return self

    def __exit__(self, *_: Any) -> None:
        metadata = context.context().export_run_metadata()
        context.context().disable_graph_collection()
        made = [graph for graph in metadata.function_graphs if any("convl" in n.name for n in _nodes(graph))]
        #: one for each graph of a train step
        self.graphs = [{node.name: node for node in _nodes(graph)} for graph in made]

    def devices(self, name: str = "", op: str = "", backward: bool = False) -> list[str]:
        """Devices of the nodes of a layer, or of a kind, that compute something."""
        found = {
            node.device.rpartition("/")[2].removeprefix("device:")
            for graph in self.graphs
            for node in graph.values()
            if (not op or node.op == op)
            and (not name or _is_of(node.name, name, backward))
            and not node.op.startswith(_ASIDE)
        }
        return sorted(found)

    def waits(self, later: str, earlier: str) -> bool:
        """Whether what layer ``later`` multiplies, it multiplies after ``earlier`` has, in every graph."""
        return all(_waits(graph, later, earlier) for graph in self.graphs)


def _nodes(graph: Any) -> Iterable[Any]:
    return (node for part in graph.partition_graphs for node in part.node)


def _is_of(node: str, layer: str, backward: bool) -> bool:
    parts = node.split("/")
    return not {layer, f"{layer}_1"}.isdisjoint(parts[:-1]) and ("gradient_tape" in parts) == backward


def _waits(graph: dict[str, Any], later: str, earlier: str) -> bool:
    kinds = ("MatMul", "Conv2D", "_FusedMatMul", "_FusedConv2D")
    main = {name: [n for n in graph if graph[n].op in kinds and _is_of(n, name, False)] for name in (later, earlier)}
    assert all(main.values()), main
    seen, left = set(main[later]), list(main[later])
    while left:
        for given in graph[left.pop()].input:
            name = given.removeprefix("^").partition(":")[0]
            if name not in seen:
                seen.add(name)
                left.append(name)
    return bool(seen.intersection(main[earlier]))


def tuned(model: Any) -> KerasSingleAdapter:
    """An adapter of a job that has made two steps."""
    adapter = KerasSingleAdapter(Tracing(model, None), Alone())
    fit(model, 2)
    assert adapter.obstacle() == ""
    return adapter


def placed(plans: list[dict[str, Any]], look: Sequence[str] = (), pairs: Sequence[list[str]] = ()) -> dict[str, Any]:
    """Ten steps under each plan in turns, and two after it; or, without a plan, as many.

    ``look``: layers; ``pairs``: (later, earlier).
    """
    model = network()
    adapter = tuned(model)
    own = model.train_function
    told: dict[str, Any] = {"knobs": sorted(knob.value for knob in adapter.capabilities()), "under": [], "weights": []}
    for settings in plans:
        if settings:
            adapter.apply(Plan(**settings))
        with Executed() as seen:
            fit(model, 10)
        told["under"].append(
            {
                "forward": {name: seen.devices(name) for name in look},
                "backward": {name: seen.devices(name, backward=True) for name in look},
                "ops": {op: seen.devices(op=op) for op in OPS},
                "waits": [seen.waits(*pair) for pair in pairs],
                "edges": edges(model),
                "on": left_behind(model),
                "another": model.train_function is not own,
                "graphs": len(seen.graphs),
            }
        )
        adapter.revert()
        told["left"] = left_behind(model)
        told["own again"] = model.train_function is own
        fit(model, 2)
        told["weights"].append(weights(model))
    adapter.close()
    return told | {"keras": KERAS}


def refused(plans: list[dict[str, Any]]) -> dict[str, Any]:
    """What is said of each plan; afterwards the job goes on."""
    from dpro_integrations import keras_placement

    model = network()
    adapter = tuned(model)
    own, said = model.train_function, []
    for settings in [*plans, None]:
        if settings is None:
            patch(keras_placement, "devices_here", lambda: ["/device:CPU:0"])
        try:
            adapter.prepare(Plan(**settings or {"placement": {"head": "CPU:0"}}))
            said.append("")
        except PlanError as error:
            said.append(str(error))
        assert model.train_function is own and left_behind(model) == []
    fit(model, 10)
    fit(model, 2)
    adapter.close()
    return {"said": said, "weights": [weights(model)], "keras": KERAS}


def edges(model: Any) -> list[Any]:
    """Control edges of the traced step between ops of layers, as (layer: op's type, what it waits for)."""
    known = {layer.name for layer in model.layers}

    def told(op: Any) -> str:
        return f"{next((n for part in op.name.split('/') if (n := part.removesuffix('_1')) in known), '')}: {op.type}"

    return [
        [told(op), sorted(map(told, op.control_inputs))]
        for graph in _steps(model)
        for op in graph.get_operations()
        if op.control_inputs and not op.name.startswith("gradient_tape") and not op.type.startswith(_ASIDE)
        if not told(op).startswith(":")
    ]


def _steps(model: Any) -> list[Any]:
    """Graphs of the train step: Keras 3 has it in a function of its own."""
    outer = [concrete.graph for concrete in traced_functions(model.train_function)]
    inner = [made.graph for graph in outer for made in _called(graph)]
    return [graph for graph in [*outer, *inner] if any("convl" in op.name for op in graph.get_operations())]


def _called(graph: Any) -> list[Any]:
    from tensorflow.python.framework import function_def_to_graph

    names = {op.get_attr("f").name for op in graph.get_operations() if op.type == "StatefulPartitionedCall"}
    return [
        type("Called", (), {"graph": function_def_to_graph.function_def_to_graph(definition)})
        for definition in graph.as_graph_def().library.function
        if definition.signature.name in names
    ]


def whole_way(settings: dict[str, Any] | None, kept: bool = True) -> dict[str, Any]:
    """``fit`` of 30 steps with a callback that is given a plan's file, None: without; then a batch of samples with
    weights, for which TensorFlow traces the step again."""
    import dpro.tuner
    from dpro.verdict import Comparison
    from dpro_integrations.keras import DproCallback

    patch(dpro.tuner, "compare", lambda *_: Comparison(0.9 if kept else 1.1, 0.0, kept))
    model = network()
    states: list[str] = []
    ours = []
    if settings is not None:
        Plan(**settings).save(Path("plan.json"))
        ours.append(DproCallback(plan="plan.json"))

    def noted(*_: Any, **__: Any) -> None:
        state = ours[0]._tuner.state.name if ours and ours[0]._tuner else ""
        if state not in states[-1:]:
            states.append(state)

    watch = keras.callbacks.LambdaCallback(on_batch_end=noted)
    fit(model, 30, callbacks=[*ours, watch], validation_data=batches(8))
    model.train_on_batch(*batches(3), sample_weight=np.ones(3, np.float32))
    steps = _steps(model)
    outcome = ours[0].outcome if ours else None
    return {
        "verdict": outcome.verdict.name if outcome else "",
        "reason": outcome.reason if outcome else "",
        "states": states,
        "on": left_behind(model),
        "traced": sorted({op.device for graph in steps for op in graph.get_operations() if op.type == "Sinh"}),
        "times": len(steps),
        "weights": [weights(model)],
        "keras": KERAS,
    }


def one_program() -> bool:
    """Whether there is a tuner for a model that XLA compiles as a whole."""
    from dpro_integrations.keras import autotune

    model = network()
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=True)
    return autotune(model, plan=Plan(placement={"head": "CPU:1"})) is not None or bool(left_behind(model))
