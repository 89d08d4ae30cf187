"""Edits of a step's fusion: by hand, and against a fusion that is nothing but sets."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.fused import SavedTraffic, SumOfOps
from dpro.graph.cluster import Line
from dpro.graph.graph import OpKind
from dpro.passes.joint_fusion import Fusion, JointFusion
from dpro.passes.worker_step import Step
from dpro.replay.engine import replay
from dpro.trace.model_graph import ModelGraph, ModelOp, Role, Tensor
from tests.search.worker_steps import Halved, step_of, steps

LINE = Line(latency_ns=10, ns_per_byte=1)


def makespan(fusion: JointFusion, state: Fusion) -> int:
    return replay(fusion.lower(state)).makespan_ns


def groups(fusion: JointFusion, state: Fusion) -> set[int]:
    return set(state.order) - {-1}


def graph_of(fusion: JointFusion, state: Fusion) -> nx.DiGraph:
    """Groups and who waits for whom, straight from who computes what."""
    out = nx.DiGraph()
    inside = {g: {*state.own(g), *state.copies.get(g, ())} for g in groups(fusion, state)}
    out.add_nodes_from(inside)
    for group, ops in inside.items():
        for op in ops:
            for a, _ in fusion.step.reads[op]:
                if a not in ops:
                    out.add_edge(state.home[a], group)
    return out


def test_a_step_reduces_every_gradient_before_its_update() -> None:
    model = ModelGraph(
        "m",
        [
            ModelOp("w", "Linear", Role.VARIABLE, 0, 800),
            ModelOp("in", "Input", Role.FORWARD, 0),
            ModelOp("f", "Linear", Role.FORWARD, 100_000),
            ModelOp("b", "Linear", Role.BACKWARD, 200_000, 0, 2),
            ModelOp("u", "Update", Role.UPDATE, 5_000, 0, 0),
        ],
        [
            Tensor(0, 800, (2, 3, 4), batched=False),
            Tensor(1, 4_000, (2, 3)),
            Tensor(2, 1_600, (3,)),
            Tensor(3, 800, (4,), batched=False),
        ],
    )
    step = Step.of(model, 0.5)
    assert step.names == ["in", "f", "b", "u", "b/all-reduce"]
    assert step.n == 4
    assert step.reduce_bytes.tolist() == [0, 0, 0, 0, 800]
    # half of the batch and a launch (10 µs); updates do not shrink
    assert step.time_ns.tolist() == [0, 60_000, 110_000, 5_000, 0]
    assert step.own_bytes.tolist() == [0, 800, 800, 800]
    assert step.fusible == [False, True, True, True, True]
    assert sorted(zip(step.source.tolist(), step.target.tolist(), strict=True)) == [
        (0, 1), (0, 2), (1, 2), (2, 4), (4, 3),
    ]  # fmt: skip
    fusion = JointFusion(step, SumOfOps(), Line(1000, 1))
    # f, b, then 1,000 + 800 ns on the channel, then the update
    assert makespan(fusion, fusion.start()) == 60_000 + 110_000 + 1_800 + 5_000


def test_others_wait_for_a_fused_op_but_not_for_a_copy() -> None:
    # a is read by b, whose gradient is reduced, and by the long c
    step = step_of([20, 10, 60], [[], [0], [0]], [(1, 100, [])])
    fusion = JointFusion(step, Halved(), LINE)
    start = fusion.start()
    assert makespan(fusion, start) == 20 + 10 + 110  # the channel takes 10 + 100 after b; c runs meanwhile
    apart = start.copy()
    assert fusion.join(apart, 0, 2)
    # a and c in (20 + 60)/2, and only then b
    assert makespan(fusion, apart) == 40 + 10 + 110
    twice = start.copy()
    assert fusion.duplicate(twice, 0, 2)
    # a + c in 40 and a in 20, all ready at once or after it: the device takes a (its row) first
    assert makespan(fusion, twice) == 20 + 40 + 10 + 110
    assert twice.copies == {2: frozenset({0})}
    assert fusion.named(apart) == {"ops": [["op0", "op2"]], "again": [[]], "reduces": [["reduce0"]]}
    assert fusion.named(twice) == {"ops": [["op2"]], "again": [["op0"]], "reduces": [["reduce0"]]}
    assert not fusion.duplicate(twice, 0, 2)


def test_what_only_a_copy_is_read_of_is_computed_once() -> None:
    step = step_of([20, 10, 60], [[], [0], [0]])
    fusion = JointFusion(step, Halved(), LINE)
    state = fusion.start()
    assert fusion.duplicate(state, 0, 2) and fusion.duplicate(state, 0, 1)
    # now nobody reads a itself: one of the two is its home, the other has a copy
    assert groups(fusion, state) == {0, 2}
    assert state.own(0) == (0, 1) and state.copies == {2: frozenset({0})}
    assert makespan(fusion, state) == (20 + 10) // 2 + (20 + 60) // 2


def test_a_kernel_whose_copy_reader_went_is_priced_again() -> None:
    """op -> u -> v -> {w, x}, w -> x: what op and u make is read by a copy of v alone, until that goes."""
    step = step_of([50_000] * 5, [[], [0], [1], [2], [2, 3]])
    fusion = JointFusion(step, SavedTraffic(10_000, 0.5), LINE)
    state = fusion.start()
    op, u, v, w, x = range(5)
    assert fusion.duplicate(state, v, x) and fusion.duplicate(state, u, v) and fusion.join(state, op, u)
    fusion.lower(state)  # all have a price
    assert fusion.duplicate(state, w, x)
    fusion.lower(state)
    priced = state.time_ns.copy()
    state.stale.update(groups(fusion, state))
    fusion.lower(state)
    assert priced.tolist() == state.time_ns.tolist()


def test_a_fused_all_reduce_waits_for_all_its_gradients() -> None:
    step = step_of([30, 50], [[], [0]], [(0, 20, []), (1, 40, [])])
    fusion = JointFusion(step, SumOfOps(), LINE)
    state = fusion.start()
    assert makespan(fusion, state) == 80 + 10 + 40  # the first, 30 ns long, is over at 60
    assert fusion.reduces(state) == [2, 3]
    assert fusion.join(state, 2, 3)
    assert makespan(fusion, state) == 80 + 10 + 60
    assert fusion.reduces(state) == [2]


def test_ops_that_would_wait_for_themselves_are_not_fused() -> None:
    step = step_of([1, 1, 1], [[], [0], [0, 1]])
    fusion = JointFusion(step, SumOfOps(), LINE)
    state = fusion.start()
    before = state.key()
    assert not fusion.join(state, 0, 2)  # 1 needs 0 and is needed by 2
    assert state.key() == before
    assert fusion.join(state, 0, 1) and fusion.join(state, 0, 2)
    assert makespan(fusion, state) == 3


def test_an_all_reduce_is_not_fused_with_one_that_its_update_feeds() -> None:
    # gradient 0 is reduced, 1 is updated with it, and 2 makes another gradient of that
    step = step_of([1, 1, 1], [[], [], [1]], [(0, 5, [1]), (2, 5, [])])
    fusion = JointFusion(step, SumOfOps(), LINE)
    assert not fusion.join(fusion.start(), 3, 4)


def test_two_convolutions_and_an_op_with_an_all_reduce_are_not_fused() -> None:
    step = step_of([1, 1, 1], [[], [0], [1]], [(2, 5, [])], ["Conv2d", "Add", "Conv2d"])
    fusion = JointFusion(step, SumOfOps(), LINE)
    state = fusion.start()
    assert fusion.join(state, 0, 1)
    assert not fusion.join(state, 0, 2) and not fusion.duplicate(state, 0, 2)
    assert not fusion.join(state, 2, 3)


def test_a_kernel_knows_what_it_reads_and_writes() -> None:
    step = step_of([5, 6, 7, 1], [[], [0], [0, 1], [1]], nbytes=100)
    kernel = JointFusion(step, SumOfOps(), LINE).kernel((1, 2), [True, True])
    assert (kernel.inputs, kernel.read_bytes, kernel.written_bytes) == (1, 100.0, 100.0)  # nobody reads what 2 makes
    assert kernel.in_bytes.tolist() == [100, 200] and kernel.out_bytes.tolist() == [100, 0]
    assert list(zip(kernel.source, kernel.target, kernel.edge_bytes, strict=True)) == [(0, 1, 100)]
    # of the 200 bytes that op 2 moves alone half stay inside; what op 1 writes is read outside as well
    assert kernel.kept_share().tolist() == [0, 0.5]


def held_together(fusion: JointFusion, state: Fusion) -> None:
    """All that a state says of itself agrees."""
    count, living = len(fusion.step.names), groups(fusion, state)
    own = sorted(node for group in living for node in state.own(group))
    assert own == list(range(count))  # each is at home once
    for group in living:
        assert group == min(state.own(group)) and all(state.home[node] == group for node in state.own(group))
        assert state.order[state.place[group]] == group
    assert set(state.members) == {g for g in living if len(state.own(g)) > 1}
    assert {(op, g) for g, ops in state.copies.items() for op in ops} == {
        (op, g) for op, held in state.held.items() for g in held
    }
    assert all(state.home[op] != g for g, ops in state.copies.items() for op in ops)
    waits = graph_of(fusion, state)
    assert nx.is_directed_acyclic_graph(waits)
    assert all(state.place[a] < state.place[b] for a, b in waits.edges)
    lowered = fusion.lower(state)
    rows = sorted(living)
    assert {(rows[a], rows[b]) for a, b in lowered.edges().tolist()} == set(waits.edges)
    kinds = lowered.column("kind")
    assert [g for g, kind in zip(rows, kinds, strict=True) if kind == OpKind.COLLECTIVE] == [
        g for g in rows if g >= fusion.step.n
    ]
    for group in living:  # nothing is computed for nobody
        for op in [*state.own(group), *state.copies.get(group, ())]:
            readers = fusion.step.users[op]
            inside = {*state.own(group), *state.copies.get(group, ())}
            from_here = state.home[op] == group and (
                not readers
                or any(op not in state.copies.get(g, ()) for r in readers for g in state.groups_of(r) if g != group)
            )
            assert from_here or any(r in inside for r in readers)


@settings(max_examples=80, deadline=None)
@given(steps(), st.data())
def test_edits_keep_a_fusion_whole(step: Step, data: st.DataObject) -> None:
    fusion = JointFusion(step, Halved(), LINE)
    state = fusion.start()
    held_together(fusion, state)
    for _ in range(data.draw(st.integers(1, 10))):
        living = sorted(groups(fusion, state))
        one, other = data.draw(st.sampled_from(living)), data.draw(st.sampled_from(living))
        before, was = state.key(), graph_of(fusion, state)
        if data.draw(st.booleans()):
            allowed = fusion.may_fuse(state, one, other)
            waits = nx.contracted_nodes(was, one, other, self_loops=False) if one != other else was
            done = fusion.join(state, one, other)
            assert done == (allowed and nx.is_directed_acyclic_graph(waits))
        else:
            allowed = fusion.may_fuse(state, one, other) and one in fusion.predecessors(state, other)
            done = fusion.duplicate(state, one, other)
            assert done == (allowed and other < step.n)
        if not done:
            assert state.key() == before
        held_together(fusion, state)


@settings(max_examples=30, deadline=None)
@given(steps(), st.data())
def test_a_copy_is_another_state(step: Step, data: st.DataObject) -> None:
    fusion = JointFusion(step, Halved(), LINE)
    state = fusion.start()
    key, taken = state.key(), makespan(fusion, state)
    other = state.copy()
    for _ in range(5):
        pair = data.draw(st.lists(st.sampled_from(sorted(groups(fusion, other))), min_size=2, max_size=2))
        fusion.join(other, *pair)
        fusion.duplicate(other, *pair)
    assert (state.key(), makespan(fusion, state)) == (key, taken)
    assert state.order == step.in_order()
