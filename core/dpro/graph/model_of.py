"""A captured rank's step as a model to place: its units, one after another.

Knows a graph whose memory was measured (:mod:`dpro.graph.memory`): that tells which ops are whose and what a unit hands
on. Units are joined in the order in which they ran: what skips some of them (a residual) is not seen, and said.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from dpro.errors import DproError
from dpro.graph.graph import Graph, OpKind, TensorInfo
from dpro.graph.memory import RankMemory
from dpro.trace.memory import MEMORY
from dpro.trace.model_graph import ModelGraph, ModelOp, Role, Tensor

NEEDS = "its memory was not measured: capture with memory_bytes set, which tells units and what they hand on"


def model_of(graph: Graph, name: str) -> ModelGraph:
    """The first rank's step, of ops that are there to be placed: a VARIABLE, FORWARD, BACKWARD and UPDATE op per unit.

    What the batch is cannot be told from it: all bytes and times are of a rank's.

    Raises:
        DproError: the capture does not tell its units.
    """
    memories: dict[int, RankMemory] = graph.info.get(MEMORY, {})
    if not memories:
        raise DproError(NEEDS)
    rank = min(memories)
    memory = memories[rank]
    profile = memory.profile
    units = sorted(profile.units, key=lambda unit: unit.forward)
    if not units:
        raise DproError("no unit of the model runs once in its step")
    number = {unit.name: k for k, unit in enumerate(profile.units)}
    made = np.zeros(len(profile.units), np.int64)
    for held in profile.held:
        if held.output >= 0:
            made[held.output] += held.nbytes
    begins = [unit.forward for unit in units] + [min(unit.backward for unit in units)]
    forward_ns = [_took_ns(graph, memory, range(*span)) for span in pairwise(begins)]
    back = sorted(units, key=lambda unit: unit.backward)
    ends = [unit.backward for unit in back] + [profile.segments - 1]
    backward_ns = dict(
        zip((u.name for u in back), (_took_ns(graph, memory, range(*s)) for s in pairwise(ends)), strict=True)
    )
    update_ns = _took_ns(graph, memory, range(profile.segments - 1, profile.segments), OpKind.UPDATE)
    of_unit = {unit.name: _parameter_bytes(graph, unit.name) for unit in units}
    total = sum(of_unit.values())

    ops: list[ModelOp] = []
    tensors: list[Tensor] = []
    variable: dict[str, int] = {}
    forward: dict[str, int] = {}
    for unit, time_ns in zip(units, forward_ns, strict=True):
        if of_unit[unit.name]:
            variable[unit.name] = len(ops)
            ops.append(ModelOp(f"{unit.name}/variable", "unit", Role.VARIABLE, 0, of_unit[unit.name]))
        forward[unit.name] = len(ops)
        ops.append(ModelOp(unit.name, "unit", Role.FORWARD, time_ns))
    backward: dict[str, int] = {}
    for unit in back:
        backward[unit.name] = len(ops)
        one = forward[unit.name]
        ops.append(ModelOp(f"{unit.name}/backward", "unit", Role.BACKWARD, backward_ns[unit.name], 0, one))
        if unit.name in variable:
            held_by, nbytes = variable[unit.name], of_unit[unit.name]
            taken_ns = update_ns * nbytes // total
            ops.append(ModelOp(f"{unit.name}/update", "Update", Role.UPDATE, taken_ns, 0, held_by))
            update = len(ops) - 1
            tensors.append(Tensor(backward[unit.name], nbytes, (update,), batched=False))
            tensors.append(Tensor(held_by, nbytes, (one, backward[unit.name], update), batched=False))
    for unit, after in zip(units, [*units[1:], None], strict=True):
        nbytes = int(made[number[unit.name]])
        users = [backward[unit.name]]
        if after is not None:
            users += [forward[after.name], backward[after.name]]
            tensors.append(Tensor(backward[after.name], nbytes, (backward[unit.name],)))
        tensors.append(Tensor(forward[unit.name], nbytes, tuple(users)))
    said = [f"rank {rank}'s {len(units)} units, one after another: what skips some of them is not seen"]
    return ModelGraph(name, ops, tensors, said)


def _took_ns(graph: Graph, memory: RankMemory, segments: Iterable[int], kind: OpKind | None = None) -> int:
    """Time of the ops of these segments: on the device where there is one, else on the host."""
    parts = memory.device if any(memory.device) else memory.host
    ops = np.array([op for segment in segments for op in parts[segment]], dtype=np.int64)
    if kind is not None:
        ops = ops[graph.column("kind")[ops] == kind]
    return int(graph.column("duration")[ops].sum())


def parameters_of(graph: Graph, unit: str) -> list[TensorInfo]:
    """The gradients of a unit's parameters: ``conv1.weight`` (torch, MXNet), ``conv1/kernel`` (Keras)."""
    return [tensor for tensor in graph.tensors if tensor.name.startswith((f"{unit}.", f"{unit}/"))]


def _parameter_bytes(graph: Graph, unit: str) -> int:
    return sum(tensor.nbytes for tensor in parameters_of(graph, unit))
