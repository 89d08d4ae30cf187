"""HeteroG's choices: groups, actions, order, memory, and what its searches find."""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import DproError
from dpro.graph.cluster import Cluster, Device, Line
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.graph.tasks import lower
from dpro.passes.replicate import REPLICA, replicate
from dpro.replay.engine import replay_arrays
from dpro.replay.placed import judge
from dpro.search import agent, mcts
from dpro.search.grouping import group
from dpro.search.hetero import FIFO, RANK, Budget, Choice, Outcome, Space, actions, proportional
from dpro.search.order import by_rank, earliest_starts, replay_ordered, upward_ranks
from dpro.trace.model_graph import ModelGraph, ModelOp, Role, Tensor
from tests.search.step_models import layers, pair


def evaluations(count: int) -> Budget:
    return Budget(None, count)


def best_of_all(space: Space) -> Outcome:
    return min((space.evaluate(choice) for choice in itertools.product(*space.options)), key=lambda o: o.key)


def test_ranks_and_earliest_starts_by_hand() -> None:
    graph = Graph()
    one = graph.resource("gpu")
    a = graph.add_op("a", OpKind.FORWARD, resource=one, duration=3)
    b = graph.add_op("b", OpKind.FORWARD, resource=one, duration=5, after=(a,))
    c = graph.add_op("c", OpKind.SEND, resource=graph.resource("link"), duration=7, after=(a,))
    graph.add_op("d", OpKind.FORWARD, resource=one, duration=2, after=(b, c))
    graph.add_op("e", OpKind.FORWARD, resource=one, duration=1)
    arrays = graph.arrays()
    assert upward_ranks(arrays).tolist() == [12, 7, 9, 2, 1]
    assert earliest_starts(arrays).tolist() == [0, 3, 3, 10, 0]
    assert by_rank(upward_ranks(arrays)).tolist() == [0, 2, 1, 3, 4]
    assert by_rank(np.array([4, 9, 4])).tolist() == [1, 0, 1]
    played, _ = replay_ordered(arrays)
    assert played.start.tolist() == [0, 3, 3, 10, 8]


def test_rank_order_lets_a_long_branch_begin_first() -> None:
    # two ops of 1 ms on device 0; the one that comes last feeds 10 ms on device 1
    ops = [ModelOp("x", "Op", Role.FORWARD, 1_000_000), ModelOp("y", "Op", Role.FORWARD, 1_000_000),
           ModelOp("z", "Op", Role.FORWARD, 10_000_000)]  # fmt: skip
    model = ModelGraph("branch", ops, [Tensor(1, 0, (2,))])
    space = Space(model, Cluster.uniform(2, 1.0, latency_us=0), groups=np.array([1, 1, 0]))
    assert space.outcome((1, 0), FIFO).makespan_ns == 12_000_000
    assert space.outcome((1, 0), RANK).makespan_ns == 11_000_000


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 4))
def test_ranked_schedules_keep_the_bound(seed: int, count: int, devices: int) -> None:
    """T_LS <= (M + M²) T* (HeteroG, section 4.2), with what no schedule can beat in the place of T*."""
    model = layers(seed, count)
    space = Space(model, Cluster.uniform(devices, 2.0))
    rng = random.Random(seed)
    tasks, device = space.compiler.compile(space.strategy([rng.choice(options) for options in space.options]))
    arrays = lower(tasks, device, space.cluster).graph.arrays()
    used = arrays.resource != NO_RESOURCE
    busiest = np.bincount(arrays.resource[used], arrays.duration[used]).max()
    least = max(int(busiest), int(upward_ranks(arrays).max()))
    played, _ = replay_ordered(arrays)
    assert least <= played.makespan_ns <= (devices + devices**2) * least


def test_a_variable_its_readers_and_their_gradients_are_one_group() -> None:
    model, cluster = layers(3, 12), Cluster.uniform(2, 10.0)
    of = group(model, cluster, 5)
    assert sorted(set(of.tolist())) == list(range(5))
    for i in range(12):
        assert len({int(of[n]) for n, op in enumerate(model.ops) if op.name[1:] == str(i)}) == 1
    time_ns = np.bincount(of, [op.time_ns for op in model.ops])
    assert time_ns.tolist() == sorted(time_ns, reverse=True)
    assert group(model, cluster, 100).max() == 11
    with pytest.raises(ValueError):
        group(model, cluster, 0)


def test_a_layer_of_many_parameters_is_a_centre() -> None:
    ops = [ModelOp("w", "Variable", Role.VARIABLE, 0, 400_000_000), ModelOp("dense", "MatMul", Role.FORWARD, 1000)]
    ops += [ModelOp(f"conv{i}", "Conv", Role.FORWARD, 1_000_000 + i) for i in range(5)]
    tensors = [Tensor(0, 400_000_000, (1,), False)] + [Tensor(i, 10, (i + 1,)) for i in range(1, 6)]
    of = group(ModelGraph("vgg", ops, tensors), Cluster.uniform(2, 10.0), 2)
    assert of[0] == of[1] == 1
    assert of[5] == of[6] == 0


