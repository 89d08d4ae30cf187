"""Which layers of a Keras model could be one XLA cluster, and what that is worth: timed away from the training.

Candidates are runs of layers that only move memory: norms, activations, sums, in which each layer's result is taken by
the next alone, so that no way out of a run leads back into it; each layer in them that is several ops; attention, and
the user's own layers that hold others. Convolutions and dense layers are never among them: XLA on a CPU does not have
the framework's own kernels for these, and what it cannot fuse it does not make faster.

A run is called as the model calls it, with data of its shape, compiled and as it is in turns, and one run for all
of its kind. Nothing of the job is changed: states (moving averages) are put back, and no random numbers are drawn.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from dpro.trace.model import EventKind, RankTrace
from dpro.trace.regions import LayerOps, Region, RegionTime
from dpro_integrations.keras_graph import nodes_of, traced_functions
from dpro_integrations.keras_regions import RANDOM, Regions, layers_of
from dpro_integrations.keras_version import (
    CallNode,
    dtype_of,
    inner_layers,
    name_of,
    shape_of,
    takes_training,
    value_of,
)

#: Of several ops each, by their class in Keras: worth compiling on their own.
_SEVERAL_OPS = frozenset({
    "Activation", "BatchNormalization", "ELU", "GroupNormalization", "Lambda", "LayerNormalization", "PReLU", "Softmax",
    "UnitNormalization",
})  # fmt: skip
_ONE_OP = frozenset({
    "Add", "Average", "GlobalAveragePooling1D", "GlobalAveragePooling2D", "LeakyReLU", "Maximum", "Minimum", "Multiply",
    "ReLU", "Rescaling", "Subtract",
})  # fmt: skip
#: Hold layers of their own.
_BLOCKS = frozenset({"Attention", "AdditiveAttention", "MultiHeadAttention"})
#: A kind that has less of the captured compute is not worth the trial.
_LEAST_SHARE = 0.005
#: A run of more layers compiles for too long.
_MOST_LAYERS = 16
#: Where the job does not say how large its batches are: Keras' own default.
_USUAL_BATCH = 32
#: XLA compiles what has run so often already; then turns that are timed.
_WARM_RUNS, _TURNS = 3, 9


@dataclass(frozen=True)
class _Run:
    """Nodes of the model's graph, in order, with the names of their layers from the outside in."""

    nodes: tuple[CallNode, ...]
    names: tuple[str, ...]

    @property
    def layers(self) -> list[Any]:
        return [node.layer for node in self.nodes]

    def kind(self, batch: int) -> str:
        """Equal for runs that compute alike."""
        place = {key: i for i, key in enumerate(k for node in self.nodes for k in node.outputs)}
        told = [
            (
                type(node.layer).__qualname__,
                _config(node.layer),
                [(place.get(i, -1), shape_of(t), dtype_of(t)) for i, t in node.inputs],
                [(shape_of(weight), dtype_of(weight)) for weight in node.layer.weights],
            )
            for node in self.nodes
        ]
        return hashlib.sha256(repr((batch, told)).encode()).hexdigest()[:16]


def candidates(model: Any) -> list[_Run]:
    """Runs worth a trial; none in a model that is not made of Keras' functional graph."""
    known = {id(layer): name for name, layer in layers_of(model).items()}
    nodes = [node for node in _nodes(model) if id(node.layer) in known and _fits(node)]
    times_called = Counter(id(node.layer) for node in nodes)
    nodes = [node for node in nodes if times_called[id(node.layer)] == 1]
    users: Counter[str] = Counter(key for node in _nodes(model) for key in _taken(node))
    users.update(str(id(tensor)) for tensor in model.outputs)
    run_of: dict[str, list[Any]] = {}  # by what its last node makes
    blocks, runs = [], []
    for node in nodes:
        if not _moves_memory(node.layer):
            blocks += [[node]] if _is_block(node.layer) else []
            continue
        before = [run_of.pop(key) for key in dict.fromkeys(_taken(node)) if users[key] == 1 and key in run_of]
        run = [*(each for found in before for each in found), node]
        (out,) = node.outputs
        run_of[out] = run
    for run in run_of.values():
        if 1 < len(run) <= _MOST_LAYERS:
            runs.append(run)
        runs += [[node] for node in run if type(node.layer).__name__ not in _ONE_OP]
    return [_Run(tuple(run), tuple(known[id(node.layer)] for node in run)) for run in [*runs, *blocks]]


