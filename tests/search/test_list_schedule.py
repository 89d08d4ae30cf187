import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import DproError
from dpro.graph.cluster import Cluster
from dpro.graph.graph import OpKind
from dpro.graph.tasks import Tasks, TasksBuilder
from dpro.replay.placed import judge
from dpro.search.list_schedule import Problem, Schedule, cpop, dpos, heft
from dpro.search.ranks import by_rank
from tests.search.plain_schedule import plain_schedule
from tests.search.task_graphs import cluster, heft_example, random_cluster, random_tasks, replayed_in_order, tasks_of

#: heft, cpop or dpos
Algorithm = Callable[..., Schedule]
seeds = st.integers(0, 10**9)


def problem_of(seed: int, latency_ns: int = 0) -> Problem:
    rng = random.Random(seed)
    return Problem(random_tasks(rng), random_cluster(rng, latency_ns))


def test_heft_and_cpop_of_the_papers_example_end_when_the_paper_says() -> None:
    problem = heft_example()
    assert heft(problem).makespan_ns == 3 * 80
    assert cpop(problem).makespan_ns == 3 * 86
    # the placement printed there: n2, n8 and n4, n6 … on processors of their own
    assert [int(d) + 1 for d in heft(problem).device] == [3, 1, 3, 2, 3, 2, 3, 1, 2, 2]


@settings(max_examples=150, deadline=None)
@given(seeds, st.booleans(), st.booleans())
def test_the_native_scheduler_does_as_the_plain_one(seed: int, insertion: bool, contention: bool) -> None:
    problem = problem_of(seed)
    rng = random.Random(seed + 1)
    pins = {t: rng.randrange(len(problem.cluster)) for t in range(len(problem.tasks)) if rng.random() < 0.2}
    pinned = problem.pinned(pins)
    listed = by_rank(problem.order, problem.rank)
    found = problem.schedule(listed, pinned=pinned, insertion=insertion, contention=contention)
    device, start = plain_schedule(
        problem, listed.tolist(), pinned.tolist(), insertion=insertion, contention=contention
    )
    assert found.device.tolist() == device
    assert found.start_ns.tolist() == start


@settings(max_examples=150, deadline=None)
@given(seeds, st.sampled_from([heft, cpop, dpos]))
def test_a_contention_aware_estimate_is_the_replay_that_keeps_its_order(seed: int, algorithm: Algorithm) -> None:
    problem = problem_of(seed, latency_ns=1)  # what takes no time has no slot that another could not span
    schedule = algorithm(problem, contention=True)
    start, end = replayed_in_order(problem, schedule)
    assert start.tolist() == schedule.start_ns.tolist()
    assert end.tolist() == schedule.end_ns.tolist()


def test_a_contention_aware_estimate_is_what_judge_says_where_the_order_leaves_no_choice() -> None:
    # a fans out 30 bytes to b, c, d: on one link they follow one another, which the published estimate does not see
    tasks = tasks_of({"a": 5, "b": 40, "c": 40}, [("a", "b", 30), ("a", "c", 30)])
    problem = Problem(tasks, cluster(2))
    pinned = problem.pinned({0: 0, 1: 1, 2: 1})
    listed = np.array([0, 1, 2])
    aware = problem.schedule(listed, pinned=pinned, contention=True)
    blind = problem.schedule(listed, pinned=pinned)
    assert aware.end_ns.tolist() == [5, 75, 115]
    assert blind.sent[:, 2:].tolist() == [[5, 35], [5, 35]]
    assert judge(tasks, aware.device, problem.cluster, aware.priority()).makespan_ns == aware.makespan_ns == 115


def test_a_tensor_is_sent_once_to_a_device_whoever_reads_it_there() -> None:
    build = TasksBuilder()
    a, b, c = (build.task(name, "Op", OpKind.FORWARD, 10) for name in "abc")
    build.tensor(a, 7, [b, c])
    problem = Problem(build.build(), cluster(2))
    schedule = problem.schedule(np.array([a, b, c]), pinned=problem.pinned({a: 0, b: 1, c: 1}), contention=True)
    assert schedule.sent.tolist() == [[0, 1, 10, 17]]
    assert schedule.start_ns.tolist() == [0, 17, 27]


def test_a_task_goes_into_an_idle_slot_that_is_long_enough() -> None:
    # device 0: a until 10, then idle until b's tensor is back at 60; c (20) fits, and is listed last
    tasks = tasks_of({"a": 10, "x": 10, "b": 5, "c": 20}, [("a", "x", 20), ("x", "b", 20)])
    problem = Problem(tasks, cluster(2))
    pinned = problem.pinned({0: 0, 1: 1, 2: 0, 3: 0})
    assert problem.schedule(np.array([0, 1, 2, 3]), pinned=pinned).start_ns.tolist() == [0, 30, 60, 10]
    assert problem.schedule(np.array([0, 1, 2, 3]), pinned=pinned, insertion=False).start_ns.tolist() == [0, 30, 60, 65]


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from([heft, cpop, dpos]))
def test_what_is_together_is_on_one_device(seed: int, algorithm: Algorithm) -> None:
    problem = problem_of(seed)
    device = algorithm(problem).device
    for group in set(problem.together.tolist()) - {-1}:
        assert len(set(device[problem.together == group].tolist())) == 1