def test_replicas_in_proportion_to_speed() -> None:
    model = layers(0, 3)

    def cluster(*speeds: float) -> Cluster:
        devices = [Device(f"d{i}", f"t{i}", "m") for i in range(len(speeds))]
        return Cluster(devices, Line.of(10, 0), speeds={f"t{i}": {"default": s} for i, s in enumerate(speeds)})

    assert proportional(cluster(1, 1), model) == (0, 1)
    assert proportional(cluster(2, 1), model) == (0, 0, 1)
    assert proportional(cluster(1.5, 1), model) == (0, 0, 0, 1, 1)
    assert proportional(cluster(1.2, 1), model) == (0, 1)
    assert [a.name for a in actions(cluster(2, 1), model)] == ["MP@d0", "MP@d1", "EV-PS", "EV-AR", "CP-PS", "CP-AR"]
    assert [a.name for a in actions(cluster(1, 1), model)] == ["MP@d0", "MP@d1", "EV-PS", "EV-AR"]
    assert [a.name for a in actions(cluster(1), model)] == ["MP@d0"]
    two = Cluster([Device(f"d{i}", "gpu", f"m{i // 2}") for i in range(3)], Line.of(10, 0))
    more = [a for a in actions(two, model, machines=True) if "EV" in a.name and "@" in a.name]
    assert [(a.name, a.form.devices) for a in more] == [("EV-PS@m0", (0, 1)), ("EV-AR@m0", (0, 1))]


def test_what_is_found_is_what_judge_says_and_no_baseline_is_better() -> None:
    for seed in range(4):
        model, cluster = layers(seed, 6), pair(seed)
        found = mcts.search(model, cluster, budget=evaluations(60), seed=seed)
        again = judge(found.tasks, found.device, cluster, found.priority)
        assert again.makespan_ns == found.makespan_ns
        space = Space(model, cluster)
        assert set(found.baselines) == {"MP@fast", "MP@slow", "EV-PS", "EV-AR", "CP-PS", "CP-AR", "DP"}
        start = replicate(model, 2)
        first = np.maximum(np.array(start.info[REPLICA]), 0)
        assert found.makespan_ns <= found.baselines["DP"].makespan_ns <= judge(start, first, cluster).makespan_ns
        for name, choice in space.uniform().items():
            for order in (RANK, FIFO):
                assert found.makespan_ns <= space.outcome(choice, order).makespan_ns, name
        assert found.fifo_ns == judge(found.tasks, found.device, cluster).makespan_ns


def test_the_same_seed_finds_the_same_and_budgets_are_kept() -> None:
    model, cluster = layers(5, 8), pair(5)
    choices: list[Choice] = []
    for _ in range(2):
        found = mcts.search(model, cluster, budget=evaluations(120), seed=3)
        assert found.evaluations <= 120
        choices.append(found.choice)
    assert choices[0] == choices[1]
    assert mcts.search(model, cluster, budget=Budget(0.0), seed=3).evaluations <= 9  # the pool


def test_tree_search_is_within_two_percent_of_the_optimum() -> None:
    ratios = []
    for seed in range(4):
        model, cluster = layers(seed, 3 if seed else 4), pair(seed)
        optimum = best_of_all(Space(model, cluster, budget=Budget(None)))
        for uniform_priors in (False, True):
            space = Space(model, cluster, budget=evaluations(120 if seed else 250))
            mcts.explore(space, seed, uniform_priors=uniform_priors)
            assert space.best is not None
            ratios.append(space.known[space.best].makespan_ns / optimum.makespan_ns)
    assert min(ratios) >= 1.0
    assert float(np.median(ratios)) <= 1.02


def test_a_model_too_big_for_one_device_gets_a_plan_that_fits() -> None:
    model = layers(11, 6, parameter_mb=(100, 120))
    whole = sum(op.kept_bytes for op in model.ops)
    cluster = pair(11, memory_bytes=round(0.9 * whole))
    space = Space(model, cluster)
    assert all(space.evaluate(choice).over_bytes > 0 for choice in space.uniform().values())
    found = mcts.search(model, cluster, budget=evaluations(200), seed=0)
    assert found.judged.fits
    assert all(outcome.over_bytes for outcome in found.baselines.values())


def test_a_reward_is_ten_times_worse_without_memory() -> None:
    assert Outcome(4_000_000_000, 0).reward == -2.0
    assert Outcome(4_000_000_000, 1).reward == -20.0
    assert Outcome(9, 0).key < Outcome(1, 5).key


def test_groups_without_variables_have_no_two_ways_to_synchronise() -> None:
    model = layers(2, 3)
    ops = [*model.ops, ModelOp("end", "Sum", Role.FORWARD, 1000)]
    space = Space(ModelGraph("more", ops, model.tensors), pair(2))
    free = int(space.group[-1])
    assert len(space.options[free]) == len(space.actions) - 2
    choice = [0] * space.groups
    choice[free] = next(i for i, a in enumerate(space.actions) if a.name == "EV-AR")
    assert space.actions[space.canonical(choice)[free]].name == "EV-PS"


def test_the_agent_finds_the_optimum_of_a_small_model() -> None:
    pytest.importorskip("torch_geometric")
    model, cluster = layers(2, 3), pair(2)
    everything = Space(model, cluster, budget=Budget(None))
    optimum = best_of_all(everything).makespan_ns
    assert min(everything.evaluate(choice).makespan_ns for choice in everything.pool().values()) > optimum
    results = []
    for _ in range(2):
        space = Space(model, cluster, budget=evaluations(120))
        results.append(agent.learn(space, 0, agent.Learning(rounds=25)))
        assert space.known[results[-1]].makespan_ns == optimum
        assert space.evaluations < everything.evaluations == 6**3
    assert results[0] == results[1]


def test_without_torch_geometric_the_agent_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    with pytest.raises(DproError, match=r"pip install 'dpro\[gnn\]'") as raised:
        agent.search(layers(1, 2), pair(1))
    assert "\n" not in str(raised.value)


def test_first_come_first_served_is_the_plain_replay() -> None:
    space = Space(layers(4, 5), pair(4), order=FIFO)
    choice = space.canonical([len(space.actions) - 1] * space.groups)
    tasks, device = space.compiler.compile(space.strategy(choice))
    plain = replay_arrays(lower(tasks, device, space.cluster).graph.arrays()).makespan_ns
    assert space.evaluate(choice).makespan_ns == plain
