"""Random training steps and clusters, small enough that every choice can be tried."""

from __future__ import annotations

import random

from dpro.graph.cluster import Cluster, Device, Line
from dpro.trace.model_graph import ModelGraph, ModelOp, Role, Tensor


def layers(
    seed: int, count: int, *, branches: bool = True, parameter_mb: tuple[float, float] = (0.1, 40)
) -> ModelGraph:
    """``count`` layers with parameters, each fed by one or two before it; 1 to 20 ms, 0.1 to 10 MB of rows."""
    rng = random.Random(seed)
    ops, tensors = [], []
    fed: list[list[int]] = []
    forward: list[int] = []
    for i in range(count):
        nbytes = round(1e6 * rng.uniform(*parameter_mb))
        ops.append(ModelOp(f"w{i}", "Variable", Role.VARIABLE, 0, nbytes))
        forward.append(len(ops))
        ops.append(ModelOp(f"f{i}", rng.choice(["Conv", "MatMul"]), Role.FORWARD, round(1e6 * rng.uniform(1, 20))))
        before = [i - 1] if i else []
        if branches and i > 1 and rng.random() < 0.4:
            before = sorted({i - 1, rng.randrange(i)})
        fed.append(before)
    backward: dict[int, int] = {}
    update: dict[int, int] = {}
    for i in reversed(range(count)):
        backward[i] = len(ops)
        ops.append(ModelOp(f"b{i}", ops[forward[i]].type, Role.BACKWARD, 2 * ops[forward[i]].time_ns, 0, forward[i]))
        update[i] = len(ops)
        ops.append(ModelOp(f"u{i}", "Update", Role.UPDATE, 0, 0, forward[i] - 1))
    for i in range(count):
        nbytes, w = ops[forward[i] - 1].kept_bytes, forward[i] - 1
        tensors += [Tensor(w, nbytes, (w + 1, backward[i], update[i]), False)]
        tensors += [Tensor(backward[i], nbytes, (update[i],), False)]
        rows = round(1e6 * rng.uniform(0.1, 10))
        users = [j for j in range(count) if i in fed[j]]
        tensors += [Tensor(forward[i], rows, (*(forward[j] for j in users), *(backward[j] for j in {i, *users})))]
        tensors += [Tensor(backward[j], rows, (backward[i],)) for j in users]
    return ModelGraph(f"layers{seed}", ops, tensors)


def pair(seed: int, memory_bytes: int = 0) -> Cluster:
    """Two devices of two machines, the second 1.1 to 1.9 times slower, op by op."""
    rng = random.Random(seed)
    devices = [Device("fast", "fast", "m0", memory_bytes), Device("slow", "slow", "m1", memory_bytes)]
    speeds = {"slow": {kind: 1 / rng.uniform(1.1, 1.9) for kind in ("Conv", "MatMul", "default")}}
    line = Line.of(rng.choice([1.0, 6.25, 12.5]), 20)
    return Cluster(devices, line, line, speeds=speeds)
