"""DisCo's search: never worse than what it starts from, found by hand where that can be, the same by seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples

from dpro.cost.fused import SavedTraffic, SumOfOps
from dpro.graph.cluster import Line
from dpro.passes.joint_fusion import JointFusion
from dpro.passes.worker_step import Step
from dpro.replay.engine import replay
from dpro.search.backtracking import Evaluator, Settings, full_overlap_ns, search
from dpro.search.fusion_defaults import COMBINE_BYTES, DEFAULTS
from dpro.trace.model_graph import read
from tests.search.worker_steps import Halved, step_of, steps

SHARED = Path(__file__).parents[2].parent / "shared" / "graphs" / "pipedream"
QUICK = Settings(patience=60, queue=20)


def test_it_stops_merging_where_waiting_costs_more_than_it_saves() -> None:
    # gradients at 100, 200, …, 600; an AllReduce takes 90 + bytes. One by one: each is over before the next begins, the
    # last one ends at 600 + 100. The last two together: 600 + 110; all together: 600 + 150
    step = step_of([100] * 6, [[], *([i] for i in range(5))], [(i, 10, []) for i in range(6)], ["Conv2d"] * 6)
    found = search(JointFusion(step, SumOfOps(), Line(90, 1)), QUICK)
    assert found.makespan_ns == 700
    assert found.defaults_ns == {"no fusion": 700, "op fusion": 700, "tensor fusion": 750, "default": 750}


def test_it_merges_what_queues() -> None:
    # All gradients are there within 60 ns, an AllReduce takes 90 + bytes. The first alone, from 10 on, and the others
    # merged: 10 + 100 + 140 = 250. Two, then four: 20 + 110 + 130 = 260. All merged: 60 + 150 = 210.
    step = step_of([10] * 6, [[], *([i] for i in range(5))], [(i, 10, []) for i in range(6)], ["Conv2d"] * 6)
    fusion = JointFusion(step, SumOfOps(), Line(90, 1))
    found = search(fusion, QUICK)
    assert found.defaults_ns["no fusion"] == 10 + 6 * 100
    assert found.makespan_ns == 210
    assert full_overlap_ns(fusion, found.state) == 150


def test_it_duplicates_where_others_would_wait() -> None:
    # 0 is read by 1, whose gradient takes long to reduce, and by 2: fused with 2 alone, 1 would wait
    step = step_of([40, 2, 40], [[], [0], [0]], [(1, 200, [])])
    found = search(JointFusion(step, Halved(), Line(0, 1)), QUICK)
    # {0, 1} in 21, the reduction until 221, {0, 2} in 40 meanwhile
    assert found.makespan_ns == 221
    assert found.defaults_ns["no fusion"] == 242


def test_what_frameworks_do() -> None:
    mb = 1 << 20
    step = step_of(
        [1, 1, 1, 1, 1], [[], [0], [1], [1], [3]],
        [(2, 20 * mb, []), (3, 10 * mb, []), (4, mb, [])], ["Conv2d", "Add", "Mul", "Mul", "Conv2d"],
    )  # fmt: skip
    fusion = JointFusion(step, SumOfOps(), Line(0, 1))
    states = {name: make(fusion) for name, make in DEFAULTS.items()}
    assert states["no fusion"].key() == fusion.start().key()
    # Add is read by two Muls: computed in both; Mul is not put into a convolution
    assert {g: states["op fusion"].own(g) for g in states["op fusion"].order if g >= 0} == {
        0: (0,), 1: (1, 2), 3: (3,), 4: (4,), 5: (5,), 6: (6,), 7: (7,),
    }  # fmt: skip
    assert states["op fusion"].copies == {3: frozenset({1})}
    # 20 + 10 MB are the 30 MB of the combiner; the last is alone
    assert 30 * mb == COMBINE_BYTES
    for name in ("tensor fusion", "default"):
        assert [states[name].own(g) for g in fusion.reduces(states[name])] == [(5, 6), (7,)]


@examples(max_examples=25, deadline=None)
@given(steps())
def test_it_is_never_worse_than_what_it_starts_from(step: Step) -> None:
    fusion = JointFusion(step, Halved(), Line(5, 1))
    found = search(fusion, Settings(patience=30, queue=5, seed=1))
    assert found.makespan_ns <= min(found.defaults_ns.values())
    assert found.makespan_ns == replay(JointFusion(step, Halved(), Line(5, 1)).lower(found.state)).makespan_ns
    assert found.makespan_ns >= full_overlap_ns(fusion, found.state)
    assert [ns for _, ns in found.progress] == sorted({ns for _, ns in found.progress}, reverse=True)
    again = search(JointFusion(step, Halved(), Line(5, 1)), Settings(patience=30, queue=5, seed=1))
    assert (again.state.key(), again.evaluations, again.progress) == (
        found.state.key(), found.evaluations, found.progress,
    )  # fmt: skip


def test_a_state_is_replayed_once() -> None:
    step = step_of([1, 2], [[], [0]])
    cost = Evaluator(JointFusion(step, Halved(), Line(0, 1)))
    one, other = cost.fusion.start(), cost.fusion.start()
    cost.fusion.join(one, 0, 1)
    cost.fusion.duplicate(other, 0, 1)  # nobody else reads it: the same
    assert cost.makespan_ns(one) == cost.makespan_ns(other) == 2  # 1.5 rounded to even
    assert len(cost._known) == 1 and cost.evaluations == 2


def test_it_stops_for_the_reason_that_it_says() -> None:
    step = step_of([10] * 4, [[], [0], [1], [2]], [(3, 10, [])])
    fusion = JointFusion(step, SumOfOps(), Line(0, 1))
    assert search(fusion, Settings(evaluations=12)).stopped == "evaluations"
    assert search(fusion, Settings(time_budget_s=0)).evaluations == len(DEFAULTS)
    assert search(fusion, Settings(patience=9)).stopped == "9 evaluations without a better one"
    with pytest.raises(ValueError, match="at least 1"):
        search(fusion, Settings(alpha=0.9))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public graphs (../shared/graphs) are not here")
def test_a_public_graph_gets_faster_than_every_default() -> None:
    step = Step.of(read(SHARED / "alexnet.graph.txt"), 1 / 8)
    assert (step.n, len(step.names) - step.n) == (53, 8)
    fusion = JointFusion(step, SavedTraffic(10_000, 0.5), Line(280e3, 0.175))
    found = search(fusion, Settings(evaluations=300))
    assert found.makespan_ns < min(found.defaults_ns.values())
    # 244.4 MB of gradients at 0.175 ns a byte cannot take less
    assert found.makespan_ns > 244_403_360 * 0.175
