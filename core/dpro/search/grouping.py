"""Ops that are decided on together: HeteroG's groups (CoNEXT 2020, section 4.1.1).

Knows a model's ops and tensors; not what is decided. A variable, what updates it, what reads it and the backward ops of
those are one *unit* from the start: HeteroG's rule that a tensor without rows ties both its ends. The costliest units
are centres of groups, every other one joins the centre that it is fewest hops away from. A unit costs its ops' time,
and the time that its variables need on a link: a layer of few FLOPs and many parameters is a decision of its own. (The
paper counts times of ops alone.)
"""

from __future__ import annotations

from collections import deque

import numpy as np

from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints
from dpro.trace.model_graph import ModelGraph, Role

DEFAULT_GROUPS = 40


def group(model: ModelGraph, cluster: Cluster, most: int = DEFAULT_GROUPS) -> Ints:
    """[ops] the group of each, of at most ``most``, by decreasing time of their ops.

    Raises:
        ValueError: no group.
    """
    if most < 1:
        raise ValueError("at least one group")
    unit = _units(model)
    count = int(unit.max()) + 1 if len(unit) else 0
    time_ns = np.bincount(unit, [op.time_ns for op in model.ops], count)
    kept = np.bincount(unit, [op.kept_bytes for op in model.ops], count)
    cost = time_ns + kept * float(cluster.ns_per_byte.max(initial=0.0))
    centres = np.argsort(-cost, kind="stable")[:most].tolist()
    near: list[dict[int, None]] = [{} for _ in range(count)]
    for tensor in model.tensors:
        a = int(unit[tensor.producer])
        for consumer in tensor.consumers:
            b = int(unit[consumer])
            if a != b:
                near[a][b] = near[b][a] = None
    of = np.full(count, -1, dtype=np.int64)
    of[centres] = np.arange(len(centres))
    front = deque(centres)
    while front:
        one = front.popleft()
        for other in near[one]:
            if of[other] < 0:
                of[other] = of[one]
                front.append(other)
    of[of < 0] = 0
    total = np.bincount(of, time_ns, len(centres))
    place = np.empty(len(centres), dtype=np.int64)
    place[np.argsort(-total, kind="stable")] = np.arange(len(centres))
    out: Ints = place[of[unit]]
    return out


def _units(model: ModelGraph) -> Ints:
    """[ops], numbered by their first ops."""
    root = list(range(len(model.ops)))

    def find(op: int) -> int:
        while root[op] != op:
            root[op] = root[root[op]]
            op = root[op]
        return op

    def join(a: int, b: int) -> None:
        a, b = find(a), find(b)
        root[max(a, b)] = min(a, b)

    for number, op in enumerate(model.ops):
        if op.partner >= 0:
            join(number, op.partner)
    for tensor in model.tensors:
        trained = model.ops[tensor.producer].role is Role.VARIABLE
        for consumer in tensor.consumers:
            if not tensor.batched and (trained or model.ops[consumer].role is Role.UPDATE):
                join(tensor.producer, consumer)
    return np.unique([find(op) for op in range(len(root))], return_inverse=True)[1].astype(np.int64).ravel()
