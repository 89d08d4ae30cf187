"""Tasks to place: the example that HEFT and CPOP were published with, and small random ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from dpro.graph.cluster import Cluster, Device, Line
from dpro.graph.graph import OpKind
from dpro.graph.tasks import Ints, Tasks, TasksBuilder
from dpro.replay.engine import replay
from dpro.replay.placed import lower
from dpro.search.list_schedule import Problem, Schedule


def cluster(count: int, ns_per_byte: float = 1.0, latency_ns: float = 0.0, memory_bytes: int = 0) -> Cluster:
    return Cluster(
        [Device(f"gpu{i}", "gpu", "host", memory_bytes) for i in range(count)], Line(latency_ns, ns_per_byte)
    )


def tasks_of(times_ns: Mapping[str, int], edges: Sequence[tuple[str, str, int]] = ()) -> Tasks:
    """Tasks by name, and a tensor of so many bytes for each edge."""
    build = TasksBuilder()
    number = {name: build.task(name, "Op", OpKind.FORWARD, time_ns) for name, time_ns in times_ns.items()}
    for source, reader, nbytes in edges:
        build.tensor(number[source], nbytes, [number[reader]])
    return build.build()


#: Figure 2 of the HEFT paper (Topcuoglu et al., TPDS 2002), ten tasks on three processors; times three, so that means
#: are whole.
_TIMES = [
    (14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10), (13, 16, 9), (7, 15, 11), (5, 11, 14),
    (18, 12, 20), (21, 7, 16),
]  # fmt: skip
_EDGES = [
    (1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23), (4, 8, 27),
    (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13),
]  # fmt: skip


def heft_example() -> Problem:
    tasks = tasks_of({f"n{i}": 1 for i in range(1, 11)}, [(f"n{a}", f"n{b}", 3 * nbytes) for a, b, nbytes in _EDGES])
    return Problem(tasks, cluster(3), 3 * np.array(_TIMES, dtype=np.int64))


def random_tasks(rng: random.Random, most: int = 25) -> Tasks:
    """Up to ``most`` tasks: some take no time, some are together, some tensors have several readers."""
    build = TasksBuilder()
    n = rng.randint(1, most)
    groups = rng.choice([0, 0, 2])
    zero = rng.choice([0.0, 0.3])
    for i in range(n):
        build.task(
            f"t{i}", "Op", rng.choice([OpKind.FORWARD, OpKind.BACKWARD]),
            0 if rng.random() < zero else rng.randint(1, 20),
            kept_bytes=rng.randint(0, 5), together=rng.randrange(groups) if groups and rng.random() < 0.3 else -1,
        )  # fmt: skip
    for i in range(n - 1):
        for _ in range(rng.randint(0, 2)):
            readers = rng.sample(range(i + 1, n), min(n - 1 - i, rng.randint(1, 3)))
            build.tensor(i, rng.choice([0, rng.randint(1, 30)]), readers)
    return build.build()


def random_cluster(rng: random.Random, latency_ns: int = 0) -> Cluster:
    """One to four devices, on one or two machines whose devices may share a link."""
    count, two = rng.randint(1, 4), rng.random() < 0.5
    devices = [Device(f"d{i}", rng.choice("ab"), f"m{i % 2 if two else 0}") for i in range(count)]
    between = Line(latency_ns + rng.randint(0, 5), rng.choice([0.0, 1.0, 2.0]))
    return Cluster(
        devices, Line(latency_ns + rng.randint(0, 3), rng.choice([0.0, 0.5, 1.0])), between,
        speeds={"b": {"default": 0.5}}, shared=rng.random() < 0.3,
    )  # fmt: skip


def replayed_in_order(problem: Problem, schedule: Schedule) -> tuple[Ints, Ints]:
    """Start and end [n] in a replay in which every device and link serves in the order of the schedule."""
    placed = lower(problem.tasks, schedule.device, problem.cluster)
    start = np.concatenate([schedule.start_ns, np.zeros(len(placed.sent_op), np.int64)])
    end = np.concatenate([schedule.end_ns, np.zeros(len(placed.sent_op), np.int64)])
    op_of = {(t, d): op for t, d, op in zip(
        placed.sent_tensor.tolist(), placed.sent_to.tolist(), placed.sent_op.tolist(), strict=True
    )}  # fmt: skip
    assert sorted(op_of) == sorted(map(tuple, schedule.sent[:, :2].tolist()))
    for tensor, to, begin, finish in schedule.sent.tolist():
        start[op_of[tensor, to]], end[op_of[tensor, to]] = begin, finish
    resource = placed.graph.column("resource").copy()
    for lane in set(resource[resource >= 0].tolist()):
        ops = np.flatnonzero(resource == lane)
        served = ops[np.lexsort((end[ops], start[ops]))]
        placed.graph.add_edges(np.stack([served[:-1], served[1:]], axis=1))
    played = replay(placed.graph)
    n = len(problem.tasks)
    return played.start[:n], played.end[:n]
