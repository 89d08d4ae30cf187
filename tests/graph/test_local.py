"""One rank's graph on hand-written traces: every makespan is worked out in the comments."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dpro.graph.assemble import assemble
from dpro.graph.graph import Graph, OpKind
from dpro.graph.local import build_local
from dpro.graph.spans import measure
from dpro.replay.engine import replay
from dpro.trace.kineto import read
from dpro.trace.model import RankTrace
from tests.trace import synthetic as syn

US = 1_000


def trace_of(tmp_path: Path, events: list[syn.Event], **header: object) -> RankTrace:
    return read(syn.write(tmp_path / "rank0.json", events, distributedInfo={"rank": 0, "world_size": 1}, **header))


def ops(graph: Graph, name: str) -> list[int]:
    return [op for op in np.flatnonzero(graph.column("alive")).tolist() if graph.name_of(op) == name]


def makespan_us(graph: Graph) -> float:
    return replay(graph).makespan_ns / US


def faster(graph: Graph, name: str, factor: float) -> float:
    """Makespan in µs with all ops of that name scaled."""
    mark = graph.mark()
    graph.scale(np.asarray(ops(graph, name)), factor)
    out = makespan_us(graph)
    graph.undo(mark)
    return out


def times_us(graph: Graph, name: str) -> list[tuple[float, float]]:
    played, ids = replay(graph), graph.arrays().ids.tolist()
    rows = [ids.index(op) for op in ops(graph, name)]
    return [(played.start[row] / US, played.end[row] / US) for row in rows]


def test_launches_streams_and_a_synchronise(tmp_path: Path) -> None:
    graph = assemble([trace_of(tmp_path, syn.gpu_step())])
    assert makespan_us(graph) == 1000
    assert times_us(graph, "k1") == [(70, 270)]
    assert times_us(graph, "k2") == [(270, 470)]
    assert times_us(graph, "cudaDeviceSynchronize") == [(470, 480)]  # its own cost is 10, the rest was waiting
    # k1 halved: 70-170; k2 was ready at 120 and follows at once: 170-370; the call returns 10 later, at 380
    # instead of 480; everything after comes 100 earlier.
    assert faster(graph, "k1", 0.5) == 900
    # Without k1 and with k2 of 20: k2 is launched when aten::b has run 20, at 120, ends 140; the call, made
    # at 200 as before, waits for nobody and returns at 210: 270 earlier.
    mark = graph.mark()
    graph.scale(np.asarray(ops(graph, "k1")), 0.0)
    graph.scale(np.asarray(ops(graph, "k2")), 0.1)
    assert makespan_us(graph) == 730
    graph.undo(mark)
    # Kernels ten times slower: k1 70-2070, k2 2070-4070, the call returns at 4080, 3600 later than before.
    assert faster(graph, "k1", 10) == 1000 + 1800


def test_a_stream_synchronise_waits_for_its_stream_only(tmp_path: Path) -> None:
    facts = {"cuda_sync_kind": "Stream Sync", "correlation": 3}
    events = [
        syn.mark("ProfilerStep#0", 0, 1000),
        syn.op("aten::a", 0, 100),
        *syn.launched("short", 20, 40, 240, 1, stream=7),
        *syn.launched("long", 50, 70, 900, 2, stream=8),
        syn.call("cudaStreamSynchronize", 150, 250, 3),
        syn.event("cuda_sync", "Stream Sync", 7, 151, 249, **facts, stream=7),
    ]
    graph = assemble([trace_of(tmp_path, events)])
    assert times_us(graph, "cudaStreamSynchronize") == [(240, 250)]
    # 'long' twice as long ends at 70 + 1660 = 1730, but nobody on the host waits for it
    assert faster(graph, "long", 2) == 1730
    # 'short' twice as long ends at 440: the host goes on 200 later
    assert faster(graph, "short", 2) == 1200


def test_a_blocking_copy_holds_the_host(tmp_path: Path) -> None:
    events = [
        syn.mark("ProfilerStep#0", 0, 500),
        syn.op("aten::a", 0, 60),
        *syn.launched("k", 20, 40, 240, 1),
        syn.op("aten::item", 100, 300),
        syn.call("cudaMemcpyAsync", 110, 260, 2),
        syn.event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 7, 240, 250, correlation=2, stream=7, device=0),
    ]
    graph = assemble([trace_of(tmp_path, events)])
    assert makespan_us(graph) == 500
    # k 100 shorter: the copy runs 140-150, the call is back 10 later, at 160 instead of 260
    assert faster(graph, "k", 0.5) == 400


def test_event_record_and_stream_wait(tmp_path: Path) -> None:
    facts = {"cuda_sync_kind": "Stream Wait Event", "stream": 8, "wait_on_stream": 7, "correlation": 4}
    events = [
        syn.mark("ProfilerStep#0", 0, 700),
        syn.op("aten::a", 0, 100),
        *syn.launched("producer", 10, 30, 330, 1, stream=7),
        syn.call("cudaEventRecord", 40, 42, 3),
        *syn.launched("unrelated", 44, 330, 600, 2, stream=7),
        syn.call("cudaStreamWaitEvent", 60, 62, 4),
        syn.event("cuda_sync", "Stream Wait Event", 8, 61, 62, **facts, wait_on_cuda_event_record_corr_id=3),
        *syn.launched("consumer", 70, 335, 435, 5, stream=8),
    ]
    graph = assemble([trace_of(tmp_path, events)])
    [producer], [consumer], [unrelated] = (ops(graph, n) for n in ("producer", "consumer", "unrelated"))
    edges = {tuple(edge) for edge in graph.edges().tolist()}
    assert (producer, consumer) in edges
    assert (unrelated, consumer) not in edges  # launched after the event was recorded
    # producer twice as long: 30-630, consumer 5 later as measured: 635-735, unrelated 630-900
    assert faster(graph, "producer", 2) == 900
    assert faster(graph, "unrelated", 0.1) == 700


def test_a_stream_wait_of_an_old_trace_is_inferred(tmp_path: Path) -> None:
    events = [
        syn.mark("ProfilerStep#0", 0, 700),
        syn.op("aten::a", 0, 100),
        *syn.launched("producer", 10, 30, 330, 1, stream=7),
        syn.call("cudaStreamWaitEvent", 60, 62, 4),
        *syn.launched("consumer", 70, 335, 435, 5, stream=8),
    ]
    graph = assemble([trace_of(tmp_path, events)])
    # producer 200 shorter ends at 130; the consumer starts 5 later
    mark = graph.mark()
    graph.set(ops(graph, "producer")[0], "duration", 100 * US)
    assert times_us(graph, "consumer") == [(135, 235)]
    graph.undo(mark)
    assert times_us(graph, "consumer") == [(335, 435)]


def test_backward_thread_takes_over_and_hands_back(tmp_path: Path) -> None:
    evaluate = "autograd::engine::evaluate_function: "
    events = [
        syn.mark("ProfilerStep#0", 0, 500),
        syn.op("aten::linear", 0, 100),
        syn.op(evaluate + "AddmmBackward0", 120, 250, tid=syn.AUTOGRAD),
        syn.op(evaluate + "ReluBackward0", 260, 390, tid=syn.AUTOGRAD),
        syn.mark("Optimizer.step#SGD.step", 400, 480),
        syn.op("aten::add_", 410, 470),
    ]
    graph = assemble([trace_of(tmp_path, events)])
    assert makespan_us(graph) == 500
    kinds = {graph.name_of(op): OpKind(graph.column("kind")[op]) for op in range(len(graph))}
    assert kinds["aten::linear"] == OpKind.FORWARD
    assert kinds[evaluate + "AddmmBackward0"] == kinds[evaluate + "ReluBackward0"] == OpKind.BACKWARD
    assert kinds["aten::add_"] == OpKind.UPDATE
    # forward, backward and update are one chain: each 100 saved is 100 saved
    assert faster(graph, "aten::linear", 0) == 400
    assert faster(graph, evaluate + "AddmmBackward0", 0) == 370
    assert faster(graph, "aten::add_", 0) == 440


def test_a_worker_beside_a_busy_host_is_not_waited_for(tmp_path: Path) -> None:
    events = [
        syn.mark("ProfilerStep#0", 0, 500),
        syn.op("aten::linear", 0, 480),
        syn.op("aten::stack", 100, 300, tid=syn.AUTOGRAD),
    ]
    graph = assemble([trace_of(tmp_path, events)])
    assert faster(graph, "aten::stack", 1.5) == 500


def test_kernels_without_a_launch_keep_stream_order(tmp_path: Path) -> None:
    events = [
        syn.mark("ProfilerStep#0", 0, 500),
        syn.op("aten::a", 0, 50),
        *syn.launched("k1", 10, 30, 130, 1),
        syn.kernel("graph kernel", 130, 230, 77),
        *syn.launched("k2", 35, 230, 600, 2),
    ]
    graph = assemble([trace_of(tmp_path, events)])
    assert makespan_us(graph) == 600  # work that was launched in the step belongs to it
    assert faster(graph, "graph kernel", 2) == 700


@pytest.mark.parametrize("only", ["cpu", "gpu"])
def test_traces_of_one_side_only(tmp_path: Path, only: str) -> None:
    device = [syn.kernel("k1", 10, 110, 1), syn.kernel("k2", 120, 220, 2)]
    host = [syn.op("aten::a", 10, 110), syn.op("aten::b", 120, 220)]
    graph = assemble([trace_of(tmp_path, host if only == "cpu" else device)])
    assert makespan_us(graph) == 210


def test_a_full_launch_queue_is_waiting_not_work(tmp_path: Path) -> None:
    # 1,200 launches of 2 µs against kernels of 10: from the 1,001st outstanding on, a call returns only when
    # a kernel ends. Kernel i runs 5+10i to 15+10i.
    events = [syn.mark("ProfilerStep#0", 0, 13_000), syn.op("aten::loop", 0, 12_900)]
    at = 0.0
    for i in range(1200):
        room = 15 + 10 * (i - 1000)  # when kernel i-1000 has ended
        end = max(at + 2, room + 2)
        events += [syn.call("cudaLaunchKernel", at, end, i + 1), syn.kernel("k", 5 + 10 * i, 15 + 10 * i, i + 1)]
        at = end
    graph = assemble([trace_of(tmp_path, events)])
    assert makespan_us(graph) == pytest.approx(13_000, abs=20)
    # with kernels ten times faster the queue never fills: 1,200 calls of 2 µs, then the rest of the loop
    rest = 12_900 - at
    launch_bound = 1200 * 2 + rest + 100
    assert faster(graph, "k", 0.1) == pytest.approx(launch_bound, rel=0.02)


def test_self_time_is_never_negative_when_events_overlap_by_rounding(tmp_path: Path) -> None:
    events = [
        syn.mark("ProfilerStep#0", 0, 100),
        syn.op("aten::outer", 0, 50),
        syn.op("aten::inner", 10, 50.9),  # ends 0.9 µs after its parent
        syn.op("aten::next", 50, 80),
    ]
    trace = trace_of(tmp_path, events)
    local = build_local(trace, *trace.step_bounds[0].tolist(), rank=0, own_names=set())
    chain = local.chains[local.main]
    assert all(op.duration >= 0 for op in chain)
    assert all(a.end <= b.start for a, b in pairwise(chain))
    assert sum(op.duration for op in chain) == 80 * US


def test_profiling_overhead_is_taken_out_per_event(tmp_path: Path) -> None:
    events = [
        syn.mark("ProfilerStep#0", 0, 300),
        syn.op("aten::linear", 0, 100),
        *[syn.op("aten::t", 10 + n, 11 + n) for n in range(3)],
        syn.op("aten::tiny", 200, 201),
    ]
    trace = trace_of(tmp_path, events)
    trace.meta.event_overhead_ns = 2_500
    graph = assemble([trace])
    [linear], [tiny] = ops(graph, "aten::linear"), ops(graph, "aten::tiny")
    assert graph.column("duration")[linear] == 100 * US - 4 * 2_500
    assert graph.column("duration")[tiny] == 0  # never below


def test_costly_ops_inside_others_keep_their_names(tmp_path: Path) -> None:
    events = [
        syn.mark("ProfilerStep#0", 0, 500),
        syn.op("aten::linear", 0, 400),
        syn.op("aten::t", 10, 15),
        syn.op("aten::addmm", 20, 380),
        syn.op("aten::expand", 30, 31),
    ]
    graph = assemble([trace_of(tmp_path, events)])
    assert [graph.column("duration")[op] / US for op in ops(graph, "aten::addmm")] == [360]
    assert [graph.column("duration")[op] / US for op in ops(graph, "aten::linear")] == [20, 20]
    assert not ops(graph, "aten::expand")


def test_ops_are_called_by_the_layer_that_was_noted_for_them(tmp_path: Path) -> None:
    node = "autograd::engine::evaluate_function: "
    events = [
        syn.mark("ProfilerStep#0", 0, 900),
        syn.op("aten::linear", 0, 200),
        syn.op("aten::addmm", 20, 180),
        syn.op("aten::mean", 210, 300),
        syn.op(node + "AddmmBackward0", 310, 500, **{"Sequence number": 7}),
        syn.op("aten::mm", 320, 480),
        syn.op(node + "torch::autograd::AccumulateGrad", 510, 600),
    ]
    trace = trace_of(tmp_path, events)
    assert trace.flow[trace.kind == 0].tolist() == [-1, -1, -1, 7, -1, -1]
    plain = assemble([trace])
    for name in ("aten::linear", node + "AddmmBackward0"):
        row = trace.names.index(name)
        trace.columns["link"][trace.name == row] = 1
    trace.meta.extra["layers"] = ["a", "b.0"]
    graph = assemble([trace])
    forward, backward = {"aten::linear", "aten::addmm"}, {node + "AddmmBackward0", "aten::mm"}
    renamed = {name: f"model/b.0/{name}" for name in forward} | {n: f"gradient_tape/model/b.0/{n}" for n in backward}
    assert [graph.name_of(op) for op in range(len(graph.column("name")))] == [
        renamed.get(plain.name_of(op), plain.name_of(op)) for op in range(len(plain.column("name")))
    ]
    for key in ("kind", "duration", "gap", "resource"):
        assert graph.column(key).tolist() == plain.column(key).tolist()
    for told in (["a"], "b.0", None, [1, 2]):  # of a stored trace, which may hold anything
        trace.meta.extra["layers"] = told
        names = [plain.name_of(op) for op in range(len(plain.column("name")))]
        again = assemble([trace])
        assert [again.name_of(op) for op in range(len(again.column("name")))] == names


def test_a_device_that_runs_behind_counts_once(tmp_path: Path) -> None:
    # Four steps; the host needs 50 µs, the device 100. Step k's kernel runs 100k+20 to 100k+120.
    events: list[syn.Event] = []
    for k in range(4):
        events += [
            syn.mark(f"ProfilerStep#{k}", 50 * k, 50 * k + 50),
            syn.op("aten::a", 50 * k, 50 * k + 40),
            *syn.launched("k", 50 * k + 10, 100 * k + 20, 100 * k + 120, k + 1),
        ]
    trace = trace_of(tmp_path, events)
    # from 0 to 420, four steps
    assert measure([trace]).mean_ns == 105 * US
    # one step alone finds the device idle: launch at 10, 10 later at work, 100 long
    graph = assemble([trace], step=2)
    assert makespan_us(graph) == 10 + 100 + 0
    assert graph.info["measured_ns"] == 100 * US  # from one finish to the next
