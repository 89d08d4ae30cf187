"""Keras jobs with blocks that run their forward pass again (see ``jobs.py``)."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

from tests.frameworks.horovod_keras.jobs import GROUPS, batches, compiled, decide, dense, fit, job, net


class Counting(keras.layers.Layer):
    """Keeps a count of its calls in a variable."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x * 2.0


class Costly(keras.layers.Layer):
    """Adds to the loss where it is called."""

    def call(self, x: Any) -> Any:
        self.add_loss(keras.backend.mean(x))
        return keras.activations.tanh(x)


def conv(name: str, number: int) -> Any:
    return keras.layers.Conv2D(
        4, 3, padding="same", name=name, kernel_initializer=keras.initializers.GlorotUniform(seed=number)
    )


def model_of(kind: str) -> Any:
    """``conv``: branches and norms; ``dense``: a chain, with dropout, which is in no block of a plan that works."""
    layers = keras.layers
    if kind == "conv":
        given = keras.Input((32,))
        out = conv("stem", 0)(layers.Reshape((8, 4, 1), name="image")(given))
        for k in range(3):
            branch = layers.BatchNormalization(name=f"norm{k}")(conv(f"conv{k}", 1 + k)(out))
            out = layers.Add(name=f"sum{k}")([out, layers.ReLU(name=f"relu{k}")(branch)])
        return keras.Model(given, dense("head", 9, 1)(layers.Flatten(name="flat")(out)))
    if kind == "dense":
        drop, norm = layers.Dropout(0.3, name="drop"), layers.BatchNormalization(name="bn")
        return net(drop, norm, dense("c", 5, activation="gelu"), dense("d", 6, activation="tanh"))
    if kind == "counting":
        return net(Counting(name="odd"))
    if kind == "costly":
        return net(Costly(name="odd"))
    if kind == "twice":
        given, shared = keras.Input((32,)), dense("odd", 1)
        return keras.Model(given, dense("head", 2, 1)(shared(dense("a", 3)(shared(given)))))
    if kind == "masked":
        given = keras.Input((32,))
        words = layers.Masking(name="words")(layers.Reshape((8, 4))(dense("a", 1)(given)))
        return keras.Model(given, dense("head", 2, 1)(layers.GlobalAveragePooling1D(name="mean")(words)))
    if kind == "regular":
        return net(keras.layers.Dense(32, activity_regularizer="l2", name="odd"))
    return net()


def state(model: Any) -> dict[str, list[float]]:
    """All that a step changes: weights, moving averages, the optimizer's own."""
    found = {f"{k} {v.name}": v for k, v in enumerate([*model.weights, *model.optimizer.variables()])}
    return {name: np.ravel(v.numpy()).astype(float).tolist() for name, v in found.items()}


def patched(model: Any) -> list[str]:
    return sorted(name for name in ("_run_internal_graph", "_nodes_by_depth") if callable(vars(model).get(name)))


def recomputed(
    tune: str, kind: str, blocks: list[str] | None = None, kept: bool = True, groups: bool = False
) -> dict[str, Any]:
    """The job with and without a given plan. Random numbers are drawn as a job does that can be traced anew."""
    from dpro.plan import Plan
    from dpro_integrations.keras import DproCallback

    decide(kept)
    with job(), seeded():
        model = compiled(model_of(kind), keras.optimizers.SGD(0.001, momentum=0.9))
        plan = Plan(recompute=blocks, tensor_groups=GROUPS if groups else None)
        found = fit(model, [DproCallback(plan=plan)] if tune else [], validation_data=batches(2, hvd.rank()))
        return found | {"state": state(model), "patched": patched(model), "same": predicts_alike(model, kind)}


@contextmanager
def seeded() -> Iterator[None]:
    """Random numbers as a job draws them that can be traced anew; what comes after in this process draws as ever."""
    keras.backend.experimental.enable_tf_random_generator()
    keras.utils.set_random_seed(7)
    try:
        yield
    finally:
        keras.backend.experimental.disable_tf_random_generator()
        tf.random.set_seed(None)
        del importlib.import_module("keras.src.backend")._SEED_GENERATOR.generator


def predicts_alike(model: Any, kind: str) -> bool:
    """Whether outside of training the model computes what its weights give without dpro."""
    other = model_of(kind)
    other.set_weights(model.get_weights())
    x = batches(1, 0)[0]
    return bool(
        (model.predict(x, verbose=0) == other.predict(x, verbose=0)).all()
        and (model(x, training=False).numpy() == other(x, training=False).numpy()).all()
    )


def forward_ops() -> dict[str, Any]:
    """How many convolutions and products of the forward pass TensorFlow runs, optimised, with blocks and after them;
    weights with each; and what is refused before anything is changed."""
    from dpro.errors import PlanError
    from dpro_integrations.keras_graph import Collection
    from dpro_integrations.keras_recompute import Recomputed

    x, y = batches(1, 0)
    counts, states = [], []
    for blocks in ((), ("sum0", "sum1..sum2"), ("stem..sum2",), ("stem..head",)):
        keras.backend.clear_session()
        model = model_of("conv")
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        chosen = Recomputed(model)
        chosen.set(blocks)
        seen = Collection(frozenset())
        model.train_on_batch(x, y)
        seen.stop()
        chosen.check()
        ops = Counter(op for graph in seen.graphs for op in graph.ops.values())
        counts.append([sum(ops[op] for op in ("Conv2D", "_FusedConv2D")), ops["FusedBatchNormV3"]])
        for _ in range(5):
            model.train_on_batch(x, y)
        states.append(state(model))
        chosen.set(())
    said = []
    for names in (["nowhere"], ["sum1..sum0"], ["sum0..sum9"], ["sum0..sum1", "sum1"], [""], ["image"]):
        try:
            chosen.set(tuple(names))
            said.append("")
        except PlanError as error:
            said.append(str(error))
    return {"counts": counts, "same": [one == states[0] for one in states], "said": said, "patched": patched(model)}


