"""The Kineto reader on hand-written files: vintages, identity, bad times, steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpro.trace.kineto import read, to_ns
from dpro.trace.model import EventKind, RankTrace
from dpro.trace.steps import step_finish_ns, used_steps
from tests.trace import synthetic as syn

EPOCH_NS = syn.EPOCH_US * 1000


def names(trace: RankTrace, kind: EventKind) -> list[str]:
    return [trace.names[i] for i in trace.name[trace.kind == kind]]


@pytest.mark.parametrize(
    ("written", "ns"),
    [
        (12, 12_000),
        ("1712195495507809.0", 1_712_195_495_507_809_000),
        ("1712195495507809.123", 1_712_195_495_507_809_123),  # a float would round to 250 ns here
        ("4458676423294.5", 4_458_676_423_294_500),
        ("0.0019", 2),
        ("-1.5", -1_500),
        ("-0.5", -500),
        ("1.5e3", 1_500_000),
        ("nonsense", None),
        (None, None),
        (True, None),
    ],
)
def test_microseconds_become_exact_nanoseconds(written: object, ns: int | None) -> None:
    assert to_ns(written) == ns


@pytest.mark.parametrize("style", ["integer", "float", "base", "ns"])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_every_vintage_gives_the_same_events(tmp_path: Path, style: str, suffix: str) -> None:
    trace = read(
        syn.write(tmp_path / f"t{suffix}", syn.gpu_step(), style, distributedInfo={"rank": 3, "world_size": 8})
    )
    assert (trace.meta.rank, trace.meta.world_size) == (3, 8)
    assert trace.step_bounds.tolist() == [[EPOCH_NS, EPOCH_NS + 1_000_000]]
    kernels = trace.kind == EventKind.KERNEL
    assert (trace.start[kernels] - EPOCH_NS).tolist() == [70_000, 270_000]
    assert (trace.end[kernels] - EPOCH_NS).tolist() == [270_000, 470_000]
    assert trace.flow[kernels].tolist() == [1, 2]
    assert [trace.resources[r] for r in trace.resource[kernels]] == ["stream/7", "stream/7"]
    assert names(trace, EventKind.SYNC) == ["cudaDeviceSynchronize"]
    assert not trace.warnings


def test_nanoseconds_survive_next_to_an_epoch(tmp_path: Path) -> None:
    events = [syn.op("aten::a", 0.001, 0.004), syn.op("aten::b", 7.129, 9.25)]
    trace = read(syn.write(tmp_path / "rank0.json", events))
    assert (trace.start - EPOCH_NS).tolist() == [1, 7_129]
    assert (trace.end - trace.start).tolist() == [3, 2_121]


def test_rank_from_the_file_name_with_a_warning(tmp_path: Path) -> None:
    trace = read(syn.write(tmp_path / "worker12_step_3.json", syn.gpu_step()))
    assert trace.meta.rank == 12
    assert any("taken from its name" in line for line in trace.warnings)
    assert read(syn.write(tmp_path / "trace.json", syn.gpu_step())).meta.rank == -1


def test_impossible_times_are_counted_and_harmless(tmp_path: Path) -> None:
    bad = [
        {**syn.kernel("k at 0", 0, 0, 90), "ts": -syn.EPOCH_US},  # written as ts 0, dur 0
        {**syn.op("aten::unfinished", 610, 611), "dur": -1},
        {**syn.op("aten::int_min", 620, 621), "dur": -9223372036854775808},
        {**syn.op("aten::forever", 630, 631), "dur": 9223372036854775},
        syn.op("aten::empty_handed", 640, 640),
    ]
    clean = read(syn.write(tmp_path / "clean.json", syn.gpu_step(), "integer"))
    trace = read(syn.write(tmp_path / "bad.json", syn.gpu_step() + bad, "integer"))
    assert trace.step_ns().tolist() == clean.step_ns().tolist() == [1_000_000]
    assert "1 event(s) at time 0 or before dropped" in trace.warnings
    assert "3 unfinished event(s) (negative or absurd duration) taken as 0 long" in trace.warnings
    assert (trace.end >= trace.start).all()
    assert trace.end.max() == clean.end.max()
    assert len(trace) == len(clean) + 4


def test_collective_metadata_of_a_nccl_kernel(tmp_path: Path) -> None:
    facts = {
        "Collective name": "allreduce",
        "In msg nelems": 250,
        "dtype": "BFloat16",
        "Group size": 4,
        "Process Group Ranks": "[0, 1, 2, 3]",
        "Seq": 17,
    }
    events = [*syn.gpu_step(), *syn.launched("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 510, 520, 590, 9, **facts)]
    trace = read(syn.write(tmp_path / "rank0.json", events))
    [(row, found)] = trace.collectives.items()
    assert trace.kind[row] == EventKind.COLLECTIVE
    assert trace.nbytes[row] == 500  # 250 elements of 2 bytes
    assert (found.name, found.group, found.sequence, found.group_size) == ("all_reduce", "[0, 1, 2, 3]", 17, 4)


def test_bytes_of_an_old_nccl_kernel_from_the_range_around_its_launch(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[3, 5]], "Input type": ["float"]}
    events = [
        syn.mark("nccl:all_to_all", 505, 530, **shapes),
        *syn.launched("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(c)", 510, 520, 590, 9),
    ]
    trace = read(syn.write(tmp_path / "rank0.json", [*syn.gpu_step(), *events]))
    [(row, found)] = trace.collectives.items()
    assert trace.nbytes[row] == 60
    assert found.name == "send_recv"


def test_gloo_ranges_are_collectives_on_workers_only(tmp_path: Path) -> None:
    events = [*syn.ddp_cpu_step(0), syn.mark("gloo:barrier", 940, 945)]
    trace = read(syn.write(tmp_path / "rank0.json", events))
    assert sorted(c.name for c in trace.collectives.values()) == ["all_reduce", "all_reduce"]
    assert "gloo:barrier" in names(trace, EventKind.ANNOTATION)


def test_stream_wait_learns_its_streams_and_event(tmp_path: Path) -> None:
    facts = {"cuda_sync_kind": "Stream Wait Event", "stream": 8, "wait_on_stream": 7, "correlation": 5}
    events = [
        *syn.gpu_step(),
        *syn.launched("k3", 620, 640, 700, 6, stream=8),
        syn.call("cudaEventRecord", 601, 603, 4),
        syn.call("cudaStreamWaitEvent", 605, 607, 5),
        syn.event("cuda_sync", "Stream Wait Event", 8, 606, 607, **facts, wait_on_cuda_event_record_corr_id=4),
    ]
    trace = read(syn.write(tmp_path / "rank0.json", events))
    [row] = np.flatnonzero(trace.kind == EventKind.STREAM_WAIT).tolist()
    assert trace.resources[trace.peer[row]] == "stream/8"
    assert trace.resources[trace.link[row]] == "stream/7"
    assert trace.flow[row] == 4


# -- steps ---------------------------------------------------------------------------------------


def test_steps_from_optimizer_ranges_nested_ones_once(tmp_path: Path) -> None:
    events = []
    for k in range(3):
        events += [
            syn.op("aten::mm", 100 * k, 100 * k + 50),
            syn.mark("Optimizer.step#SGD.step", 100 * k + 60, 100 * k + 90),
            syn.mark("Optimizer.step#SGD.step", 100 * k + 61, 100 * k + 89),
        ]
    trace = read(syn.write(tmp_path / "rank0.json", events))
    assert ((trace.step_bounds - EPOCH_NS) // 1000).tolist() == [[0, 90], [90, 190], [190, 290]]
    assert any("3 steps told by the ends of Optimizer.step" in line for line in trace.warnings)


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    events = []
    for k in range(2):
        events += [
            syn.op("aten::mm", 100 * k, 100 * k + 30),
            syn.mark("Optimizer.step#Adam.step", 100 * k + 40, 100 * k + 50),
            syn.mark("Optimizer.step#SGD.step", 100 * k + 60, 100 * k + 90),
        ]
    trace = read(syn.write(tmp_path / "rank0.json", events))
    assert ((trace.step_bounds - EPOCH_NS) // 1000).tolist() == [[0, 90], [90, 190]]


def test_steps_from_repeating_collectives(tmp_path: Path) -> None:
    events = [syn.op("aten::mm", 0, 5)]
    for k in range(3):
        for name, at in (("AllReduce", 10), ("AllGather", 40)):
            start = 100 * k + at
            events += syn.launched(f"ncclKernel_{name}_RING_LL(x)", start - 10, start, start + 20, 10 * k + at)
    trace = read(syn.write(tmp_path / "rank0.json", events))
    assert ((trace.step_bounds - EPOCH_NS) // 1000).tolist() == [[10, 110], [110, 210], [210, 260]]


def test_without_any_sign_the_whole_trace_is_a_step(tmp_path: Path) -> None:
    trace = read(syn.write(tmp_path / "rank0.json", [syn.op("aten::mm", 3, 5), syn.op("aten::mm", 8, 20)]))
    assert ((trace.step_bounds - EPOCH_NS) // 1000).tolist() == [[3, 20]]
    assert any("whole trace taken as one step" in line for line in trace.warnings)


def _gpu_steps(kernels: list[int]) -> list[syn.Event]:
    """Steps of 100 µs on the host; each kernel takes 30 µs, all back to back on one stream."""
    events, free, correlation = [], 0.0, 0
    for k, count in enumerate(kernels):
        events.append(syn.mark(f"ProfilerStep#{k}", 100 * k, 100 * k + 100))
        for n in range(count):
            correlation += 1
            at = 100 * k + 12 * n
            free = max(free, at + 15) + 30
            events += syn.launched("k", at, free - 30, free, correlation)
    return events


def test_a_first_step_that_lost_kernels_is_not_averaged(tmp_path: Path) -> None:
    trace = read(syn.write(tmp_path / "rank0.json", _gpu_steps([1, 4, 4])))
    assert used_steps(trace)[0] == [1, 2]
    assert any("first step has 1 kernels, the others at least 4" in line for line in trace.warnings)
    assert used_steps(read(syn.write(tmp_path / "ok.json", _gpu_steps([4, 4, 4]))))[0] == [0, 1, 2]


def test_a_step_finishes_when_the_device_work_it_launched_does(tmp_path: Path) -> None:
    # 4 kernels of 30 µs a step: 15-135, then back to back until 255 and 375; the host is done at 100, 200, 300
    trace = read(syn.write(tmp_path / "rank0.json", _gpu_steps([4, 4, 4])))
    assert ((step_finish_ns(trace) - EPOCH_NS) // 1000).tolist() == [135, 255, 375]


HUGE = 10**30


@pytest.mark.parametrize(
    ("extra", "header", "said"),
    [
        ({"cat": "cpu_op", "ts": 9_300_000_000_000_000}, {}, "1 event(s) at an absurd time dropped"),
        ({"cat": "cpu_op", "ts": 9.3e30}, {}, "1 event(s) at an absurd time dropped"),
        ({}, {"baseTimeNanoseconds": HUGE}, "1 base time out of range not applied"),
        ({}, {"distributedInfo": {"rank": 2**61}}, "1 number(s) too large to be true taken as unknown"),
        ({}, {"distributedInfo": {"rank": 0, "world_size": HUGE}}, "1 number(s) too large to be true taken as unknown"),
        ({"args": {"correlation": HUGE}}, {}, "1 number(s) too large to be true taken as unknown"),
        ({"args": {"In msg nelems": 2**61, "dtype": "Float"}}, {}, "1 number(s) too large to be true taken as unknown"),
        ({"cat": "user_annotation", "name": "gloo:all_reduce", "tid": 9,
          "args": {"Input Dims": [[2**40, 2**40]], "Input type": ["float"]}}, {},
         "1 number(s) too large to be true taken as unknown"),
        ({"cat": "user_annotation", "name": "gloo:all_reduce", "tid": 9,
          "args": {"Input Dims": 5, "Input type": "x"}}, {}, None),
        ({"cat": "user_annotation", "name": "gloo:all_reduce", "tid": 9,
          "args": {"Input Dims": [[1]], "Input type": 5}}, {}, None),
    ],
)  # fmt: skip
def test_numbers_that_fit_no_column_are_dropped_and_counted(
    tmp_path: Path, extra: dict[str, object], header: dict[str, object], said: str | None
) -> None:
    event = {**syn.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 10, 20, 5), **extra, "ts": 10}
    path = syn.write(tmp_path / "t.json", [syn.mark("ProfilerStep#0", 0, 100), syn.op("aten::a", 1, 9), event])
    document = json.loads(path.read_text())
    if "ts" in extra:
        document["traceEvents"][-1]["ts"] = extra["ts"]
    path.write_text(json.dumps({**document, **header}))
    trace = read(path)
    assert trace.warnings == ([said] if said else [])
    assert "aten::a" in trace.names
    assert all(int(trace.nbytes[i]) == -1 for i in np.flatnonzero(trace.kind == EventKind.COLLECTIVE))
