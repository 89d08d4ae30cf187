import numpy as np
import pytest

from dpro.errors import DproError
from dpro.search.ranks import (
    critical_tasks,
    downward_rank,
    placed_weights,
    rank_order,
    topological,
    upward_rank,
    weights,
)
from tests.search.task_graphs import cluster, heft_example, tasks_of


def test_the_upward_ranks_of_hefts_example_are_those_that_the_paper_prints() -> None:
    problem = heft_example()
    # 108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667 (table 1 there), times three
    assert upward_rank(problem.order, problem.weights("mean")).tolist() == [
        324, 231, 240, 240, 207, 190, 128, 107, 133, 44,
    ]  # fmt: skip


def test_the_downward_ranks_of_hefts_example_are_those_that_the_paper_prints() -> None:
    problem = heft_example()
    # 0, 31, 25, 22, 24, 27, 62.333, 66.667, 63.667, 93.333, times three
    assert downward_rank(problem.order, problem.weights("mean")).tolist() == [0, 93, 75, 66, 72, 81, 187, 200, 191, 280]


def test_fastts_weights_are_the_most_that_a_task_takes_on_any_device() -> None:
    problem = heft_example()
    assert problem.weights("max").task_ns.tolist() == [48, 57, 57, 51, 39, 48, 45, 42, 60, 63]


def test_transfers_count_until_a_placement_says_that_there_is_none() -> None:
    tasks = tasks_of({"a": 5, "b": 7}, [("a", "b", 100)])
    two = cluster(2)
    order = topological(tasks)
    assert upward_rank(order, weights(tasks, two)).tolist() == [112, 7]
    assert upward_rank(order, placed_weights(tasks, two, np.array([1, 1]))).tolist() == [12, 7]
    assert upward_rank(order, placed_weights(tasks, two, np.array([0, 1]))).tolist() == [112, 7]


def test_the_critical_path_goes_on_to_the_reader_of_the_largest_rank() -> None:
    tasks = tasks_of({"a": 1, "b": 2, "c": 9, "d": 3}, [("a", "b", 0), ("a", "c", 0), ("b", "d", 0), ("c", "d", 0)])
    order = topological(tasks)
    assert critical_tasks(order, upward_rank(order, weights(tasks, cluster(2)))) == [0, 2, 3]


def test_a_priority_puts_each_task_after_what_it_reads_from_even_where_neither_takes_time() -> None:
    tasks = tasks_of({"last": 0, "first": 0, "middle": 0}, [("first", "middle", 0), ("middle", "last", 0)])
    assert rank_order(tasks, cluster(1)).tolist() == [2, 0, 1]


def test_tasks_that_wait_for_themselves_are_named() -> None:
    tasks = tasks_of({"a": 1, "b": 1, "c": 1}, [("b", "c", 0), ("c", "b", 0)])
    with pytest.raises(DproError, match=r"2 tasks wait for themselves.*'b'"):
        topological(tasks)
