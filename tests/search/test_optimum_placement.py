from itertools import permutations, product

import numpy as np
import pytest

from benchmarks.optimum_placement import optimum
from benchmarks.placement_models import branching, small_tasks
from dpro.graph.cluster import Cluster
from dpro.graph.graph import OpKind
from dpro.graph.tasks import TasksBuilder
from dpro.replay.placed import judge
from dpro.search.fastt import place
from tests.search.task_graphs import cluster, tasks_of

pytest.importorskip("ortools", reason="OR-tools is not installed")


def test_the_optimum_of_a_fork_is_worked_out_by_hand() -> None:
    # b and c side by side, and c's 10 bytes back: 10 + max(100, 10 + 60 + 10) + 5; on one device 175
    tasks = tasks_of(
        {"a": 10, "b": 100, "c": 60, "d": 5}, [("a", "c", 10), ("a", "b", 0), ("b", "d", 0), ("c", "d", 10)]
    )
    found = optimum(tasks, cluster(2))
    assert (found.makespan_ns, found.bound_ns, found.proved) == (115, 115, True)


def test_what_is_together_is_on_one_device() -> None:
    build = TasksBuilder()
    a, b = (build.task(name, "Op", OpKind.FORWARD, 10, together=0) for name in "ab")
    rest = [build.task(f"r{i}", "Op", OpKind.FORWARD, 100, together=1) for i in range(3)]
    build.tensor(a, 50, rest)
    build.tensor(b, 30, [rest[2]])
    # side by side 10 + 50 + 300; on one device 20 + 300
    assert optimum(build.build(), cluster(2)).makespan_ns == 320
    # on a link that is ten times as fast 10 + 5 + 300, and b's tensor is there long before r2's turn
    assert optimum(build.build(), cluster(2, 0.1)).makespan_ns == 315


def test_a_link_carries_one_tensor_at_a_time() -> None:
    # a and b must be apart from c and d, who take 20 each from 10 on: 10 + 20 and 10 + 40, and 5
    build = TasksBuilder()
    a, b = (build.task(name, "Op", OpKind.FORWARD, ns, together=0) for name, ns in (("a", 10), ("b", 100)))
    c, d = (build.task(name, "Op", OpKind.FORWARD, ns, together=1) for name, ns in (("c", 100), ("d", 5)))
    build.tensor(a, 20, [c])
    build.tensor(a, 20, [d])
    # d first, which waits until 30 and is over at 35, then c: 135. c first: 130, then d: 135. Never 10 + 20 + 100
    assert optimum(build.build(), cluster(2)).makespan_ns == 135
    assert b < c


def test_no_placement_and_order_that_can_be_replayed_is_shorter() -> None:
    tasks = tasks_of({"a": 3, "b": 7, "c": 5, "d": 4}, [("a", "c", 2), ("b", "c", 3), ("a", "d", 6)])
    two = cluster(2)
    best = min(
        judge(tasks, np.array(device), two, np.array(order)).makespan_ns
        for device in product(range(2), repeat=4)
        for order in permutations(range(4))
    )
    found = optimum(tasks, two)
    assert found.proved
    assert found.makespan_ns == best


@pytest.mark.parametrize("number", [1, 2, 5])
def test_fastt_is_never_better_than_the_optimum(number: int) -> None:
    tasks, devices, link = small_tasks(number)
    uniform = Cluster.uniform(devices, link)
    found = place(tasks, uniform, splits=False)
    best = optimum(tasks, uniform, found.plan.device)
    assert best.bound_ns <= best.makespan_ns <= found.makespan_ns


def test_made_up_models_have_the_size_that_was_asked_for_and_come_again() -> None:
    model = branching(300)
    assert 300 <= len(model.ops) < 380  # a block more than that has at most 80
    assert model.ops == branching(300).ops
    assert all(len(small_tasks(number)[0]) <= 60 for number in range(100))
