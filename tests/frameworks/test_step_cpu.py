"""CPU time of the training thread, told apart by whether a capture ran; the thread's clock is faked."""

from __future__ import annotations

import pytest

from dpro.trace.model import EventKind, Meta, TraceBuilder
from dpro_integrations import torch_capture
from dpro_integrations.host_load import StepCpu
from dpro_integrations.torch_capture import StepCapture


def test_steps_with_and_without_a_capture() -> None:
    now = 0
    cpu = StepCpu(lambda: now)
    cpu.end()  # no begin: nothing is counted

    def step(ns: int) -> None:
        nonlocal now
        now += ns
        cpu.end()
        cpu.begin()

    cpu.begin()
    step(10)
    step(12)
    now += 1_000  # attaching
    cpu.capture(True)
    step(15)
    step(16)
    now += 5_000  # reading back
    cpu.capture(False)
    step(7)  # under way when the capture ended
    step(11)
    assert (list(cpu.usual_ns), cpu.captured_ns) == ([10, 12, 11], [15, 16])
    cpu.capture(True)
    assert cpu.captured_ns == []


@pytest.mark.parametrize(
    ("grown_ns", "event_ns"),
    [(20_000, 400), (-5, 100), (1_000, 100), (49_000, 980), (10**6, 1_000), (None, 100)],
)
def test_an_event_costs_within_what_the_probe_allows(grown_ns: int | None, event_ns: float) -> None:
    """The probe's 120 events cost 100 ns each; two steps of 50 events."""
    builder = TraceBuilder(Meta())
    for at in range(120):
        builder.add("probe", EventKind.CPU_OP, "cpu/1", at, at + 1)
    for at in range(1_000, 3_000, 20):
        builder.add("op", EventKind.CPU_OP, "cpu/1", at, at + 10)
    trace = builder.freeze([(1_000, 2_000), (2_000, 3_000)])
    capture = StepCapture.__new__(StepCapture)
    capture._on_gpu, capture._cpu = False, StepCpu()
    capture._probe_cost_ns = 120 * 100 / torch_capture._PROBE_RUNS
    if grown_ns is not None:
        capture._cpu.usual_ns.extend([10**7, 10**7 + 50, 10**7 - 50])
        capture._cpu.captured_ns = [10**7 + grown_ns] * 2
    assert capture._overhead_ns(trace, 2) == pytest.approx(event_ns)


def test_time_of_a_thread_that_shares_its_core() -> None:
    assert torch_capture._stretch({"main_cpu_ns": 400.0, "main_delay_ns": 100.0}) == 1.25
    assert torch_capture._stretch({}) == torch_capture._stretch({"main_cpu_ns": 0.0, "main_delay_ns": 5.0}) == 1