def time_regions(model: Any, regions: Regions, trace: RankTrace, budget_s: float) -> list[Region]:
    """Time the :func:`candidates`, those first that took most of the captured steps, until the time is up.

    What can't be timed is left out: layers that draw random numbers, what XLA refuses or compiles nothing of. Ends with
    the compiling that is under way when the time is up.

    Args:
        regions: of the model; compiled layers are as before afterwards.
    """
    deadline = time.monotonic() + budget_s
    batch = _batch(model)
    kinds: dict[str, list[_Run]] = {}
    for run in candidates(model):
        kinds.setdefault(run.kind(batch), []).append(run)
    took = _captured_ns(trace, [run for runs in kinds.values() for run in runs])
    share = {kind: sum(took[name] for run in runs for name in run.names) for kind, runs in kinds.items()}
    least = _LEAST_SHARE * float((trace.end - trace.start)[(trace.kind == EventKind.CPU_OP) & (trace.step >= 0)].sum())
    found: list[Region] = []
    before = regions.names
    try:
        for kind in sorted(kinds, key=lambda kind: -share[kind]):
            if share[kind] < least or time.monotonic() >= deadline:
                break
            try:
                timed = _timed(kinds[kind][0], regions, batch)
            except Exception:  # whatever this model's layers or XLA do not like: such a region is not offered
                continue
            if timed is not None:
                found += [Region(run.names, _weights(run), kind, timed) for run in kinds[kind]]
    finally:
        regions.set(before)
    return found


# -- the model's graph ---------------------------------------------------------------------------


def _nodes(model: Any) -> Iterator[CallNode]:
    """Nodes of a functional graph and of those in it, inputs before what takes them."""
    by_depth = getattr(model, "_nodes_by_depth", {})
    for depth in sorted(by_depth, reverse=True):
        for known in by_depth[depth]:
            node = CallNode(known)
            if isinstance(node.layer, keras.Model):
                yield from _nodes(node.layer)
            elif not known.is_input:
                yield node


def _taken(node: CallNode) -> list[str]:
    return [key for key, _ in node.inputs]


def _fits(node: CallNode) -> bool:
    """Whether it can be called on its own: one result, and every size but the batch's known."""
    layer = node.layer
    if len(node.outputs) != 1 or getattr(layer, "activity_regularizer", None) is not None:
        return False
    if getattr(layer, "supports_jit", True) is False:
        return False
    return all(None not in shape_of(tensor)[1:] for _, tensor in node.inputs)


def _own(layer: Any) -> bool:
    """The user's: not Keras', and nothing of Horovod's, whose layers talk to other ranks."""
    return type(layer).__module__.partition(".")[0] not in ("keras", "tensorflow", "horovod")


def _config(layer: Any) -> Any:
    """What the layer was made with, but for its name; of one of the user's that does not tell, which one it is."""
    try:
        return sorted((key, repr(value)) for key, value in layer.get_config().items() if key != "name")
    except Exception:
        return id(layer)


def _moves_memory(layer: Any) -> bool:
    if _own(layer):
        small = all(len(weight.shape) < 2 or 1 in shape_of(weight) for weight in layer.weights)
        return small and not inner_layers(layer)
    return type(layer).__name__ in _SEVERAL_OPS | _ONE_OP


def _is_block(layer: Any) -> bool:
    return type(layer).__name__ in _BLOCKS or (_own(layer) and bool(inner_layers(layer)))


def _weights(run: _Run) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name_of(weight) for layer in run.layers for weight in layer.trainable_weights))


def _batch(model: Any) -> int:
    """The job's batch, as its train step was traced for it."""
    for concrete in traced_functions(model.train_function):
        for spec in tf.nest.flatten(concrete.structured_input_signature):
            for element in tf.nest.flatten(getattr(spec, "_element_spec", None)):
                if element is not None and element.shape.rank and element.shape[0]:
                    return int(element.shape[0])
    return _USUAL_BATCH


