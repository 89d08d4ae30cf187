"""A collective as messages: rings read off socket calls, replayed; answers worked out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.sync import SyncModel
from dpro.graph.assemble import assemble
from dpro.graph.graph import Graph, OpKind
from dpro.graph.wire import _in_order
from dpro.passes.tensor_fusion import TensorFusion
from dpro.replay import oracle
from dpro.replay.engine import replay
from tests.graph.ring_traces import US, AllReduce, job, two_ranks


def times(graph: Graph) -> dict[str, tuple[float, float]]:
    """Replayed start and end by op name and rank, µs; held against the oracle."""
    played, slow = replay(graph), oracle.replay_arrays(graph.arrays())
    assert played.end.tolist() == slow.end.tolist()
    ranks = graph.column("rank")
    return {
        f"{graph.name_of(op)} @{ranks[op]}": (played.start[row] / US, played.end[row] / US)
        for row, op in enumerate(graph.arrays().ids.tolist())
    }


def of_kind(graph: Graph, kind: OpKind) -> list[int]:
    return np.flatnonzero(graph.column("alive") & (graph.column("kind") == kind)).tolist()


@pytest.mark.parametrize("clocks", [[0, 0], [0, 7_000]])
def test_two_ranks_replay_as_they_were_measured(clocks: list[float]) -> None:
    traces = job(two_ranks(), used=[325, 318], end=400, clocks=clocks)
    graph = assemble(traces, messages=True)
    if clocks[1]:
        assert graph.info["clock"][1]["offset_ns"] == pytest.approx(-7_000 * US, abs=20 * US)
        return  # what the messages leave open of the clock is in the times
    played = times(graph)
    assert played["send gloo:all_reduce step 0 part 0 @0"] == (170, 220)
    assert played["send gloo:all_reduce step 0 part 0 @1"] == (165, 225)
    assert played["send gloo:all_reduce step 1 part 0 @0"] == (240, 300)
    assert played["send gloo:all_reduce step 1 part 0 @1"] == (230, 310)
    assert played["gloo:all_reduce received @0"] == (320, 320)
    assert played["gloo:all_reduce received @1"] == (315, 315)
    assert replay(graph).makespan_ns == 400 * US == replay(assemble(traces)).makespan_ns
    links = {graph.resource_names[graph.column("resource")[op]] for op in of_kind(graph, OpKind.SEND)}
    assert links == {"link/0>1", "link/1>0"}


def test_links_twice_as_fast() -> None:
    graph = assemble(job(two_ranks(), used=[325, 318], end=400), messages=True)
    graph.scale(np.asarray(of_kind(graph, OpKind.SEND)), 0.5)
    played = times(graph)
    # step 0: 170-195 and 165-195. Rank 0 sends 15 after it received, rank 1 10: 210-240 and 205-245
    assert played["send gloo:all_reduce step 1 part 0 @0"] == (210, 240)
    assert played["send gloo:all_reduce step 1 part 0 @1"] == (205, 245)
    assert played["gloo:all_reduce received @0"] == (255, 255)  # 10 after its last message, as measured
    assert played["gloo:all_reduce received @1"] == (255, 255)  # 15 after


def test_a_bucket_lists_all_its_ops_and_can_be_replaced() -> None:
    graph = assemble(job(two_ranks(), used=[325, 318], end=400), messages=True)
    [bucket] = graph.buckets
    kinds = [OpKind(graph.column("kind")[op]) for op in bucket.ops]
    assert kinds.count(OpKind.SEND) == 4
    assert kinds.count(OpKind.RECV) == 4 + 2  # one a message, and one where each rank leaves
    assert kinds[-1] == OpKind.COLLECTIVE
    ends = times(graph)
    assert ends["gloo:all_reduce @-1"] == (320, 320)
    left = set(np.flatnonzero(graph.column("alive")).tolist()) - set(bucket.ops)
    assert not [op for op in left if graph.column("kind")[op] in (OpKind.SEND, OpKind.RECV, OpKind.COLLECTIVE)]


def test_two_in_flight_share_the_link() -> None:
    first, second = two_ranks(1)[0], two_ranks(2)[0]
    # the second's first message to rank 1 is handed over at 200, while the first one's is on the link until 220
    second.launched = [180, 190]
    second.left = [500, 500]
    second.messages = [
        (0, 1, 200, 280, 1_000),
        (1, 0, 235, 285, 1_000),
        (0, 1, 310, 400, 1_000),
        (1, 0, 320, 410, 1_000),
    ]
    # byte order on the streams is that of `messages`: the first's step 1 to rank 1 goes before the second's step 0
    first.messages = [
        (0, 1, 170, 220, 1_000),
        (1, 0, 165, 225, 1_000),
        (0, 1, 290, 300, 1_000),
        (1, 0, 290, 310, 1_000),
    ]
    graph = assemble(job([first, second], used=[510, 505], end=600), messages=True)
    sends = of_kind(graph, OpKind.SEND)
    on = {(graph.resource_names[graph.column("resource")[op]], int(graph.column("duration")[op]) // US) for op in sends}
    assert ("link/0>1", 60) in on  # 220-280, not 200-280
    assert replay(graph).makespan_ns == 600 * US


def test_three_ranks_in_a_ring() -> None:
    # rank r sends to r+1; 4 steps of 100 bytes, each sent 5 after the one before was received, 20 on the link
    messages = [(r, (r + 1) % 3, 100 + 25 * step, 120 + 25 * step, 100) for step in range(4) for r in range(3)]
    traces = job([AllReduce(300, [50, 95, 80], [200, 200, 200], messages)], used=[205] * 3, end=300)
    graph = assemble(traces, messages=True)
    sends = of_kind(graph, OpKind.SEND)
    assert sorted({graph.name_of(op) for op in sends}) == [f"send gloo:all_reduce step {s} part 0" for s in range(4)]
    assert len(sends) == 12
    gaps = {graph.name_of(op)[-8]: set() for op in sends}
    for op in sends:
        gaps[graph.name_of(op)[-8]].add(int(graph.column("gap")[op]) // US)
    # step 0: rank 0 needs rank 1 (95), rank 1 itself, rank 2 needs rank 0 and itself (80)
    assert gaps == {"0": {5, 20}, "1": {5}, "2": {5}, "3": {5}}
    assert replay(graph).makespan_ns == 300 * US
    # rank 1 30 µs earlier: rank 2 is last, at 80, and everything is so much earlier as its own chain allows
    ready = {int(graph.column("rank")[op]) for op in graph.out_op.values()}
    assert ready == {0, 1, 2}


def test_parts_are_told_by_where_calls_begin() -> None:
    messages = []
    for step in range(2):
        for part in range(3):
            at = 100 + 60 * step + 10 * part
            messages += [(0, 1, at, at + 20, 500), (1, 0, at, at + 20, 500)]
    graph = assemble(job([AllReduce(3_000, [90, 90], [300, 300], messages)], used=[305, 305], end=400), messages=True)
    names = sorted({graph.name_of(op) for op in of_kind(graph, OpKind.SEND)})
    assert names == [f"send gloo:all_reduce step {s} part {p}" for s in range(2) for p in range(3)]


def test_what_is_no_whole_ring_stays_one_op() -> None:
    lost = two_ranks()
    lost[0].messages = lost[0].messages[:3]  # one direction lacks its half
    for reduces in (lost, [AllReduce(9_000, lost[0].launched, lost[0].left, two_ranks()[0].messages)]):
        graph = assemble(job(reduces, used=[325, 318], end=400), messages=True)
        assert not of_kind(graph, OpKind.SEND)
        assert len(of_kind(graph, OpKind.COLLECTIVE)) == 1
        assert graph.info["messages"]["collectives_with_all_messages"] == 0


@pytest.mark.parametrize("tags", [(1, 2), (0, 0), (-1, -1)])
def test_messages_go_to_the_collective_they_serve(tags: tuple[int, int]) -> None:
    first, second = two_ranks(tags[0])[0], two_ranks(tags[1])[0]
    later = 500
    second.launched, second.left = [t + later for t in first.launched], [t + later for t in first.left]
    second.messages = [(s, r, a + later, b + later, n) for s, r, a, b, n in first.messages]
    graph = assemble(job([first, second], used=[900, 900], end=1_000), messages=True)
    facts = graph.info["messages"]
    assert facts["attributed_share"] == facts["matched_share"] == 1
    assert facts["collectives_with_all_messages"] == 2
    [there, back] = facts["links"]
    assert (there["sender"], there["receiver"], there["messages"], there["nbytes"]) == (0, 1, 4, 4_000)
    assert there["transmit_ns"] == 2 * (50 + 60) * US
    assert back["transmit_ns"] == 2 * (60 + 80) * US
    assert back["wait_ns"] == 2 * 45 * US  # rank 0 was there at 120, rank 1 sent at 165
    assert there["wait_ns"] == 2 * 10 * US


def test_two_collectives_that_each_hold_the_messages_of_both() -> None:
    """Threads that got no core: nothing moves until both were handed over, and the first one's run ends last."""
    both = []
    for at, tag in ((150, 7), (170, 8)):
        messages = [(s, r, at + 40 * k, at + 40 * k + 15, 1_000) for k in range(2) for s, r in ((0, 1), (1, 0))]
        both.append(AllReduce(2_000, [at - 50, at - 50], [320, 320], messages, tag))
    # so the first one's messages are nearer to the second one's run
    both[0].launched, both[1].launched, both[0].left = [20, 20], [140, 140], [330, 330]
    graph = assemble(job(both, used=[340, 340], end=400), messages=True)
    assert graph.info["messages"]["collectives_with_all_messages"] == 2
    first, second = (
        min(int(graph.column("gap")[op]) for op in bucket.ops if graph.column("kind")[op] == OpKind.SEND)
        for bucket in graph.buckets
    )
    # the first one's first call came 130 after it was handed over, and the later steps 25 after the one before
    assert (first, second) == (25 * US, 25 * US)
    waits = [max(int(graph.column("gap")[op]) for op in bucket.ops) for bucket in graph.buckets]
    assert waits == [130 * US, 320 * US - 225 * US]


