import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.cluster import Cluster, Device, Line
from dpro.graph.graph import OpKind
from dpro.graph.tasks import TasksBuilder
from dpro.passes.replicate import replicate
from dpro.replay.placed import judge
from dpro.search.descent import Descent
from dpro.search.fastt import BASELINES, DATA_PARALLEL, RANK_ORDER, SINGLE, Result, fastt, place
from dpro.search.list_schedule import Problem, dpos
from dpro.trace import pipedream
from dpro.trace.model_graph import ModelGraph, read
from tests.search.task_graphs import random_cluster, random_tasks

GRAPHS = Path(__file__).resolve().parents[3] / "shared" / "graphs" / "pipedream"
needs_graphs = pytest.mark.skipif(not GRAPHS.exists(), reason="public graphs (../shared/graphs) are not here")

MB = 1_000_000


def dense(parameters_mb: float = 40.0, activation_mb: float = 1.0) -> ModelGraph:
    """A convolution that takes long, and a dense layer with all of the parameters, as in VGG."""
    text = (
        f"node1 -- Conv2d(3, 8) -- forward_compute_time=8.0, backward_compute_time=16.0, "
        f"activation_size={activation_mb * MB}, parameter_size=10000.0\n"
        f"node2 -- Linear(8, 8) -- forward_compute_time=0.5, backward_compute_time=1.0, activation_size=1000.0, "
        f"parameter_size={parameters_mb * MB}\n\tnode1 -- node2\n"
    )
    return pipedream.parse(text, Path("dense"))


def of(result: Result, op: str) -> set[str]:
    return {device for task, device in result.placement.items() if task.split("@")[0] == op}


def test_the_large_layer_is_gathered_and_the_convolution_spread() -> None:
    result = fastt(dense(), Cluster.uniform(4, 10.0))
    homes = [of(result, f"node2{part}") for part in ("/variable", "", "/backward", "/update")]
    assert len(set.union(*homes)) == 1
    assert len(of(result, "node1")) == 4
    # a quarter of 24 ms and all of 1.5 ms, and what goes to and fro: far from one device's 25.5 ms
    assert 7.5 < result.makespan_ns / MB < 10.0
    assert result.makespan_ns / MB < min(t for t in result.baselines.values() if t)


def test_baselines_are_worked_out_by_hand() -> None:
    result = fastt(dense(0.0001, 0.0), Cluster.uniform(2, 10.0, latency_us=0.0))
    assert set(result.baselines) == set(BASELINES)
    assert result.baselines[SINGLE] == pytest.approx(25.5)
    # half of each op and a launch of 10 µs for each, the parameters' 2 · 10 kB at 10 GB/s: 1 µs there and 1 µs back
    both = result.baselines[DATA_PARALLEL], result.baselines[RANK_ORDER]
    assert both == pytest.approx((12.75 + 0.04, 12.75 + 0.04), abs=0.003)


def test_the_result_is_the_replay_of_its_own_placement_and_order() -> None:
    cluster = Cluster.uniform(2, 10.0)
    result = fastt(dense(), cluster)
    tasks = result.plan.tasks
    number = {device.name: i for i, device in enumerate(cluster.devices)}
    device = np.array([number[result.placement[name]] for name in tasks.names])
    place_of = {name: i for i, name in enumerate(result.order)}
    priority = np.array([place_of[name] for name in tasks.names])
    assert judge(tasks, device, cluster, priority).makespan_ns == result.makespan_ns
    assert sorted(result.order) == sorted(tasks.names)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**9))
def test_nothing_is_slower_than_the_baselines_and_all_of_it_comes_again(seed: int) -> None:
    rng = random.Random(seed)
    tasks, cluster = random_tasks(rng, 15), random_cluster(rng)
    one, two = place(tasks, cluster), place(tasks, cluster)
    assert all(ms is None or one.makespan_ns <= ms * 1e6 for ms in one.baselines.values())
    assert (one.makespan_ns, one.placement, one.order, one.strategy) == (
        two.makespan_ns, two.placement, two.order, two.strategy,
    )  # fmt: skip
    devices, tasks_of = set(one.placement.values()), set(one.placement)
    assert devices <= {device.name for device in cluster.devices}
    assert tasks_of == set(one.plan.tasks.names)


def test_tasks_of_one_name_are_told_apart_by_their_numbers() -> None:
    build = TasksBuilder()
    for name in ("a", "b", "a"):
        build.task(name, "Op", OpKind.FORWARD, 10)
    result = place(build.build(), Cluster.uniform(3, 10.0))
    assert set(result.placement) == set(result.order) == {"a#0", "b", "a#2"}
    assert result.makespan_ns == 10


def with_memory(nbytes: float) -> Cluster:
    return Cluster([Device(f"d{i}", "gpu", "host", round(nbytes)) for i in range(2)], Line.of(10.0, 0.0))


def test_what_does_not_fit_is_out() -> None:
    # data parallelism holds on one device: 40 MB of parameters, the gradients of both replicas and their sum
    result = fastt(dense(), with_memory(1e9))
    assert all(result.baselines.values())
    tight = fastt(dense(activation_mb=100.0), with_memory(280e6))
    assert tight.baselines[SINGLE] is None  # 100 MB made, its gradient, and 3 · 40 MB
    assert tight.fits
    assert tight.plan.judged.fits


def test_where_nothing_fits_the_plan_that_lacks_least_is_returned_and_says_so() -> None:
    result = fastt(dense(), with_memory(1e6))
    assert not result.fits
    assert set(result.baselines.values()) == {None}
    assert result.placement


def test_a_descent_gives_nothing_slower_than_it_began_with_and_keeps_to_its_number_of_schedules() -> None:
    problem = Problem(replicate(dense(), 4), Cluster.uniform(4, 10.0))
    schedule = dpos(problem)
    before = judge(problem.tasks, schedule.device, problem.cluster, schedule.priority()).makespan_ns
    times = []
    for evaluations in (0, 5, 200):
        descent = Descent(problem, evaluations)
        descent.start(schedule.device, schedule.priority())
        descent.moves()
        assert descent.best is not None
        assert descent.left >= 0
        times.append(descent.best.judged.makespan_ns)
    assert before == times[0] >= times[1] >= times[2]


@needs_graphs
def test_vgg16_on_four_devices() -> None:
    """FastT, figure 4 and table 5: the replicas of the largest dense layer on one device, convolutions on all."""
    model = read(GRAPHS / "vgg16.graph.txt")
    result = fastt(model, Cluster.uniform(4, 10.0), batch=0.125)
    largest = max(model.ops, key=lambda op: op.kept_bytes).name.removesuffix("/variable")
    assert len(of(result, largest) | of(result, f"{largest}/backward") | of(result, f"{largest}/variable")) == 1
    assert len(of(result, "node2")) == 4
    dp = result.baselines[DATA_PARALLEL]
    assert dp is not None
    assert dp / (result.makespan_ns / MB) > 1.5
