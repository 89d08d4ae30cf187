"""Ops that may run on any device of a cluster, the tensors between them, and how they become a replayable graph.

FastT, HeteroG and DisCo meet here: what a model is split or replicated into is :class:`Tasks`; a device and a priority
for each makes it a :class:`~dpro.graph.graph.Graph` (:func:`lower`), in which devices and links are resources, so that
the one replayer judges all of them. Knows no strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpro.graph.cluster import SHARED_LINK, Cluster
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind

Ints = npt.NDArray[np.int64]
#: As a device: the task is a collective, and runs on the one channel that they share.
CHANNEL = -1


@dataclass
class Tasks:
    """n tasks, t tensors, e uses of a tensor by a task. All arrays int64 but as said.

    ``time_ns`` [n]: on the reference device (of a collective: what it takes). ``kept_bytes`` [n]: parameters and the
    like, on the device that runs it. ``together`` [n]: tasks of one number (>= 0) run on one device. ``origin`` [n]:
    the op of the model that it comes from, -1 for what was put in. ``tensor_of`` [t]: who makes it, ``tensor_bytes``
    [t]; ``use_tensor``, ``use_task`` [e]: who reads it. ``info``: for those who made it and those who split it further.
    """

    names: list[str]
    types: list[str]
    kind: npt.NDArray[np.uint8]
    time_ns: Ints
    kept_bytes: Ints
    together: Ints
    origin: Ints
    tensor_of: Ints
    tensor_bytes: Ints
    use_tensor: Ints
    use_task: Ints
    info: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def edges(self) -> tuple[Ints, Ints, Ints]:
        """(producer, consumer, bytes) of every use."""
        return self.tensor_of[self.use_tensor], self.use_task, self.tensor_bytes[self.use_tensor]


@dataclass
class TasksBuilder:
    """Appends tasks and tensors; :meth:`build` makes arrays of them."""

    names: list[str] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    time_ns: list[int] = field(default_factory=list)
    kept_bytes: list[int] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    origin: list[int] = field(default_factory=list)
    tensor_of: list[int] = field(default_factory=list)
    tensor_bytes: list[int] = field(default_factory=list)
    use_tensor: list[int] = field(default_factory=list)
    use_task: list[int] = field(default_factory=list)

    def task(
        self,
        name: str,
        op_type: str,
        kind: OpKind,
        time_ns: int = 0,
        *,
        kept_bytes: int = 0,
        together: int = -1,
        origin: int = -1,
    ) -> int:
        """Its number."""
        self.names.append(name)
        self.types.append(op_type)
        self.kind.append(int(kind))
        self.time_ns.append(time_ns)
        self.kept_bytes.append(kept_bytes)
        self.together.append(together)
        self.origin.append(origin)
        return len(self.names) - 1

    def tensor(self, producer: int, nbytes: int, consumers: Sequence[int] = ()) -> int:
        """Its number."""
        self.tensor_of.append(producer)
        self.tensor_bytes.append(nbytes)
        number = len(self.tensor_of) - 1
        for task in consumers:
            self.use(number, task)
        return number

    def use(self, tensor: int, task: int) -> None:
        """``task`` reads ``tensor``."""
        self.use_tensor.append(tensor)
        self.use_task.append(task)

    def build(self) -> Tasks:
        """What was appended so far."""

        def ints(values: list[int]) -> Ints:
            return np.array(values, dtype=np.int64)

        return Tasks(
            list(self.names), list(self.types), np.array(self.kind, dtype=np.uint8), ints(self.time_ns),
            ints(self.kept_bytes), ints(self.together), ints(self.origin), ints(self.tensor_of),
            ints(self.tensor_bytes), ints(self.use_tensor), ints(self.use_task),
        )  # fmt: skip


def _channels(tasks: Tasks, device: Ints, cluster: Cluster, graph: Graph) -> Ints:
    """[n] what a collective runs on: one channel, or, where there is one link between machines and it uses that, the
    link.
    """
    channel = np.full(len(tasks), graph.resource("collectives"))
    between = SHARED_LINK in cluster.links
    if between and np.any(device == CHANNEL):
        machines = {device.machine: i for i, device in enumerate(cluster.devices)}
        machine = np.array([machines[device.machine] for device in cluster.devices])
        member = device[tasks.use_task] == CHANNEL
        task, of = tasks.use_task[member], machine[device[tasks.tensor_of[tasks.use_tensor[member]]]]
        least, most = np.full(len(tasks), len(machine)), np.full(len(tasks), -1)
        np.minimum.at(least, task, of)
        np.maximum.at(most, task, of)
        channel[least < most] = graph.resource(SHARED_LINK)
    return channel


@dataclass(frozen=True)
class Placed:
    """A graph of tasks on devices. Op i is task i for i < len(tasks); the rest are transfers, one for each tensor and
    device that it goes to: ``sent_tensor``, ``sent_to``, ``sent_op`` [transfers].
    """

    tasks: Tasks
    device: Ints
    graph: Graph
    sent_tensor: Ints
    sent_to: Ints
    sent_op: Ints


def lower(tasks: Tasks, device: Ints, cluster: Cluster, priority: Ints | None = None) -> Placed:
    """Tasks on their devices, transfers on the links between, as a graph to replay.

    A tensor goes once to each device that reads it, whoever reads it there. A transfer takes its turn on its link by
    the most urgent of its readers, or by a priority of its own. Tasks that take no time wait for no device.

    Args:
        device: [n]; :data:`CHANNEL` for collectives, whose tensors cost no transfer.
        priority: [n], or [n + transfers] in the order of :class:`Placed`: smaller first among what is ready; None:
            first come, first served.

    Raises:
        ValueError: priorities of another length.
    """
    n = len(tasks)
    on = np.maximum(device, 0)
    duration = np.where(device == CHANNEL, tasks.time_ns, cluster.time_on_ns(tasks.types, tasks.time_ns, on))
    graph = Graph()
    lanes = np.array([graph.resource(d.name) for d in cluster.devices])
    links = np.array([graph.resource(name) for name in cluster.links], dtype=np.int64)
    channel = _channels(tasks, device, cluster, graph)
    urgent = np.zeros(n, np.int64) if priority is None else priority[:n]
    resource = np.where(device == CHANNEL, channel, lanes[on])
    resource = np.where(duration == 0, NO_RESOURCE, resource)
    graph.add_ops(
        graph.numbers(tasks.names), tasks.kind, n, resource=resource, duration=duration, priority=urgent, rank=on
    )

    src, dst, _ = tasks.edges()
    away = (device[src] != device[dst]) & (device[src] != CHANNEL) & (device[dst] != CHANNEL)
    graph.add_edges(np.stack([src[~away], dst[~away]], axis=1))
    pair = tasks.use_tensor[away] * len(cluster) + on[dst[away]]
    sent, use = np.unique(pair, return_inverse=True)
    tensor, to = sent // len(cluster), sent % len(cluster)
    first = np.full(len(sent), np.iinfo(np.int32).max, dtype=np.int64)
    np.minimum.at(first, use, urgent[dst[away]])
    if priority is not None and len(priority) > n:
        if len(priority) != n + len(sent):
            raise ValueError(f"{len(priority)} priorities of {n} tasks and {len(sent)} transfers")
        first = priority[n:]
    source = on[tasks.tensor_of[tensor]]
    nbytes = tasks.tensor_bytes[tensor]
    taken = np.rint(cluster.latency_ns[source, to] + cluster.ns_per_byte[source, to] * nbytes).astype(np.int64)
    ops = graph.add_ops(
        "transfer", OpKind.SEND, len(sent), resource=links[cluster.link[source, to]] if len(links) else NO_RESOURCE,
        duration=taken, priority=first, rank=source, tensor=tensor, nbytes=nbytes,
    )  # fmt: skip
    graph.add_edges(np.stack([tasks.tensor_of[tensor], ops], axis=1))
    graph.add_edges(np.stack([ops[use], dst[away]], axis=1))
    graph.ranks = len(cluster)
    return Placed(tasks, device, graph, tensor, to, ops)