@settings(max_examples=200)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, np.inf]), min_size=4, max_size=4), max_size=4))
def test_pairs_in_order_are_most_and_then_cheapest(rows: list[list[float]]) -> None:
    cost = np.array(rows, dtype=np.float64).reshape(-1, 4)

    def every(row: int, column: int) -> Iterator[list[tuple[int, int]]]:
        yield []
        for i in range(row, len(cost)):
            for j in range(column, 4):
                if np.isfinite(cost[i, j]):
                    yield from ([(i, j), *rest] for rest in every(i + 1, j + 1))

    def worth(pairs: list[tuple[int, int]]) -> tuple[int, float]:
        return len(pairs), -sum(float(cost[pair]) for pair in pairs)

    found = _in_order(cost)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(found))
    assert worth(found) == max(worth(pairs) for pairs in every(0, 0))


@pytest.mark.parametrize(("called", "gap"), [(159, 0), (155, 0), (130, 10), (125, 5)])
def test_a_call_just_before_the_traced_arrival_of_the_peer_waited_for_it(called: float, gap: float) -> None:
    reduces = two_ranks()  # rank 0 hands over at 120, rank 1 at 160
    reduces[0].messages[0] = (0, 1, called, 220, 1_000)
    graph = assemble(job(reduces, used=[325, 318], end=400), messages=True)
    kind, rank = graph.column("kind"), graph.column("rank")
    [first, *_] = [op for op in range(len(graph)) if kind[op] == OpKind.SEND and rank[op] == 0]
    assert graph.column("gap")[first] == gap * US


