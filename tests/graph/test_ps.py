"""A parameter server's step: two workers by hand, replayed as captured; and what comes back of replayed jobs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.cost.sync import SyncModel
from dpro.graph.assemble import assemble, assemble_steps
from dpro.graph.graph import Graph, OpKind
from dpro.graph.ps import read_parts
from dpro.graph.ps_layout import layout_of
from dpro.graph.ps_ops import INFO, Ps, engine
from dpro.graph.ps_pace import Message, link_pace
from dpro.passes.tensor_fusion import captured
from dpro.replay.engine import replay
from dpro.trace import byteps
from dpro.trace.horovod import SUBMIT, WAIT
from dpro.trace.model import EventKind, Meta, RankTrace, Tensor, TraceBuilder
from tests.graph.ps_jobs import FREE, column, layout, model, ps_graph, traces, with_wire

US, MS = 1_000, 1_000_000
BYTES = 40_000

#: stages of a partition: copied out, pushed, pulled, copied in; µs
Stages = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]
#: Worker 0: gradients handed in at 100 and 110; links take 100 µs for a partition.
FIRST: dict[tuple[int, int], Stages] = {
    (0, 0): ((105, 115), (120, 225), (230, 430), (432, 442)),
    # queued behind the first: its turn came at 225, when that was acknowledged
    (0, 1): ((115, 125), (126, 325), (330, 530), (532, 542)),
    (1, 0): ((125, 130), (131, 425), (430, 700), (702, 707)),
}
#: Worker 1 hands in at 200 and 210, so that the server waits for its pushes.
SECOND: dict[tuple[int, int], Stages] = {
    (0, 0): ((205, 215), (220, 320), (325, 430), (432, 442)),
    (0, 1): ((215, 225), (226, 420), (425, 530), (532, 542)),
    (1, 0): ((225, 230), (231, 580), (585, 700), (702, 707)),
}


def trace(rank: int, parts: dict[tuple[int, int], Stages], handed_in: int, **settings_: object) -> RankTrace:
    """One step of 1,000 µs: compute until the hand-in, an optimizer from 710 to 900."""
    builder = TraceBuilder(Meta(rank=rank, world_size=2, host="here"))

    def add(name: str, kind: EventKind, start: int, end: int, **more: int) -> None:
        builder.add(name, kind, "cpu/1", start * US, end * US, None, **more)

    add("ProfilerStep#0", EventKind.ANNOTATION, 0, 1000)
    add("aten::mm", EventKind.CPU_OP, 0, handed_in)
    add("aten::mm_backward", EventKind.CPU_OP, handed_in, handed_in + 10)
    add("aten::add_", EventKind.CPU_OP, 710, 900)
    for tensor in (0, 1):
        at = handed_in + 10 * tensor - 1  # inside the op that made it
        add(SUBMIT, EventKind.ANNOTATION, at, at, tensor=tensor)
        add(WAIT, EventKind.ANNOTATION, at, 708, tensor=tensor)
    for (tensor, number), stages in parts.items():
        for name, (start, end) in zip(byteps.ROWS.values(), stages, strict=True):
            more = {"tensor": tensor, "flow": number, "nbytes": BYTES}
            add(name, EventKind.ANNOTATION, start, end, **more)
    made = builder.freeze([(0, 1000 * US)])
    made.tensors = [Tensor("p0", (20_000,), "float32", 80_000, 0), Tensor("p1", (10_000,), "float32", 40_000, 1)]
    made.meta.extra[byteps.SETTINGS] = {"hash_fn": "naive", "partition_bytes": 40_960, **settings_}
    return made


def both(**settings_: object) -> list[RankTrace]:
    return [trace(0, FIRST, 100, **settings_), trace(1, SECOND, 200, **settings_)]


def ends(graph: Graph, name: str, rank: int) -> list[int]:
    """When the ops so called end in the replay, µs."""
    played, arrays = replay(graph), graph.arrays()
    return [
        int(played.end[i]) // US
        for i, op in enumerate(arrays.ids.tolist())
        if graph.name_of(op) == name and graph.column("rank")[op] == rank
    ]


def test_the_captured_step_replays_as_it_was() -> None:
    graph = assemble(both())
    assert replay(graph).makespan_ns == graph.info["measured_ns"] == 1000 * US
    for rank, parts in ((0, FIRST), (1, SECOND)):
        for stage, name in enumerate(("copy out", "push", "pull", "copy in")):
            assert sorted(ends(graph, name, rank)) == sorted(stages[stage][1] for stages in parts.values())
    assert captured(graph) == ((0,), (1,))
    assert [bucket.nbytes for bucket in graph.buckets] == [80_000, 40_000]
    assert {OpKind(graph.column("kind")[op]) for op in graph.out_op.values()} == {OpKind.OUT}
    assert len(graph.out_op) == len(graph.in_op) == 4
    assert not graph.info["negotiated"]
    assert graph.warnings == []


def test_queueing_and_transmission_are_told_apart() -> None:
    graph = assemble(both())
    # worker 0: from its call to its acknowledgement; then from the end of the one before, whatever the call
    assert column(graph, "push", "duration", 0)[1:] == [100 * US, 100 * US]
    assert column(graph, "push", "gap", 0)[1:] == [0, 0]
    links = {(x["sender"], x["receiver"]): x for x in graph.info["messages"]["links"]}
    there = links["worker0", "server0"]
    assert (there["messages"], there["nbytes"]) == (3, 120_000)
    # 105 + 100 + 100 on the link; the second waited from 126 to 225, the third from 131 to 325
    assert (there["transmit_ns"], there["queue_ns"]) == (305 * US, (99 + 194) * US)


def test_a_server_adds_when_the_last_push_is_there() -> None:
    """Its pulls had been asked for: what lies between the last push and the first byte is the server's time."""
    graph = assemble(both())
    played, arrays = replay(graph), graph.arrays()
    at = {op: i for i, op in enumerate(arrays.ids.tolist())}
    sums = [op for op in at if graph.name_of(op) == "sum"]
    assert len(sums) == 6
    assert {graph.resource_names[graph.column("resource")[op]] for op in sums} == {engine(0)}
    summed = sorted(int(played.end[at[op]]) // US for op in at if graph.name_of(op) == "summed")
    # never before the last push (320, 420, 580), never after the pull had to begin (430, 530, 700 less its bytes)
    assert all(last <= got <= over for last, got, over in zip((320, 420, 580), summed, (430, 530, 700), strict=True))


def test_faster_links_shorten_what_links_did_and_nothing_else() -> None:
    graph = assemble(both())
    links = [i for i, name in enumerate(graph.resource_names) if name.startswith("link/")]
    ops = np.flatnonzero(np.isin(graph.column("resource"), links))
    graph.scale(ops, 0.0)
    # pushes are through as soon as they are copied out and taken up; worker 1's third one 1 µs after 230
    assert max(ends(graph, "push", 1)) < 330
    assert replay(graph).makespan_ns < 1000 * US
    # 1,000 - 900 of silence, 190 of optimizer, 2 before it
    assert replay(graph).makespan_ns >= (230 + 292) * US


def engine_trace(rank: int, parts: dict[tuple[int, int], Stages], handed_in: int) -> RankTrace:
    """The same of a framework that runs a graph: an op of its own hands each gradient in, on a second thread."""
    builder = TraceBuilder(Meta(rank=rank, world_size=2, host="here"))

    def add(name: str, kind: EventKind, start: int, end: int, resource: str = "cpu/1", **more: int) -> None:
        builder.add(name, kind, resource, start * US, end * US, None, **more)

    add("mm", EventKind.CPU_OP, 0, handed_in)
    add("mm_backward", EventKind.CPU_OP, handed_in, handed_in + 10)
    add("update", EventKind.CPU_OP, 710, 900)
    for tensor in (0, 1):
        at = handed_in + 10 * tensor
        add(f"push{tensor}", EventKind.CPU_OP, at, at + 2, "cpu/2")
        add(SUBMIT, EventKind.ANNOTATION, at, at + 2, "cpu/2", tensor=tensor)
        add(WAIT, EventKind.ANNOTATION, at + 2, 710, tensor=tensor)
    for (tensor, number), stages in parts.items():
        for name, (start, end) in zip(byteps.ROWS.values(), stages, strict=True):
            add(name, EventKind.ANNOTATION, start, end, tensor=tensor, flow=number, nbytes=BYTES)
    made = builder.freeze([(0, 1000 * US)])
    made.tensors = [Tensor("p0", (20_000,), "float32", 80_000, 0), Tensor("p1", (10_000,), "float32", 40_000, 1)]
    needs = {"mm_backward": ["mm"], "push0": ["mm"], "push1": ["mm_backward"], "update": ["push0", "push1"]}
    made.meta.extra.update({"dataflow": needs, byteps.SETTINGS: {"hash_fn": "naive", "partition_bytes": 40_960}})
    return made


def test_a_framework_that_runs_a_graph() -> None:
    """Its ops have dependencies in place of a thread's order; what lies between a gradient and its use is the same."""
    graph = assemble([engine_trace(0, FIRST, 100), engine_trace(1, SECOND, 200)])
    assert replay(graph).makespan_ns == 1000 * US
    assert sorted(ends(graph, "pull", 0)) == [430, 530, 700]
    assert len(graph.out_op) == len(graph.in_op) == 4
    assert captured(graph) == ((0,), (1,))
    # what uses both gradients begins 3 us after the later one was copied in, whenever that is
    names = graph.name_table
    pulls = [op for op, name in enumerate(graph.column("name").tolist()) if names[name] == "pull"]
    graph.scale(np.array(pulls), 0.5)
    over = max(ends(graph, "pulled", 0) + ends(graph, "pulled", 1))
    assert over < 707
    assert replay(graph).makespan_ns == pytest.approx((over + 3 + 190 + 100) * US, abs=US)


def test_orderly_questions_wait_for_the_pushes_before_them() -> None:
    """Worker 0 asked for the first part at 230 with two pushes under way until 425: its pull began before."""
    graph = assemble(both())
    assert not graph.info[INFO].layout.orderly
    # pulls that all came after the last push: the rule holds
    parts = [trace(0, _later(FIRST), 100), trace(1, _later(SECOND), 200)]
    for one in parts:  # no optimizer; the step waits for the last pull
        one.columns["end"] = np.where(one.columns["name"] == one.names.index(WAIT), 990 * US, one.end)
        keep = one.columns["name"] != one.names.index("aten::add_")
        one.columns = {key: values[keep] for key, values in one.columns.items()}
    graph = assemble(parts)
    assert graph.info[INFO].layout.orderly
    assert replay(graph).makespan_ns == 1000 * US
    assert sorted(ends(graph, "pull", 1)) == [720, 820, 920]
    # each question went when the worker's last push was through
    assert (set(ends(graph, "ask", 0)), set(ends(graph, "ask", 1))) == ({425, 430}, {580, 585})


def _later(parts: dict[tuple[int, int], Stages]) -> dict[tuple[int, int], Stages]:
    overs = [720, 820, 920]
    return {
        key: (stages[0], stages[1], (stages[1][1] + 5, over), (over, over + 5))
        for over, (key, stages) in zip(overs, parts.items(), strict=True)
    }


def test_a_push_without_a_pull_is_left_out_and_said() -> None:
    first, second = both()
    keep = ~((second.columns["name"] == second.names.index(byteps.PULL)) & (second.tensor == 1))
    second.columns = {key: values[keep] for key, values in second.columns.items()}
    parts, lost = read_parts(second)
    assert ([part.key for part in parts], lost) == ([(0, 0), (0, 1)], 1)
    graph = assemble([first, second])
    assert any("rank 1: 1 push(es) without a pull" in line for line in graph.warnings)
    assert replay(graph).makespan_ns == 1000 * US


def test_rounds_are_told_apart() -> None:
    """Two steps of one worker, the second 2,000 µs later: every stage belongs to its own round."""
    one, again = trace(0, FIRST, 100), trace(0, FIRST, 100)
    again.shift(2000 * US)
    again.step_bounds = np.concatenate([one.step_bounds, again.step_bounds])
    whole = one.joined(again)
    whole.step_bounds = again.step_bounds
    whole.assign_steps()
    parts, lost = read_parts(whole)
    assert (len(parts), lost) == (6, 0)
    assert all(part.out[0] <= part.push[0] <= part.pull[0] <= part.back[0] < part.out[0] + 1000 * US for part in parts)
    graphs = assemble_steps([whole])
    assert [replay(graph).makespan_ns for graph in graphs] == [1000 * US] * 2


# -- the pace of a link --------------------------------------------------------------------------


def behind(*messages: tuple[int, int]) -> list[Message]:
    """(bytes, over, µs): all could have gone at 0."""
    frees = [-1, *(over for _, over in messages)]
    return [Message(free * US, over * US, 0, nbytes) for free, (nbytes, over) in zip(frees, messages, strict=False)]


def test_the_pace_is_that_of_messages_behind_others() -> None:
    """10 ns a byte. The first one was alone: what its acknowledgement took besides is nobody's."""
    found = link_pace(behind((1_000, 900), *((10_000, 900 + 100 * i) for i in range(1, 13))))
    assert found is not None
    assert found == pytest.approx((10.0, 0.0, 12, 1))


def test_acknowledgements_in_batches_say_as_much() -> None:
    """Four at a time are over at once."""
    found = link_pace(behind((1_000, 0), *((10_000, 400 * (i // 4 + 1)) for i in range(160))))
    assert found is not None
    assert found.ns_per_byte == pytest.approx(10.0, rel=0.01)


def test_one_that_waited_for_something_else_is_one_of_many() -> None:
    """The seventh's acknowledgement came behind an answer of 5 ms, and with it the eighth's."""
    ends = [100 * i for i in range(1, 21)]
    ends[6] = ends[7] = 700 + 5_000
    ends[8:] = [end + 5_000 for end in ends[8:]]
    found = link_pace(behind((1_000, 0), *((10_000, end) for end in ends)))
    assert found is not None
    assert found.ns_per_byte == pytest.approx(10.0)


def test_few_that_queued_tell_no_pace() -> None:
    assert link_pace([]) is None
    assert link_pace(behind((1_000, 0), *((10_000, 100 * i) for i in range(1, 7)))) is None
    # none queued: each could go when the one before had long been over
    alone = [Message(1_000 * i, 1_000 * i + 700, 1_000 * i + 500, 10) for i in range(20)]
    assert link_pace(alone) is None
    assert link_pace([Message(5, 10, 0, -1)] * 20) is None


# -- who is where --------------------------------------------------------------------------------


def links(**settings_: object) -> dict[tuple[int, int], tuple[str, str]]:
    told = both(**settings_)
    nodes = settings_.pop("nodes", None)
    if isinstance(nodes, list):
        for one, node in zip(told, nodes, strict=True):
            one.meta.extra[byteps.SETTINGS]["node"] = node
    return dict(layout_of(told, [0, 1], {(0, 0): BYTES, (0, 1): BYTES, (1, 0): BYTES}).links)


def test_hosts_that_nobody_names_have_links_of_their_own() -> None:
    assert links() == {
        (0, 0): ("link/worker0>server0", "link/server0>worker0"),
        (1, 0): ("link/worker1>server0", "link/server0>worker1"),
    }


def test_a_server_beside_a_worker_is_reached_over_loopback() -> None:
    assert links(nodes=["a", "b"], server_nodes=["a"]) == {
        (0, 0): ("link/worker0>server0", "link/server0>worker0"),
        (1, 0): ("link/b>a", "link/a>b"),
    }


def test_a_server_on_each_of_two_hosts_shares_the_link_with_the_worker() -> None:
    """Servers are numbered by address, the last one first: server 0 is on b."""
    found = links(nodes=["a", "b"], server_nodes=["a", "b"], servers=2)
    assert found[0, 0] == ("link/a>b", "link/b>a")
    assert found[1, 1] == ("link/b>a", "link/a>b")
    assert found[0, 1] == ("link/worker0>server1", "link/server1>worker0")


def test_a_server_on_a_host_of_its_own_is_the_narrow_place() -> None:
    """Two workers push what one server receives."""
    assert set(links(nodes=["a", "b"], server_nodes=["c"]).values()) == {("link/*>c", "link/c>*")}


# -- round trips ---------------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn) -> list[Graph]:
    """One to three steps of a job, some of it noise."""
    tensors = draw(st.lists(st.integers(1, 300_000), min_size=1, max_size=5))
    bound = draw(st.integers(50_000, 300_000))
    where = layout(draw(st.integers(1, 3)), draw(st.integers(1, 2)), orderly=draw(st.booleans()))
    line = st.builds(SyncModel, st.integers(0, 50).map(lambda us: us * 1e3), st.floats(0.01, 10))
    lags = {key: 1e3 * draw(st.integers(0, 60)) for key in ("out", "push", "acknowledge", "ask", "pull", "in")}
    costs = model(where, draw(line), copy=draw(line), add=draw(line), lags=lags)
    made = []
    for _ in range(draw(st.integers(1, 3))):
        bwd = draw(st.lists(st.integers(1, 900).map(lambda us: us * US), min_size=len(tensors), max_size=len(tensors)))
        more = {"fwd_ns": 50 * US, "bwd_ns": bwd, "skew_ns": US * draw(st.integers(0, 300)), "update_ns": 30 * US}
        made.append(ps_graph(tensors, bound, where, costs, **more))
    return made


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_what_was_replayed_and_captured_replays_again(graphs: list[Graph]) -> None:
    """Whatever the job: its own traces give back the length of each step, to the rounding of its times."""
    told = traces(graphs, rest_ns=MS)
    for graph, again in zip(graphs, assemble_steps(told), strict=True):
        assert isinstance(again.info[INFO], Ps)
        # a step's trace ends 1 ms after its work
        assert replay(again).makespan_ns == pytest.approx(replay(graph).makespan_ns + MS, abs=5 * US)
        assert len(again.buckets) == len(graph.buckets)
        assert len(again.out_op) == len(graph.out_op)


def test_no_push_is_added_up_after_the_sum_was_pulled() -> None:
    """The last acknowledgements of two workers came at one instant, long after their pushes: nothing followed them."""
    where, free = layout(3, 1, orderly=True), SyncModel(0.0, 1.0)
    costs = model(where, SyncModel(0.0, 2.0), copy=free, add=SyncModel(0.0, 2.0), lags={})
    times = {"fwd_ns": 50 * US, "bwd_ns": [US] * 5, "skew_ns": 8 * US, "update_ns": 30 * US}
    graph = ps_graph([1, 1, 1, 41_034, 123_028], 50_000, where, costs, **times)
    [again] = assemble_steps(traces([graph], rest_ns=MS))
    assert replay(again).makespan_ns == pytest.approx(replay(graph).makespan_ns + MS, abs=5 * US)


def test_a_server_that_was_traced_tells_when_it_had_a_push() -> None:
    """And when it began to answer: what acknowledging takes is no link's, what it took to answer is its own."""
    where = layout()
    lags = {"acknowledge": 500_000.0, "ask": 100_000.0, "pull": 0.0, "sum": 70_000.0}
    costs = model(where, SyncModel(10_000.0, 8.0), copy=SyncModel(0.0, 0.2), add=SyncModel(0.0, 0.2), lags=lags)
    sizes = [400_000, 80_000, 300_000]
    job = [ps_graph(sizes, 100_000, where, costs, bwd_ns=[MS] * 3, update_ns=US, skew_ns=4 * MS)] * 2
    told = with_wire(traces(job), job)
    graphs = assemble_steps(told)
    for graph, alone in zip(graphs, assemble_steps(told[:2]), strict=True):
        assert replay(graph).makespan_ns == replay(alone).makespan_ns == replay(job[0]).makespan_ns + MS
        for rank in (0, 1):
            for name in ("push", "pull"):
                assert ends(graph, name, rank) == pytest.approx(ends(job[0], name, rank), abs=1), (name, rank)
        # without the server, a push lasts until it is acknowledged
        assert min(ends(alone, "push", 0)) == min(ends(graph, "push", 0)) + 500
        assert graph.info[INFO].lags["acknowledge"]
        assert min(graph.info[INFO].lags["acknowledge"]) == 500_000
        assert "acknowledge" not in alone.info[INFO].lags
    # worker 0 had asked when the last push came: from there to its answer, adding and the lag
    assert min(ends(graphs[0], "summed", -1)) == pytest.approx(min(ends(job[0], "summed", -1)), abs=1)


def test_bytes_that_fit_no_partitions_say_nothing() -> None:
    where = layout()
    job = [ps_graph([400_000], 100_000, where, model(where, SyncModel(10_000.0, 8.0)), bwd_ns=[MS])]
    told = with_wire(traces(job), job)
    told[-1].columns["nbytes"] = told[-1].columns["nbytes"] // 2  # compressed, say
    graph, alone = assemble_steps(told)[0], assemble_steps(told[:2])[0]
    assert column(graph, "push", "duration") == column(alone, "push", "duration")


def test_what_a_job_of_known_costs_shows() -> None:
    """Isolated parts of one size, 400 ns of answering and nothing else that is not a link's."""
    where = layout(orderly=False)
    costs = model(where, SyncModel(0.0, 2.0), copy=FREE)
    told = traces([ps_graph([100_000, 100_000], 100_000, where, costs, bwd_ns=[MS, MS], update_ns=US)])
    ps = assemble(told).info[INFO]
    assert {(s.what, s.ns, s.queued) for s in ps.seen if s.what == "push"} == {("push", 200_000, False)}
    assert ps.bounds == {0: 100_000, 1: 100_000}