def updates_that_wait() -> dict[str, Any]:
    """In the graph that TensorFlow's optimiser leaves: reads of weights in the second pass, each with whether what
    updates the weight waits for it."""
    from dpro.trace.dataflow import normalise
    from dpro_integrations.keras_graph import Collection
    from dpro_integrations.keras_memory import _behind, _consumers
    from dpro_integrations.keras_recompute import SCOPE, Recomputed

    keras.backend.clear_session()
    x, y = batches(1, 0)
    model = net(keras.layers.BatchNormalization(name="bn"))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    Recomputed(model).set(("bn..head",))
    seen = Collection(frozenset())
    model.train_on_batch(x, y)
    seen.stop()
    graph = max(seen.graphs, key=lambda one: len(one.ops))
    inputs = {name: [normalise(one) for one in given] for name, given in graph.inputs.items()}
    waits = {}
    for read in (name for name, op in graph.ops.items() if op == "ReadVariableOp" and name.startswith(SCOPE)):
        behind = _behind(_consumers(inputs), [read])
        updates = [name for name, op in graph.ops.items() if "Assign" in op and inputs[name][0] == inputs[read][0]]
        waits[read] = [name in behind for name in updates if "moving" not in inputs[read][0]]
    return {"waits": waits}


def unit_names(kind: str) -> dict[str, Any]:
    from dpro_integrations.keras_units import units

    return {"units": [[one.name, [layer.name for layer in one.layers], one.refused] for one in units(model_of(kind))]}


def wide() -> Any:
    """Activations are most of its memory: a chain of eight layers, and dropout."""
    keras.backend.clear_session()
    layers = [dense(f"l{k}", k, activation="gelu") for k in range(8)]
    layers.insert(3, keras.layers.Dropout(0.1, name="drop"))
    return keras.Sequential([keras.Input((32,)), *layers, dense("head", 9, 1)])


def over_budget(budget: int = 0, alone: bool = False, mode: str = "apply") -> dict[str, Any]:
    """The whole way; ``budget`` bytes, 0: no dpro. ``alone``: one process, without Horovod."""
    if alone:
        sgd = keras.optimizers.SGD(0.01, momentum=0.9)
        return _told(budget, mode, 0, lambda model: model.compile(sgd, "mse"), [])
    with job() as rank:
        return _told(budget, mode, rank, compiled, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def _told(budget: int, mode: str, rank: int, compiling: Callable[[Any], Any], callbacks: list[Any]) -> dict[str, Any]:
    """Trains on the same batch of 2,048; tells what came of it."""
    from dpro_integrations.keras import DproCallback

    ours = [DproCallback(mode=mode, memory_bytes=budget)] if budget else []
    with seeded():
        model = wide()
        compiling(model)
        x, y = (np.concatenate([part] * 256) for part in batches(1, rank))
        data = tf.data.Dataset.from_tensors((x, y)).repeat(26)
        model.fit(data, verbose=0, callbacks=[*callbacks, *ours])
    found: dict[str, Any] = {"state": state(model), "patched": patched(model)}
    if ours:
        outcome = ours[0].outcome
        assert outcome is not None
        found |= {"verdict": outcome.verdict.name, "reason": outcome.reason}
        found["plan"] = outcome.plan.settings() if outcome.plan else {}
        found["predicted_bytes"] = outcome.plan.predicted_bytes if outcome.plan else None
        found["peak"] = outcome.planned.peak_bytes if outcome.planned else None
        found["warnings"] = outcome.planned.warnings if outcome.planned else []
        found["measured"] = [arm.peak_bytes for arm in outcome.arms[1:]]
    return found


def by_hand() -> dict[str, Any]:
    """What the meter tells of a chain whose tensors can be counted: one process, without Horovod."""
    from dpro.trace.memory import MEMORY, load
    from dpro_integrations.exchange import Alone
    from dpro_integrations.keras_graph import Tracing
    from dpro_integrations.keras_single import KerasSingleAdapter

    keras.backend.clear_session()
    rows, width = 4096, 32
    model = keras.Sequential([keras.Input((width,)), *(dense(f"l{k}", k, activation="tanh") for k in range(4))])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    adapter = KerasSingleAdapter(Tracing(model, None), Alone())
    x = np.ones((rows, width), np.float32)
    for _ in range(3):
        model.train_on_batch(x, x)
        adapter.obstacle()
    adapter.meter_memory()
    adapter.start_capture()
    for _ in range(3):
        model.train_on_batch(x, x)
        adapter.mark_step()
    measured = load(adapter.stop_capture().meta.extra.get(MEMORY))
    adapter.close()
    assert measured is not None
    one = rows * width * 4
    kept = {
        unit.name: sum(h.nbytes for h in measured.held if unit.forward <= h.made < unit.after and h.freed >= unit.after)
        for unit in measured.units
    }
    return {
        "kept": {name: nbytes / one for name, nbytes in kept.items()},
        "outputs": [sum(h.nbytes for h in measured.held if h.output == k) / one for k in range(4)],
        "peak": measured.peak / one,
        "order": [[u.forward, u.after, u.backward] for u in measured.units],
        "refused": [u.refused for u in measured.units],
    }