@pytest.mark.parametrize("ahead", [5, 500_000, 100_000_000_000])
def test_messages_of_clocks_left_as_they_are(ahead: float) -> None:
    graph = assemble(job(two_ranks(), used=[325, 318], end=400, clocks=[0, ahead]), align=False, messages=True)
    assert graph.info["measured_ns"] == 400 * US
    assert replay(graph).makespan_ns > 0


def test_a_fused_plan_costs_the_same_on_both_forms() -> None:
    reduces = [*two_ranks(1), AllReduce(2_000, [400, 400], [520, 520], [])]
    later = [(s, r, a + 240, b + 240, n) for s, r, a, b, n in reduces[0].messages]
    reduces[1] = AllReduce(2_000, [400, 400], [560, 560], later, 2)
    traces = job(reduces, used=[570, 570], end=700)
    found = []
    for messages in (False, True):
        graph = assemble(traces, messages=messages)
        graph.info["sync"] = SyncModel(latency_ns=10 * US, ns_per_byte=20)
        before, mark = replay(graph).makespan_ns, TensorFusion().apply(graph, ((0, 1),))
        found.append((before, replay(graph).makespan_ns, len(graph)))
        graph.undo(mark)
        assert replay(graph).makespan_ns == before
    assert found[0] == found[1]
    assert found[0][0] == 700 * US
    # one launch of 10 less: ready at 390; 10 + 4,000 bytes at 20 ns; the first copy, whose own bucket was long there,
    # came 170 after the last launch; two copies, then as it was
    assert found[0][1] == (390 + 90 + 170 + 20 + 110) * US


def test_votes_over_the_same_streams_are_no_part_of_a_collective() -> None:
    # one tag for all, as Horovod has it; right after rank 1 left it sends a vote, which rank 0 reads much later
    reduces = [AllReduce(2_000, [120, 160], [320, 315], [*two_ranks()[0].messages, (1, 0, 316, 1_900, 8)], 0)]
    second = two_ranks(0)[0]
    second.launched, second.left = [2_120, 2_160], [2_320, 2_315]
    second.messages = [(s, r, a + 2_000, b + 2_000, n) for s, r, a, b, n in second.messages]
    graph = assemble(job([*reduces, second], used=[2_325, 2_318], end=2_400), messages=True)
    assert graph.info["messages"]["attributed_share"] == pytest.approx(1 - 8 / 8_008)
    assert graph.info["messages"]["collectives_with_all_messages"] == 2
    assert times(graph)["gloo:all_reduce received @0"] == (2_320, 2_320)
