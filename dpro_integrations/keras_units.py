"""Of which units a Keras model is made, and which of them may run twice in a step.

A model made of Keras' functional graph is cut wherever only one tensor goes on: what lies between two cuts is a *unit*,
a layer of a chain, or all layers of a branching block. It is called by the layer that makes what goes on. Units follow
each other in one chain, so any run of them is a block of ``plan.recompute``: ``<first unit>..<last unit>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensorflow import keras
from tensorflow.python.framework import op_def_registry

from dpro.errors import PlanError
from dpro_integrations.keras_regions import RANDOM
from dpro_integrations.keras_version import KERAS3, CallNode, layers_within

#: Give on the memory that they take: such a layer is of the unit of the layer behind it.
_RESHAPE = frozenset({"Flatten", "Reshape"})
#: Write their result where what they take was: of the unit before them, which would have nothing to hand on.
_IN_PLACE = frozenset({"Activation", "ELU", "LeakyReLU", "ReLU"})
#: Ops that count as stateful, and may run twice all the same.
_HARMLESS = frozenset({"ReadVariableOp", "VarHandleOp", "VariableShape", "ResourceGather", "Assert"})


@dataclass(frozen=True)
class UnitLayers:
    """``nodes`` are calls in the model's graph, in order; ``taken`` and ``given`` ids of the tensors that come in and
    go on. ``refused``: why it must not run twice ("": nothing is known against it)."""

    name: str
    nodes: tuple[CallNode, ...]
    taken: str
    given: str
    refused: str

    @property
    def layers(self) -> list[Any]:
        return [node.layer for node in self.nodes]


def units(model: Any) -> list[UnitLayers]:
    """The model's units, in order; none of a model that is no functional graph, or in Keras 3."""
    if KERAS3:
        return []
    by_depth = getattr(model, "_nodes_by_depth", {})
    nodes = [CallNode(known) for depth in sorted(by_depth, reverse=True) for known in by_depth[depth]
             if not known.is_input]  # fmt: skip
    if not nodes or len(model.inputs) != 1:
        return []
    left = Counter(key for node in nodes for key, _ in node.inputs)
    left.update(str(id(tensor)) for tensor in model.outputs)
    calls = Counter(id(node.layer) for node in nodes)
    maker: dict[str, CallNode] = {}
    open_, taken = {str(id(model.inputs[0]))}, str(id(model.inputs[0]))
    found: list[UnitLayers] = []
    members: list[CallNode] = []
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        members.append(node)
        left.subtract(key for key, _ in node.inputs)
        maker.update(dict.fromkeys(node.outputs, node))
        open_ = {key for key in (*open_, *node.outputs) if left[key] > 0}
        shares = following is not None and (_is(node, _RESHAPE) or _is(following, _IN_PLACE))
        if len(open_) == 1 and (given := next(iter(open_))) != taken and not shares:
            refused = _why_not_twice(members, calls)
            found.append(UnitLayers(str(maker[given].layer.name), tuple(members), taken, given, refused))
            members, taken = [], given
    names = {unit.name for unit in found}
    return found if len(names) == len(found) else []  # a layer that is called twice ends two units


def blocks_of(model: Any, names: Iterable[str]) -> list[list[UnitLayers]]:
    """The runs of units that are called so.

    Raises:
        PlanError: no such block, one that must not run twice, or one unit in two blocks.
    """
    if KERAS3:
        raise PlanError("blocks are recomputed in Keras 2 only")
    known = units(model)
    place = {unit.name: number for number, unit in enumerate(known)}
    taken: set[int] = set()
    found = []
    for name in names:
        first, dots, last = name.partition("..")
        begin = place.get(first, -1)
        end = place.get(first.rpartition(".")[0] + "." * ("." in first) + last, -1) if dots else begin
        if begin < 0 or end < begin:
            raise PlanError(f"the model has no block {name!r}")
        if taken & (run := set(range(begin, end + 1))):
            raise PlanError(f"block {name!r} has a layer that another block has as well")
        taken |= run
        for unit in known[begin : end + 1]:
            if unit.refused:
                raise PlanError(f"block {name!r} can't be recomputed: {unit.refused}")
        found.append(known[begin : end + 1])
    return found


def why_not_again(ops: Iterable[str]) -> str:
    """Why ops of these types must not run a second time; "" if they may."""
    for op in ops:
        known = op_def_registry.get(op)
        if op in _HARMLESS or known is None or not known.is_stateful:
            continue
        if RANDOM.search(op):
            return f"it draws random numbers ({op}), which would be others the second time"
        return f"it runs {op}, which leaves something behind"
    return ""


def _is(node: CallNode, kinds: frozenset[str]) -> bool:
    return type(node.layer).__name__ in kinds


def _why_not_twice(nodes: list[CallNode], calls: Counter[int]) -> str:
    """What can be told without a look at its ops, of a model that has made steps."""
    for node in nodes:
        if calls[id(node.layer)] > 1:
            return f"layer {node.layer.name!r} is called more than once"
        for layer in layers_within(node.layer):
            if getattr(layer, "activity_regularizer", None) is not None or layer._losses or layer._metrics:
                return f"layer {layer.name!r} adds to the loss or the metrics"
            if isinstance(layer, keras.layers.BatchNormalization) and layer.renorm:
                return f"layer {layer.name!r} normalises with its moving averages"
    at_edges = [tensor for _, tensor in nodes[0].inputs] + nodes[-1].made
    if any(getattr(tensor, "_keras_mask", None) is not None for tensor in at_edges):
        return "a mask goes in or out"
    return ""
