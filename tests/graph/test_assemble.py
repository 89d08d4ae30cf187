"""Several ranks in one graph: collectives joined, DDP on gloo, ranks that differ; answers by hand."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.clock.ends import align_on_ends
from dpro.errors import TraceError
from dpro.graph.assemble import assemble, assemble_steps
from dpro.graph.cycles import break_cycles
from dpro.graph.graph import Graph, OpKind
from dpro.graph.spans import measure
from dpro.replay.engine import replay
from dpro.trace.kineto import read
from dpro.trace.model import RankTrace, Tensor
from tests.trace import synthetic as syn

US = 1_000


def job(tmp_path: Path, ranks: list[list[syn.Event]]) -> list[RankTrace]:
    world = {"world_size": len(ranks)}
    return [
        read(syn.write(tmp_path / f"rank{r}.json", events, distributedInfo={"rank": r, **world}))
        for r, events in enumerate(ranks)
    ]


def of_kind(graph: Graph, kind: OpKind) -> list[int]:
    return np.flatnonzero(graph.column("kind") == kind).tolist()


def makespan_us(graph: Graph) -> float:
    return replay(graph).makespan_ns / US


# -- NCCL-like: the collective is a kernel -----------------------------------------------------------


def gpu_rank(arrive: float, leave: float = 500) -> list[syn.Event]:
    """Compute until ``arrive``, one all-reduce kernel until ``leave``, 100 µs of compute after it."""
    return [
        syn.mark("ProfilerStep#0", 0, 700),
        syn.op("aten::a", 0, 80),
        *syn.launched("compute", 10, 20, arrive, 1),
        *syn.launched("ncclKernel_AllReduce_RING_LL_Sum_float(x)", 25, arrive, leave, 2),
        *syn.launched("after", 40, leave, leave + 100, 3),
    ]


def test_transfer_is_the_common_end_minus_the_latest_arrival(tmp_path: Path) -> None:
    graph = assemble(job(tmp_path, [gpu_rank(120), gpu_rank(400), gpu_rank(250)]))
    [collective] = of_kind(graph, OpKind.COLLECTIVE)
    assert graph.column("duration")[collective] == 100 * US  # not 380 or 250
    assert graph.column("rank")[collective] == -1
    assert makespan_us(graph) == 700
    # Rank 1 computes 380 (20-400). With a quarter of that it arrives at 115; rank 2 is now last, at 250:
    # the all-reduce ends at 350, the kernel after it at 450; the host's step still ends at 700.
    straggler = [op for op in range(len(graph)) if graph.name_of(op) == "compute" and graph.column("rank")[op] == 1]
    graph.scale(np.asarray(straggler), 0.25)
    played = replay(graph)
    row = graph.arrays().ids.tolist().index(collective)
    assert (played.start[row] / US, played.end[row] / US) == (250, 350)


def test_a_straggler_does_not_change_the_transfer(tmp_path: Path) -> None:
    calm = assemble(job(tmp_path, [gpu_rank(300), gpu_rank(400)]))
    (tmp_path / "late").mkdir()
    late = assemble(job(tmp_path / "late", [gpu_rank(300, 5400), gpu_rank(5300, 5400)]))
    durations = [int(g.column("duration")[of_kind(g, OpKind.COLLECTIVE)[0]]) for g in (calm, late)]
    assert durations == [100 * US, 100 * US]


def test_clocks_of_other_hosts_are_brought_together(tmp_path: Path) -> None:
    shifted = [{**e, "ts": e["ts"] + 5_000} for e in gpu_rank(400)]
    traces = job(tmp_path, [gpu_rank(120), shifted])
    assert align_on_ends(traces).offsets_ns == [0, -5_000 * US]
    graph = assemble(traces)
    assert graph.column("duration")[of_kind(graph, OpKind.COLLECTIVE)[0]] == 100 * US
    assert makespan_us(graph) == 700
    assert measure(traces).mean_ns == 700 * US


@pytest.mark.parametrize("ahead_us", [5, 500_000, 100_000_000_000])
def test_clocks_can_be_left_as_they_are(tmp_path: Path, ahead_us: float) -> None:
    ranks = [gpu_rank(120), [{**e, "ts": e["ts"] + ahead_us} for e in gpu_rank(400)]]
    graph = assemble(job(tmp_path, ranks), align=False)
    # rank 0 leaves at 500 on its clock; on that of rank 1 the last arrival is later than it was, by what that is ahead
    [collective] = of_kind(graph, OpKind.COLLECTIVE)
    assert graph.column("duration")[collective] == max(0, 100 - ahead_us) * US
    assert graph.info["measured_ns"] == 700 * US
    assert graph.info["clock"] == []
    assert 0 < makespan_us(graph) <= 700


def test_one_rank_of_many_keeps_what_it_saw_and_says_so(tmp_path: Path) -> None:
    info = {"rank": 0, "world_size": 8}
    trace = read(syn.write(tmp_path / "r.json", gpu_rank(120), distributedInfo=info))
    graph = assemble([trace])
    [collective] = of_kind(graph, OpKind.COLLECTIVE)
    assert graph.column("duration")[collective] == 380 * US
    assert "1 collective(s) seen by one rank only: waiting for its peers is inside" in graph.warnings


def test_ranks_with_different_collectives_meet_in_what_they_share(tmp_path: Path) -> None:
    extra = syn.launched("ncclKernel_AllGather_RING_LL(x)", 45, 600, 650, 4)
    traces = job(tmp_path, [[*gpu_rank(120), *extra], gpu_rank(400)])
    graph = assemble(traces)
    assert sorted(graph.column("rank")[of_kind(graph, OpKind.COLLECTIVE)].tolist()) == [-1, 0]
    assert "rank 1 has 1 collectives, rank 0 2: 1 in common" in graph.warnings
    assert makespan_us(graph) == 700


def test_groups_are_kept_apart(tmp_path: Path) -> None:
    def rank(first: str, second: str) -> list[syn.Event]:
        name = "ncclKernel_AllReduce_RING_LL_Sum_float(x)"
        return [
            syn.mark("ProfilerStep#0", 0, 700),
            syn.op("aten::a", 0, 80),
            *syn.launched(name, 10, 100, 200, 1, stream=20, **{"Process Group Ranks": first}),
            *syn.launched(name, 30, 200, 400, 2, stream=21, **{"Process Group Ranks": second}),
        ]

    # [0, 1] is the second all-reduce of rank 0 and the first of rank 1
    graph = assemble(job(tmp_path, [rank("[0, 2]", "[0, 1]"), rank("[0, 1]", "[1, 3]")]))
    ranks = sorted(graph.column("rank")[of_kind(graph, OpKind.COLLECTIVE)].tolist())
    assert ranks == [-1, 0, 1]


def test_collectives_of_a_subgroup_are_joined_among_its_ranks(tmp_path: Path) -> None:
    def rank(group: str, arrive: float) -> list[syn.Event]:
        name, ranks = "ncclKernel_AllReduce_RING_LL_Sum_float(x)", "Process Group Ranks"
        return [
            syn.mark("ProfilerStep#0", 0, 700),
            syn.op("aten::a", 0, 80),
            *syn.launched(name, 10, arrive, 300, 1, stream=20, **{ranks: group}),
            *syn.launched(name, 30, 400, 600, 2, stream=21, **{ranks: "[0, 1, 2, 3]"}),
        ]

    pairs = ["[0, 2]", "[1, 3]", "[0, 2]", "[1, 3]"]
    graph = assemble(job(tmp_path, [rank(g, a) for g, a in zip(pairs, (100, 150, 250, 280), strict=True)]))
    assert not any("one rank only" in line or "in common" in line for line in graph.warnings)
    shared = of_kind(graph, OpKind.COLLECTIVE)
    # the latest of 0 and 2 arrives at 250, of 1 and 3 at 280; both end at 300; all four run 400 to 600
    assert sorted(graph.column("duration")[shared].tolist()) == [20 * US, 50 * US, 200 * US]
    assert graph.column("rank")[shared].tolist() == [-1, -1, -1]
    rank_of, edges = graph.column("rank"), graph.edges().tolist()
    assert sorted(sorted(int(rank_of[s]) for s, d in edges if d == op) for op in shared) == [
        [0, 1, 2, 3],
        [0, 2],
        [1, 3],
    ]
    assert makespan_us(graph) == 700


def test_world_size_is_told_or_what_is_seen(tmp_path: Path) -> None:
    for rank in range(2):
        syn.write(tmp_path / f"rank{rank}.json", gpu_rank(120))
    unknown = [read(tmp_path / f"rank{rank}.json") for rank in range(2)]
    assert [trace.meta.world_size for trace in unknown] == [-1, -1]
    assert assemble(unknown).info["world_size"] == 2
    [trace] = job(tmp_path, [gpu_rank(120)])
    trace.meta.world_size = 8
    assert assemble([trace]).info["world_size"] == 8


# -- DDP on gloo -------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["copy", "view"])
def ddp(tmp_path: Path, request: pytest.FixtureRequest) -> Graph:
    traces = job(tmp_path, [syn.ddp_cpu_step(r, view=request.param) for r in range(2)])
    for trace in traces:
        trace.tensors = [
            Tensor("weight", (3,), "float32", 12, ready=1, bucket=0),
            Tensor("bias", (5,), "float32", 20, ready=0, bucket=0),
            Tensor("head", (25,), "float32", 100, ready=2, bucket=1),
        ]
        trace.meta.unprofiled_step_ns = [930 * US, 940 * US, 900 * US]
    return assemble(traces)


def test_ddp_buckets_and_what_hangs_on_them(ddp: Graph) -> None:
    assert not ddp.warnings
    assert [t.name for t in ddp.tensors] == ["weight", "bias", "head"]
    assert [(b.tensors, b.nbytes) for b in ddp.buckets] == [((1, 0), 32), ((2,), 100)]  # in ready order
    first, second = (b.ops[0] for b in ddp.buckets)
    # launches return at 330/380 and 525/575; both end at 600 and 800, one after the other on the channel
    assert ddp.column("duration")[[first, second]].tolist() == [220 * US, 200 * US]
    edges = {tuple(e) for e in ddp.edges().tolist()}
    for rank in range(2):
        assert (ddp.out_op[rank, 0], first) in edges  # the launch is the OUT op of the last gradient in it
        assert (ddp.out_op[rank, 2], second) in edges
        assert (first, ddp.in_op[rank, 1]) in edges
        assert (second, ddp.in_op[rank, 2]) in edges
    kinds = ddp.column("kind")
    assert {OpKind(kinds[op]) for op in ddp.out_op.values()} == {OpKind.OUT}
    assert {OpKind(kinds[op]) for op in ddp.in_op.values()} == {OpKind.IN}
    assert len(ddp.out_op) == len(ddp.in_op) == 6


def test_ddp_facts_for_later_floors(ddp: Graph) -> None:
    info = ddp.info
    assert ddp.ranks == 2
    assert info["measured_ns"] == 950 * US
    assert info["unprofiled_ns"] == 930 * US
    assert info["launch_ns"] == 20 * US
    assert [ddp.resource_names[info["main_resource"][r]] for r in range(2)] == ["rank0/cpu/100", "rank1/cpu/100"]
    assert info["channel"] in ddp.resource_names
    assert [ddp.column("nbytes")[b.ops[0]] for b in ddp.buckets] == [32, 100]


def test_ddp_waits_are_dependencies_not_gaps(ddp: Graph) -> None:
    assert makespan_us(ddp) == 950
    ddp.scale(np.asarray([op for b in ddp.buckets for op in b.ops]), 0.5)
    # First bucket 380-490, second 575-675. Rank 0: backward ends at 530, copies at 535-555; rank 1: ends at
    # 580, copies 586-606. Third copy after 675: 678-688 and 679-689. Then 17 and 16 µs of Python, the
    # update of 60, and 60 to the end of the step: 825.
    assert makespan_us(ddp) == 825
    ddp.scale(np.asarray([op for b in ddp.buckets for op in b.ops]), 0.0)
    # Nothing on the channel: rank 1's backward ends at 580; 6 + 20 + 4 + 10 + 16 + 60 + 60 later
    assert makespan_us(ddp) == 756


def preempted_step(rank: int) -> list[syn.Event]:
    """One gradient, one bucket. Rank 1 loses its core inside the call that launches it, from 1,090 to 4,990."""
    accumulate = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    back = 1_070 if rank == 0 else 4_990
    return [
        syn.mark("ProfilerStep#0", 0, 5_100),
        syn.op("aten::linear", 0, 1_000),
        syn.op(accumulate, 1_000, back + 10),
        syn.op("c10d::allreduce_", 1_050, back),
        syn.mark("gloo:all_reduce", 1_080 + 20 * rank, 3_000, tid=syn.GLOO_A),
        syn.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", max(back + 20, 3_005), max(back + 20, 3_005) + 10),
        syn.mark("Optimizer.step#SGD.step", 5_030, 5_090),
        syn.op("aten::add_", 5_040, 5_080),
    ]


def test_a_launch_that_lost_its_core_launched_when_its_worker_began(tmp_path: Path) -> None:
    graph = assemble(job(tmp_path, [preempted_step(r) for r in range(2)]))
    [bucket] = graph.buckets
    # rank 0's call returns at 1,070, rank 1's worker begins at 1,100; both end at 3,000
    assert graph.column("duration")[bucket.ops[0]] == 1_900 * US
    assert makespan_us(graph) == 5_100


def test_ddp_without_a_tensor_table(tmp_path: Path) -> None:
    graph = assemble(job(tmp_path, [syn.ddp_cpu_step(r) for r in range(2)]))
    assert [t.name for t in graph.tensors] == ["grad0", "grad1", "grad2"]
    assert [b.tensors for b in graph.buckets] == [(0, 1), (2,)]


def test_a_rank_that_began_early_gains_nothing_for_the_step(tmp_path: Path) -> None:
    # Two steps of 950; rank 1 runs the second 30 µs ahead of rank 0, the collectives end together.
    ranks = []
    for rank in range(2):
        first = syn.ddp_cpu_step(rank)
        second = syn.ddp_cpu_step(rank, begin=950)
        if rank:
            first[0] = syn.mark("ProfilerStep#0", 0, 920)
            first = [e for e in first if e["name"] != "aten::add_"]
            second[0] = syn.mark("ProfilerStep#1", 920, 1900)
            second[1] = syn.op("aten::linear", 920, 1100)
        else:
            second[0] = syn.mark("ProfilerStep#1", 950, 1900)
        ranks.append([*first, *second])
    traces = job(tmp_path, ranks)
    assert measure(traces).mean_ns == 950 * US
    assert [makespan_us(g) for g in assemble_steps(traces)] == [950, 950]


# -- odd input ---------------------------------------------------------------------------------------


def test_missing_steps_and_no_traces(tmp_path: Path) -> None:
    two = [*syn.ddp_cpu_step(0), *[{**e, "name": e["name"].replace("#0", "#1")} for e in syn.ddp_cpu_step(0, 950)]]
    traces = job(tmp_path, [two, syn.ddp_cpu_step(1)])
    graph = assemble(traces)
    assert any("ranks captured 1 to 2 steps: the first 1 are used" in line for line in graph.warnings)
    assert makespan_us(graph) == 950
    with pytest.raises(TraceError, match="no step 1"):
        assemble(traces, step=1)
    with pytest.raises(TraceError):
        assemble([])


def test_cycles_are_broken_where_they_go_against_time() -> None:
    edges = {(0, 1), (1, 2), (2, 0), (2, 3)}
    assert break_cycles([0, 10, 20, 30], edges) == 1
    assert edges == {(0, 1), (1, 2), (2, 3)}
    # what only hangs on a cycle is left alone, however much it goes against time
    hanging = {(0, 1), (1, 0), (1, 2)}
    assert break_cycles([50, 60, 0], hanging) == 1
    assert hanging == {(0, 1), (1, 2)}
    # two cycles with an edge in common: taking that one is enough
    eight = {(0, 1), (1, 2), (2, 0), (1, 3), (3, 0)}
    assert break_cycles([100, 0, 10, 20], eight) == 1
    assert eight == {(1, 2), (2, 0), (1, 3), (3, 0)}
    itself = {(0, 0), (0, 1)}
    assert break_cycles([0, 1], itself) == 1
    assert itself == {(0, 1)}
    tied = {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert break_cycles([0, 0, 5, 5], tied) == 2
    assert len(tied) == 2


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=24), st.lists(st.integers(0, 5), min_size=8))
def test_no_cycle_is_left_and_no_edge_is_lost_for_nothing(pairs: list[tuple[int, int]], times: list[int]) -> None:
    edges = set(pairs)
    assert break_cycles(times, edges) == len(set(pairs)) - len(edges)
    assert _acyclic(edges)
    assert all(_reaches(set(pairs), dst, src) for src, dst in set(pairs) - edges)  # each lay on a cycle


def _acyclic(edges: set[tuple[int, int]]) -> bool:
    return not any(_reaches(edges, dst, src) for src, dst in edges)


def _reaches(edges: set[tuple[int, int]], start: int, goal: int) -> bool:
    seen, todo = set[int](), [start]
    while todo:
        op = todo.pop()
        if op == goal:
            return True
        if op not in seen:
            seen.add(op)
            todo += [dst for src, dst in edges if src == op]
    return False


def test_many_cycles_take_no_longer_than_one_pass() -> None:
    # 20,000 pairs that wait for each other, all downstream of one another
    count = 40_000
    edges = {(i, i + 1) for i in range(count - 1)} | {(i + 1, i) for i in range(0, count - 1, 2)}
    began = time.perf_counter()
    assert break_cycles(list(range(count)), edges) == count // 2
    assert time.perf_counter() - began < 5
    assert edges == {(i, i + 1) for i in range(count - 1)}
