import numpy as np
import pytest

from dpro.graph.cluster import Cluster, Device, Line
from dpro.graph.graph import OpKind
from dpro.graph.tasks import CHANNEL, Tasks, TasksBuilder
from dpro.replay.engine import CycleError
from dpro.replay.placed import judge


def line(count: int, memory_bytes: int = 0) -> Cluster:
    """Transfers at 1 ns a byte."""
    return Cluster([Device(f"d{i}", "gpu", "host", memory_bytes) for i in range(count)], Line(0.0, 1.0))


def chain() -> Tasks:
    """a (10 ns, keeps 1000) -> 50 bytes -> b (20) -> 30 bytes -> c (5)."""
    build = TasksBuilder()
    a = build.task("a", "Op", OpKind.FORWARD, 10, kept_bytes=1000)
    b = build.task("b", "Op", OpKind.FORWARD, 20)
    c = build.task("c", "Op", OpKind.FORWARD, 5)
    build.tensor(a, 50, [b])
    build.tensor(b, 30, [c])
    return build.build()


def test_a_step_on_one_device() -> None:
    found = judge(chain(), np.zeros(3, np.int64), line(1))
    assert found.makespan_ns == 35
    # while b runs: what a keeps, what b reads and what it makes
    assert found.peak_bytes.tolist() == [1000 + 50 + 30]


def test_a_step_on_two_devices() -> None:
    found = judge(chain(), np.array([0, 1, 0]), line(2))
    assert found.makespan_ns == 10 + 50 + 20 + 30 + 5
    # on 0: a's tensor until it is sent (60), then what comes back (from 80); on 1: 50 that arrive and 30 that b makes
    assert found.peak_bytes.tolist() == [1000 + 50, 50 + 30]


def test_a_buffer_is_there_until_the_last_that_reads_it() -> None:
    build = TasksBuilder()
    a, b, c, d = (build.task(name, "Op", OpKind.FORWARD, 10) for name in "abcd")
    build.tensor(a, 100, [b, d])
    build.tensor(b, 7, [c])
    build.tensor(c, 5, [d])
    found = judge(build.build(), np.zeros(4, np.int64), line(1))
    assert found.peak_bytes.tolist() == [100 + 7 + 5]


def test_memory_is_limited_by_device() -> None:
    assert judge(chain(), np.zeros(3, np.int64), line(1, 1080)).fits
    assert not judge(chain(), np.zeros(3, np.int64), line(1, 1079)).fits


def test_two_tensors_on_one_link_follow_one_another_and_on_two_they_do_not() -> None:
    build = TasksBuilder()
    a = build.task("a", "Op", OpKind.FORWARD, 10)
    readers = [build.task(name, "Op", OpKind.FORWARD, 1) for name in "bc"]
    for reader in readers:
        build.tensor(a, 40, [reader])
    assert judge(build.build(), np.array([0, 1, 1]), line(2)).makespan_ns == 10 + 40 + 40 + 1
    assert judge(build.build(), np.array([0, 1, 2]), line(3)).makespan_ns == 10 + 40 + 1


def test_priorities_say_who_goes_first() -> None:
    build = TasksBuilder()
    short = build.task("short", "Op", OpKind.FORWARD, 5)
    long = build.task("long", "Op", OpKind.FORWARD, 10)
    last = build.task("last", "Op", OpKind.FORWARD, 20)
    build.tensor(long, 0, [last])
    tasks, device = build.build(), np.array([0, 0, 1])
    assert judge(tasks, device, line(2)).makespan_ns == 5 + 10 + 20
    assert judge(tasks, device, line(2), np.array([2, 1, 0])).makespan_ns == 10 + 20
    assert short == 0


def test_what_a_collective_works_on_is_counted_where_it_was_made() -> None:
    build = TasksBuilder()
    one, two = (build.task(name, "Op", OpKind.BACKWARD, 10) for name in "ab")
    both = build.task("reduce", "AllReduce", OpKind.COLLECTIVE, 33)
    for task in (one, two):
        build.tensor(task, 8, [both])
    found = judge(build.build(), np.array([0, 1, CHANNEL]), line(2))
    assert (found.makespan_ns, found.peak_bytes.tolist()) == (43, [8, 8])


def test_tasks_that_wait_for_themselves_are_named() -> None:
    build = TasksBuilder()
    a, b = (build.task(name, "Op", OpKind.FORWARD, 1) for name in "ab")
    build.tensor(a, 1, [b])
    build.tensor(b, 1, [a])
    with pytest.raises(CycleError, match="waits for itself"):
        judge(build.build(), np.zeros(2, np.int64), line(1))
