"""A model's step once for each of several workers that share its batch: FastT's start graph (Middleware 2020, 5).

Knows ops, tensors and shares of a batch; not which device runs what. A variable, the sum of its gradients and its
update are one each, and stay together: all of them on one device is data parallelism with a parameter server there.
"""

from __future__ import annotations

from dpro.graph.graph import OpKind
from dpro.graph.tasks import Tasks, TasksBuilder
from dpro.trace.model_graph import ModelGraph, Role

#: What an op takes longer than its share when the batch is cut, ns: a launch does not shrink.
LAUNCH_NS = 10_000
REPLICA = "replica"
KIND = {
    Role.VARIABLE: OpKind.LOCAL, Role.FORWARD: OpKind.FORWARD, Role.BACKWARD: OpKind.BACKWARD,
    Role.UPDATE: OpKind.UPDATE,
}  # fmt: skip


def shared_ns(time_ns: int, share: float) -> int:
    """What an op takes with a share of its batch."""
    if share == 1.0 or not time_ns:
        return time_ns
    return round(time_ns * share) + LAUNCH_NS


def replicate(model: ModelGraph, replicas: int, batch: float = 1.0, *, by_layer: bool = False) -> Tasks:
    """``replicas`` copies of the forward and backward pass, each with its part of ``batch`` times the model's batch.

    Args:
        by_layer: with one copy, a layer's backward op stays with its forward op, and neither is cut: what a framework
            can be told that places layers.

    ``tasks.info["replica"]``: the copy that each task belongs to, -1 for variables, sums and updates.

    Raises:
        ValueError: no replica, or no batch.
    """
    if replicas < 1 or batch <= 0 or (by_layer and replicas > 1):
        raise ValueError("at least one replica, just one by layer, and some of the batch")
    share = batch / replicas
    build = TasksBuilder()
    replica: list[int] = []
    copies: list[list[int]] = []
    for number, op in enumerate(model.ops):
        one = op.role in (Role.VARIABLE, Role.UPDATE)
        owner = number if op.role is Role.VARIABLE else op.partner if op.role is Role.UPDATE else -1
        if by_layer and not one:
            owner = op.partner if op.partner >= 0 else number
        made = []
        for k in range(1 if one else replicas):
            name = op.name if one or replicas == 1 else f"{op.name}@{k}"
            time_ns = op.time_ns if one else shared_ns(op.time_ns, share)
            made.append(
                build.task(
                    name, op.type, KIND[op.role], time_ns, kept_bytes=op.kept_bytes, together=owner, origin=number
                )
            )
            replica.append(-1 if one else k)
        copies.append(made)
    for tensor in model.tensors:
        sources = copies[tensor.producer]
        if not tensor.batched and len(sources) > 1:
            _summed(build, replica, tensor.nbytes, sources, [copies[user] for user in tensor.consumers])
            continue
        for k, source in enumerate(sources):
            nbytes = round(tensor.nbytes * share) if tensor.batched else tensor.nbytes
            users = [c for user in tensor.consumers for c in _seen(copies[user], k, len(sources))]
            build.tensor(source, nbytes, users)
    tasks = build.build()
    tasks.info[REPLICA] = replica
    return tasks


def _seen(copies: list[int], k: int, sources: int) -> list[int]:
    """Of a consumer's copies those that read the k-th of so many: its own, or all."""
    return [copies[k]] if sources > 1 and len(copies) > 1 else copies


def _summed(
    build: TasksBuilder, replica: list[int], nbytes: int, sources: list[int], consumers: list[list[int]]
) -> None:
    """Each copy's part is added up beside who reads it."""
    first = consumers[0][0] if consumers else sources[0]
    name = f"{build.names[first]}/sum"
    total = build.task(name, "AddN", OpKind.LOCAL, together=build.together[first])
    replica.append(-1)
    for source in sources:
        build.tensor(source, nbytes, [total])
    build.tensor(total, nbytes, [copy for copies in consumers for copy in copies])