def _captured_ns(trace: RankTrace, runs: list[_Run]) -> Counter[str]:
    """Captured time by layer, all steps together."""
    find = LayerOps(name for run in runs for name in run.names)
    layers = [find(name) for name in trace.names]
    found: Counter[str] = Counter()
    rows = np.flatnonzero((trace.kind == EventKind.CPU_OP) & (trace.step >= 0))
    for name, took in zip(trace.name[rows].tolist(), (trace.end - trace.start)[rows].tolist(), strict=True):
        if (layer := layers[name]) is not None:
            found[layer[0]] += took
    return found


# -- timing --------------------------------------------------------------------------------------


def _timed(run: _Run, regions: Regions, batch: int) -> RegionTime | None:
    """None: random numbers are drawn in it."""
    weights = [weight for layer in run.layers for weight in layer.weights]
    trainable = [weight for layer in run.layers for weight in layer.trainable_weights]
    values = [value_of(weight) for weight in weights]
    drawn = np.random.default_rng(0)  # a generator of our own
    made = {key for node in run.nodes for key in node.outputs}
    given = {key: tensor for node in run.nodes for key, tensor in node.inputs if key not in made}
    inputs = [_data(tensor, batch, drawn) for tensor in given.values()]
    towards = _data(run.nodes[-1].made[0], batch, drawn)

    def call(*values: Any) -> Any:
        return _called(run, dict(zip(given, values, strict=True)))

    def passes() -> tuple[Any, Any]:
        @tf.function(autograph=False)
        def forward(*values: Any) -> Any:
            return call(*values)

        @tf.function(autograph=False)
        def both(*values: Any) -> Any:
            floats = [value for value in values if value.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(floats)
                out = call(*values)
            return out, tape.gradient(out, [*floats, *trainable], output_gradients=towards)

        # traced now, while the layers are as they are to be
        specs = [tf.TensorSpec(value.shape, value.dtype) for value in inputs]
        return forward.get_concrete_function(*specs), both.get_concrete_function(*specs)

    @tf.function(autograph=False)
    def nothing(*values: Any) -> Any:
        return [tf.identity(value) for value in values]

    try:
        regions.set(())
        plain = passes()
        if any(RANDOM.search(node.op) for node in nodes_of(plain[0].graph.as_graph_def())):
            return None
        regions.set(run.names)
        fused = passes()
        ways = [nothing, *plain, *fused]
        for way in ways * _WARM_RUNS:
            way(*inputs)
        times = [[_ns(way, inputs) for way in ways] for _ in range(_TURNS)]
    finally:
        regions.set(())
        for weight, value in zip(weights, values, strict=True):
            weight.assign(value)
    # the shortest: all else is somebody else's work
    call_ns, forward_ns, both_ns, fused_forward_ns, fused_both_ns = (min(column) for column in zip(*times, strict=True))
    return _split(call_ns, (forward_ns, both_ns), (fused_forward_ns, fused_both_ns))


def _split(call_ns: int, plain: tuple[int, int], fused: tuple[int, int]) -> RegionTime:
    """Forward and backward, from the times of calls of the forward pass and of both, ns.

    A forward pass that is shorter than an empty call can't be told from it: then it is a third of both, on either side.
    """
    forward, whole = zip(
        *((forward - call_ns, max(3, both - call_ns)) for forward, both in (plain, fused)), strict=True
    )
    if any(not call_ns <= one < all_of_it for one, all_of_it in zip(forward, whole, strict=True)):
        forward = tuple(all_of_it // 3 for all_of_it in whole)
    return RegionTime(forward[0], whole[0] - forward[0], forward[1], whole[1] - forward[1])


def _called(run: _Run, values: dict[str, Any]) -> Any:
    """The run's result, of what comes into it by the names of the graph's tensors."""
    out = None
    for node in run.nodes:
        out = node.call(values, **({"training": True} if takes_training(node.layer) else {}))
        values[node.outputs[0]] = out
    return out


def _data(tensor: Any, batch: int, drawn: np.random.Generator) -> Any:
    """Something of the tensor's shape."""
    shape = [size or batch for size in shape_of(tensor)]
    if tf.as_dtype(tensor.dtype).is_floating:
        return tf.constant(drawn.standard_normal(math.prod(shape)).reshape(shape), tensor.dtype)
    return tf.zeros(shape, tensor.dtype)


def _ns(way: Callable[..., Any], inputs: list[Any]) -> int:
    begin = time.perf_counter_ns()
    way(*inputs)
    return time.perf_counter_ns() - begin