def with_memory(kept: list[int], memory_bytes: int, devices: int = 2) -> Problem:
    build = TasksBuilder()
    for i, nbytes in enumerate(kept):
        build.task(f"t{i}", "Op", OpKind.FORWARD, 10 - i, kept_bytes=nbytes)
    return Problem(build.build(), cluster(devices, memory_bytes=memory_bytes))


def test_a_task_goes_where_there_is_room_even_if_it_ends_later_there() -> None:
    # t3 would start at 10 behind t0, but t0 fills device 0
    schedule = heft(with_memory([100, 60, 30, 10], 100))
    assert (schedule.device.tolist(), schedule.fits) == ([0, 1, 1, 1], True)
    assert schedule.start_ns.tolist() == [0, 0, 9, 17]


def test_without_room_anywhere_a_schedule_says_so() -> None:
    assert not heft(with_memory([100, 60, 70], 110)).fits


def test_a_critical_path_that_is_too_large_for_one_device_goes_on_on_the_next() -> None:
    build = TasksBuilder()
    for i in range(4):
        build.task(f"t{i}", "Op", OpKind.FORWARD, 10, kept_bytes=40)
        if i:
            build.tensor(i - 1, 1, [i])
    schedule = dpos(Problem(build.build(), cluster(2, memory_bytes=100)))
    assert schedule.device.tolist() == [0, 0, 1, 1]
    assert schedule.fits


def test_the_path_of_the_variables_is_the_path_of_who_reads_them() -> None:
    """A variable takes no time anywhere: it goes where the first of its readers goes, not where ties happen to lead."""
    build = TasksBuilder()
    weight = build.task("w", "Linear", OpKind.LOCAL, kept_bytes=1000)
    one, two = (build.task(name, "Linear", OpKind.FORWARD, 10) for name in ("one", "two"))
    build.tensor(weight, 1000, [one, two])
    problem = Problem(build.build(), cluster(2))
    for algorithm in (heft, cpop, dpos):
        assert len(set(algorithm(problem).device.tolist())) == 1


def counterexample() -> Problem:
    """Section 1.4 of the notes on FastT: where the published rule breaks the bound that is proved for it."""
    # numbered so that the path takes c where b is as long, and the list b before c
    return Problem(
        tasks_of(
            {"a": 1, "c": 10, "e": 4, "f": 2, "b": 16, "d": 6},
            [("a", "b", 0), ("a", "c", 0), ("c", "d", 0), ("c", "e", 0), ("e", "f", 0)],
        ),
        cluster(3),
    )


def test_ties_that_go_to_the_critical_paths_device_break_the_bound() -> None:
    problem = counterexample()  # half a unit is 1
    optimum = heft(problem).makespan_ns
    assert optimum == 2 * 8.5
    assert dpos(problem, literal_ties=True).makespan_ns == 2 * 19.5 > 2 * optimum
    assert dpos(problem).makespan_ns <= 2 * optimum


def free_transfers(seed: int) -> Problem:
    rng = random.Random(seed)
    n = rng.randint(5, 20)
    edges = {(rng.randrange(i), i) for i in range(1, n) for _ in range(rng.randint(0, 2))}
    tasks = tasks_of({f"t{i}": rng.randint(1, 10) for i in range(n)}, [(f"t{a}", f"t{b}", 0) for a, b in sorted(edges)])
    return Problem(tasks, cluster(rng.choice([3, 4, 6]), 0.0))


@settings(max_examples=300, deadline=None)
@given(seeds)
def test_dpos_is_within_its_bound_with_ties_away_from_the_path(seed: int) -> None:
    """FastT's theorem 1 without transfers, by the best of several schedules in place of the optimum."""
    problem = free_transfers(seed)
    best = min(heft(problem).makespan_ns, cpop(problem).makespan_ns, dpos(problem, pin_path=False).makespan_ns)
    assert dpos(problem).makespan_ns <= 2 * best


def test_collectives_are_refused() -> None:
    build = TasksBuilder()
    build.task("sum", "AllReduce", OpKind.COLLECTIVE, 5)
    with pytest.raises(DproError, match="collectives"):
        Problem(build.build(), Cluster.uniform(2, 10.0))


def test_no_task_and_one_device_are_placed_too() -> None:
    empty: Tasks = TasksBuilder().build()
    assert dpos(Problem(empty, cluster(2))).makespan_ns == 0
    one = Problem(tasks_of({"a": 3, "b": 4}, [("a", "b", 9)]), cluster(1))
    assert [algorithm(one, contention=True).makespan_ns for algorithm in (heft, cpop, dpos)] == [7, 7, 7]
