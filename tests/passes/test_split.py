import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.cluster import Cluster
from dpro.graph.graph import OpKind
from dpro.graph.tasks import Tasks, TasksBuilder
from dpro.passes.replicate import LAUNCH_NS, replicate
from dpro.passes.split import DIMENSIONS, dimensions, split
from dpro.replay.placed import judge
from dpro.search.ranks import topological
from dpro.trace import pipedream

_TIMES = "forward_compute_time=1.0, backward_compute_time=2.0"
TEXT = f"""\
node1 -- Conv2d(3, 8) -- {_TIMES}, activation_size=4000.0, parameter_size=1000.0
node2 -- BatchNorm2d(8) -- {_TIMES}, activation_size=3000.0, parameter_size=0.0
\tnode1 -- node2
"""


def model_tasks(replicas: int = 1) -> Tasks:
    return replicate(pipedream.parse(TEXT, Path("two.txt")), replicas)


def named(tasks: Tasks, name: str) -> int:
    return tasks.names.index(name)


def read(tasks: Tasks, task: int) -> list[tuple[str, int]]:
    """(producer, bytes) of all that a task reads."""
    uses = np.flatnonzero(tasks.use_task == task)
    return sorted(
        (tasks.names[tasks.tensor_of[t]], int(tasks.tensor_bytes[t])) for t in tasks.use_tensor[uses].tolist()
    )


def test_one_part_is_the_task_itself() -> None:
    tasks = model_tasks()
    assert split(tasks, named(tasks, "node1"), "batch", 1) is tasks


def test_by_batch_each_part_has_its_rows_and_all_parameters() -> None:
    tasks = split(model_tasks(), 1, "batch", 2)
    parts = [named(tasks, f"node1/part{i}") for i in range(2)]
    assert parts[0] == 1
    assert [read(tasks, part) for part in parts] == [[("node1/variable", 1000)]] * 2
    joined = named(tasks, next(name for name in tasks.names if "concat" in name))
    assert read(tasks, joined) == [("node1/part0", 2000), ("node1/part1", 2000)]
    assert (tasks.types[joined], tasks.time_ns[joined]) == ("Concat", LAUNCH_NS)
    # who read the whole reads what was put together
    assert (tasks.names[joined], 4000) in read(tasks, named(tasks, "node2"))


def test_by_channel_each_part_has_its_parameters_and_all_rows() -> None:
    whole = model_tasks()
    tasks = split(whole, named(whole, "node1/backward"), "channel", 2)
    cut = next(name for name in tasks.names if "/split" in name)
    assert read(tasks, named(tasks, cut)) == [("node1/variable", 1000)]
    for i in range(2):
        # the forward output, the gradient of it, and half of the parameters
        assert read(tasks, named(tasks, f"node1/backward/part{i}")) == [
            ("node1", 4000), (cut, 500), ("node2/backward", 4000),
        ]  # fmt: skip
    # each part makes the gradient of its own parameters
    joined = named(tasks, next(name for name in tasks.names if "/concat" in name))
    assert read(tasks, joined) == [("node1/backward/part0", 500), ("node1/backward/part1", 500)]
    assert (tasks.names[joined], 1000) in read(tasks, named(tasks, "node1/update"))


def test_by_batch_gradients_of_parameters_are_summands() -> None:
    whole = model_tasks()
    tasks = split(whole, named(whole, "node1/backward"), "batch", 4)
    added = named(tasks, next(name for name in tasks.names if "/addn" in name))
    assert tasks.types[added] == "AddN"
    assert read(tasks, added) == [(f"node1/backward/part{i}", 1000) for i in range(4)]


def test_what_a_replica_makes_stays_a_summand_of_all_replicas() -> None:
    whole = model_tasks(replicas=2)
    tasks = split(whole, named(whole, "node1/backward@1"), "batch", 2)
    readers = read(tasks, named(tasks, "node1/update/sum"))
    assert [nbytes for _, nbytes in readers] == [1000, 1000]
    assert "node1/backward@0" in [name for name, _ in readers]


def test_only_convolutions_and_matrix_products_are_cut() -> None:
    tasks = model_tasks()
    ways = {tasks.names[i]: dimensions(tasks, i) for i in range(len(tasks))}
    assert {name for name, found in ways.items() if found} == {"node1", "node1/backward"}
    assert ways["node1"] == DIMENSIONS
    with pytest.raises(ValueError, match="node2"):
        split(tasks, named(tasks, "node2"), "batch", 2)
    with pytest.raises(ValueError, match="0 parts"):
        split(tasks, named(tasks, "node1"), "batch", 0)


def test_what_must_stay_with_others_is_not_cut() -> None:
    build = TasksBuilder()
    build.task("op", "MatMul", OpKind.FORWARD, 100, together=3)
    assert dimensions(build.build(), 0) == ()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_cutting_keeps_the_time_of_the_ops_and_the_bytes_that_are_put_together(seed: int) -> None:
    rng = random.Random(seed)
    whole = tasks = model_tasks(rng.randint(1, 3))
    added = 0
    for _ in range(rng.randint(1, 4)):
        ways = [(i, d) for i in range(len(tasks)) for d in dimensions(tasks, i)]
        task, dimension = rng.choice(ways)
        before = tasks
        tasks = split(tasks, task, dimension, parts := rng.randint(2, 5))
        # every part and every task put in takes a launch
        added += LAUNCH_NS * (len(tasks) - len(before) + 1)
        assert len(tasks) >= len(before) + parts - 1
    assert tasks.time_ns.sum() == whole.time_ns.sum() + added
    assert len(topological(tasks).tasks) == len(tasks)
    assert len(tasks.info["replica"]) == len(tasks) == len(set(tasks.names))
    # on one device nothing is sent: the step takes what its ops take
    alone = judge(tasks, np.zeros(len(tasks), np.int64), Cluster.uniform(1, 10.0))
    assert alone.makespan_ns == tasks.time_ns.sum()
    for joined in _of_type(tasks, "Concat"):
        made = tasks.tensor_bytes[tasks.tensor_of == joined]
        assert sum(nbytes for _, nbytes in read(tasks, joined)) == made.sum()
    for cut in _of_type(tasks, "Split"):
        made = tasks.tensor_bytes[tasks.tensor_of == cut]
        assert sum(nbytes for _, nbytes in read(tasks, cut)) == made.sum()


def _of_type(tasks: Tasks, kind: str) -> Iterable[int]:
    return [i for i, word in enumerate(tasks.types) if word == kind]
