"""The search for partitions: the best bound of a slow link, tensor by tensor, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpro.adapter import Knob
from dpro.cli import main
from dpro.cost.ps import MODEL
from dpro.cost.sync import SyncModel
from dpro.graph.assemble import assemble
from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO
from dpro.passes.tensor_partition import TensorPartition, captured, uniform
from dpro.plan import Plan
from dpro.planning import make_plans, pack_trace, replayed_ms
from dpro.replay.engine import replay
from dpro.search import tensor_partition
from dpro.search.critical_path import SearchResult, optimize
from dpro.search.tensor_partition import LEAST_BYTES
from dpro.session import Session
from dpro.settings import Settings
from dpro.trace.byteps import DEFAULT_PARTITION_BYTES, PAGE_BYTES, SETTINGS, cut, launch_bytes
from dpro.trace.store import RunFolder
from tests.graph.ps_jobs import layout, model, ps_graph, traces
from tests.passes.test_tensor_partition import state
from tests.search.graphs import ddp_graph

MS = 1_000_000
EACH, ONE, START = Knob.PARTITIONS, Knob.PARTITION_BOUND, Knob.PARTITION_BYTES
#: 200 Mbit/s and 1 ms for a message
SLOW = SyncModel(latency_ns=1 * MS, ns_per_byte=40.0)
SIZE = 40_000_000


def search(graph: Graph, *knobs: Knob, **more: Any) -> SearchResult:
    return tensor_partition.search(graph, knobs={*knobs} or {EACH}, **more)


def slow_graph(sizes: tuple[int, ...] = (SIZE,), *, orderly: bool = False, **more: object) -> Graph:
    where = layout(orderly=orderly)
    return ps_graph(sizes, DEFAULT_PARTITION_BYTES, where, model(where, SLOW), **more)  # type: ignore[arg-type]


def test_the_best_bound_of_a_slow_link_lies_inside_the_sweep() -> None:
    """(k + 1) (a + b·s/k) is least at k = sqrt(b·s/a) = 40 parts of 1 MB."""
    graph = slow_graph()
    found = search(graph)
    best = 41 * (MS + 40 * SIZE / 40) / MS
    captured_ms = 11 * MS + sum(40 * n for n in cut(SIZE, DEFAULT_PARTITION_BYTES)) + 40 * DEFAULT_PARTITION_BYTES
    # the last part is smaller than the others, and its pull waits for the one before it
    assert found.baseline_ms == pytest.approx(captured_ms / MS, rel=1e-2)
    (name, bound) = next(iter(found.candidates[0].plan.partitions.items()))
    assert name == "p0"
    assert LEAST_BYTES < bound < SIZE
    assert found.candidates[0].predicted_ms == pytest.approx(best, rel=0.01)
    # the whole range, by replay: nothing is better by more than 1 %
    edit = TensorPartition()
    for k in range(1, 120, 3):
        mark = edit.apply(graph, uniform(graph, -(-SIZE // k)))
        assert replay(graph).makespan_ns / MS >= found.candidates[0].predicted_ms * 0.99
        graph.undo(mark)


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize(
    ("sizes", "bwd_ms"), [((SIZE, 4_000_000), (1, 1000)), ((4_000_000, SIZE), (1, 100)), ((SIZE, SIZE), (1, 1200))]
)
def test_two_tensors_against_every_pair_of_cuts(orderly: bool, sizes: tuple[int, int], bwd_ms: tuple[int, int]) -> None:
    graph = slow_graph(sizes, orderly=orderly, bwd_ns=[n * MS for n in bwd_ms])
    counts = (1, 2, 4, 6, 10, 16, 24, 40, 64)
    edit, least = TensorPartition(), 2**62
    for a in counts:
        for b in counts:
            mark = edit.apply(graph, ((0, -(-sizes[0] // a)), (1, -(-sizes[1] // b))))
            least = min(least, replay(graph).makespan_ns)
            graph.undo(mark)
    found = search(graph)
    best_ms = min([found.baseline_ms, *(c.predicted_ms for c in found.candidates)])
    # what is level with the best but simpler comes first: 0.3 %
    assert best_ms <= least / MS * 1.004


def test_nothing_is_found_where_nothing_is_to_be_gained() -> None:
    """In order, questions wait for all that was handed to the link: a single tensor is best whole."""
    where = layout()
    graph = ps_graph([SIZE], SIZE, where, model(where, SLOW))
    found = search(graph)
    assert found.candidates == []
    assert found.baseline_ms == 2 * (1 + 40 * SIZE / MS)
    # cut at BytePS's own bound it takes 9 ms more each way, and the whole is what is proposed
    default = search(slow_graph(orderly=True))
    assert default.candidates[0].predicted_ms == found.baseline_ms
    assert default.baseline_ms == found.baseline_ms + 2 * 9


def test_the_graph_is_as_it_was_and_the_same_answer_comes_again() -> None:
    graph = slow_graph((SIZE, 3_000_000, 100))
    before, known = state(graph), graph.info[MODEL]
    first = search(graph)
    assert state(graph) == before
    assert graph.info[MODEL] is known
    again = search(graph)
    assert first.candidates == again.candidates
    assert first.evaluations == again.evaluations
    assert first.stopped == "no improvement left"
    assert captured(graph)


def test_a_plan_is_what_a_job_can_be_set_to() -> None:
    graph = slow_graph((SIZE, 3_000_000, 100))
    found = search(graph, fingerprint={"model": "x"})
    edit = TensorPartition()
    number = {tensor.name: t for t, tensor in enumerate(graph.tensors)}
    for candidate in found.candidates:
        plan = candidate.plan
        assert plan.fingerprint == {"model": "x"}
        assert plan.partitions and plan.tensor_groups is None and plan.bucket_caps is None
        assert all(n % PAGE_BYTES == 0 for n in plan.partitions.values())
        cuts = tuple((number[name], n) for name, n in plan.partitions.items())
        assert edit.legal(graph, cuts)
        mark = edit.apply(graph, cuts)
        # other ops' numbers, so other ties: as good as predicted
        assert replay(graph).makespan_ns / MS == pytest.approx(candidate.predicted_ms, rel=1e-3)
        graph.undo(mark)
        assert plan.baseline_ms == found.baseline_ms > candidate.predicted_ms == plan.predicted_ms
    single = next(c for c in found.candidates if c.name.startswith("partitions of"))
    assert set(single.plan.partitions) == {"p0", "p1", "p2"}
    assert launch_bytes(single.plan.partitions) == single.plan.partitions["p0"]
    assert len({c.name for c in found.candidates}) == len(found.candidates) <= 3


def test_out_of_time_there_is_still_a_baseline() -> None:
    found = search(slow_graph(), time_budget_s=0)
    assert (found.candidates, found.stopped, found.evaluations) == ([], "time budget", 1)
    assert found.baseline_ms > 0


def test_knobs_and_jobs_decide_what_is_searched() -> None:
    graph = slow_graph((SIZE, 3_000_000))
    assert optimize(graph, knobs={EACH}).candidates == search(graph).candidates
    single = search(graph, ONE)
    assert all(len(set((c.plan.partitions or {}).values())) == 1 for c in single.candidates)
    assert all(set(c.plan.partitions or {}) == {"p0", "p1"} for c in single.candidates)
    assert len(single.candidates) > 1 and single.at_start == []
    started = optimize(graph, knobs={START})
    assert (started.candidates, started.at_start) == ([], single.candidates[:1])
    assert optimize(graph, knobs={START, ONE}).at_start == []
    assert optimize(graph, knobs={Knob.GROUPS, Knob.BUCKET_LIST}).stopped == "no knob that this search can turn"
    ddp = ddp_graph([100], 10, [10])
    assert optimize(ddp, knobs={EACH}).stopped == "no knob that this search can turn"
    assert search(ddp).stopped == "no gradients are pushed to a server"
    del graph.info[MODEL]  # a graph by hand has seen nothing
    assert "unknown" in search(graph).stopped
    assert MODEL not in graph.info


def test_what_was_captured_is_enough() -> None:
    """From traces alone: the costs are fitted, the best bound is that of the known costs."""
    where = layout(orderly=False)
    sizes = [SIZE, 400_000, 4_000_000, 1_000_000]
    lags = {"acknowledge": 300_000.0, "ask": 100_000.0}
    job = ps_graph(sizes, DEFAULT_PARTITION_BYTES, where, model(where, SLOW, lags=lags), bwd_ns=[MS] * 4, update_ns=MS)
    told = traces([job, job])
    for trace in told:
        trace.meta.extra["byteps"]["partition_bytes"] = DEFAULT_PARTITION_BYTES
    graph = assemble(told)
    assert graph.info[INFO].bounds == {0: DEFAULT_PARTITION_BYTES, 1: 400_000, 2: 4_000_000, 3: 1_000_000}
    found, known = search(graph), search(job)
    assert found.baseline_ms == pytest.approx(known.baseline_ms + 1, rel=0.02)  # a step's trace ends 1 ms after it
    assert found.candidates[0].predicted_ms == pytest.approx(known.candidates[0].predicted_ms, rel=0.02)


def test_parts_that_are_too_many_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpro.search.tensor_partition._MOST_PARTS", 25)
    found = search(slow_graph())
    parts = [len(cut(SIZE, n)) for c in found.candidates for n in (c.plan.partitions or {}).values()]
    assert parts and 20 <= max(parts) <= 25  # the best would be 40


def test_the_tuner_gets_plans(tmp_path: Path) -> None:
    """From packed traces to judged plans, of both beliefs; predictions are of the un-profiled step."""
    where = layout(orderly=False)
    sizes = [SIZE, 400_000, 4_000_000, 1_000_000]
    job = ps_graph(sizes, DEFAULT_PARTITION_BYTES, where, model(where, SLOW), bwd_ns=[MS] * 4, update_ns=MS)
    told = traces([job] * 3)
    for trace in told:
        step_ns = int(trace.step_ns()[0])
        trace.meta.unprofiled_step_ns = [step_ns] * 5
        trace.meta.extra["profiled_step_ns"] = [step_ns] * 3
    settings = Settings(mode="suggest", runs_dir=str(tmp_path))
    blobs, session = [pack_trace(trace) for trace in told], Session(settings, 0)
    planned = make_plans(blobs, {Knob.PARTITIONS}, {"model": "x"}, settings, session)
    assert planned.replayed_ms == pytest.approx(step_ns / MS)
    assert 0 < len(planned.plans) <= settings.trials
    for name, plan in planned.plans:
        assert plan.partitions and plan.fingerprint == {"model": "x"}, name
        assert plan.predicted_ms is not None and plan.baseline_ms == pytest.approx(step_ns / MS)
        assert plan.predicted_ms < plan.baseline_ms
    # the second belief was asked last
    assert planned.graph is not None and planned.graph.info[MODEL].link("link/worker0>server0").latency_ns == 0


def test_the_command_line_optimizes_a_captured_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = layout(orderly=False)
    job = ps_graph([SIZE, 1_000_000], DEFAULT_PARTITION_BYTES, where, model(where, SLOW), bwd_ns=[MS] * 2, update_ns=MS)
    folder = RunFolder(tmp_path / "run")
    for trace in traces([job, job]):
        folder.save_trace(trace.meta.rank, trace)
    with pytest.raises(SystemExit) as ended:
        main(["optimize", str(folder.path), "-o", str(tmp_path / "plan.json"), "--json"])
    assert ended.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"]["partitions"] == Plan.load(tmp_path / "plan.json").partitions
    assert answer["predicted_ms"] < answer["baseline_ms"]
    with pytest.raises(SystemExit):
        main(["replay", str(folder.path), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["error_pct"] == pytest.approx(0, abs=1e-6)
    assert {link["link"] for link in answer["links"]} >= {"worker0 → server0", "server0 → worker1"}


def test_what_was_recorded_under_another_bound_is_compared_with_the_jobs_own() -> None:
    """Recorded in one part, the job's own is 4,096,000 bytes: that is the baseline, to the ns."""
    where = layout(orderly=False)
    recorded = ps_graph((SIZE,), SIZE, where, model(where, SLOW))
    jobs = slow_graph()
    recorded.info[INFO].job_bytes = DEFAULT_PARTITION_BYTES
    assert search(recorded).baseline_ms == search(jobs).baseline_ms
    assert search(recorded).candidates == search(jobs).candidates
    assert captured(recorded) == ((0, SIZE),)
    recorded.info[INFO].job_bytes = 2 * SIZE  # makes the same parts
    assert search(recorded).baseline_ms == replay(recorded).makespan_ns / 1e6


def test_the_replay_of_the_jobs_own_settings_where_others_were_recorded() -> None:
    """Recorded in parts four times as large: 1 % of a message's time is believed to be no bytes of it."""
    where = layout(orderly=False)
    small, large = (
        ps_graph((SIZE, SIZE), bound, where, model(where, SLOW), bwd_ns=[MS, MS], update_ns=MS)
        for bound in (SIZE // 20, SIZE // 5)
    )
    told = traces([large] * 3)
    for trace in told:
        trace.meta.extra[SETTINGS] |= {"partition_bytes": SIZE // 5, "job_bytes": SIZE // 20}
    graph = assemble(told)
    played = replay(graph)

    assert replayed_ms(graph, told, played) == pytest.approx(replay(small).makespan_ns / 1e6, rel=0.15)
    assert replay(graph).makespan_ns == played.makespan_ns
