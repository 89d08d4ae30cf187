import numpy as np

from dpro.graph.cluster import Cluster, Device, Line
from dpro.graph.graph import NO_RESOURCE, OpKind
from dpro.graph.tasks import CHANNEL, Tasks, TasksBuilder, lower


def fan(readers: int = 3) -> Tasks:
    """One task whose 100 bytes all of the others read."""
    build = TasksBuilder()
    first = build.task("a", "Op", OpKind.FORWARD, 10)
    rest = [build.task(f"r{i}", "Op", OpKind.FORWARD, 20 + i) for i in range(readers)]
    build.tensor(first, 100, rest)
    return build.build()


def line(count: int) -> Cluster:
    return Cluster([Device(f"d{i}", "gpu", "host") for i in range(count)], Line(5.0, 0.5))


def test_uses_are_edges_with_bytes() -> None:
    source, reader, nbytes = fan(2).edges()
    assert (source.tolist(), reader.tolist(), nbytes.tolist()) == ([0, 0], [1, 2], [100, 100])


def test_a_tensor_goes_once_to_each_device() -> None:
    placed = lower(fan(), np.array([0, 1, 1, 0]), line(2))
    assert placed.sent_op.tolist() == [4]
    graph = placed.graph
    assert sorted(map(tuple, graph.edges().tolist())) == [(0, 3), (0, 4), (4, 1), (4, 2)]
    assert graph.column("duration").tolist() == [10, 20, 21, 22, 55]  # 5 + 0.5 · 100
    names = [graph.resource_names[r] for r in graph.column("resource")]
    assert names == ["d0", "d1", "d1", "d0", "link/d0>d1"]


def test_a_transfer_is_as_urgent_as_the_most_urgent_of_its_readers() -> None:
    placed = lower(fan(), np.array([0, 1, 1, 2]), line(3), np.array([0, 7, 4, 9]))
    assert placed.sent_to.tolist() == [1, 2]
    assert placed.graph.column("priority")[placed.sent_op].tolist() == [4, 9]


def test_what_takes_no_time_waits_for_no_device() -> None:
    build = TasksBuilder()
    build.task("w", "Op", OpKind.LOCAL)
    graph = lower(build.build(), np.array([1]), line(2)).graph
    assert graph.column("resource").tolist() == [NO_RESOURCE]


def test_a_collective_has_the_channel_and_its_tensors_are_not_sent() -> None:
    build = TasksBuilder()
    one, two = (build.task(name, "Op", OpKind.BACKWARD, 10) for name in "ab")
    both = build.task("reduce", "AllReduce", OpKind.COLLECTIVE, 33)
    for task in (one, two):
        build.tensor(task, 8, [both])
    placed = lower(build.build(), np.array([0, 1, CHANNEL]), line(2))
    assert len(placed.sent_op) == 0
    resource = placed.graph.column("resource")
    assert placed.graph.resource_names[resource[both]] == "collectives"
    assert placed.graph.column("duration")[both] == 33


def test_a_device_takes_by_its_speed() -> None:
    cluster = Cluster(
        [Device("a", "fast", "host"), Device("b", "slow", "host")], Line(0, 0), speeds={"slow": {"Op": 0.5}}
    )
    placed = lower(fan(1), np.array([0, 1]), cluster)
    assert placed.graph.column("duration")[:2].tolist() == [10, 40]
