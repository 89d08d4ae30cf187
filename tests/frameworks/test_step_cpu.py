"""CPU time of the training thread, told apart by whether a capture ran; the thread's clock is faked."""

from __future__ import annotations

import pytest

from dpro_integrations import torch_capture
from dpro_integrations.torch_capture import StepCpu


def test_steps_with_and_without_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(torch_capture.time, "thread_time_ns", lambda: now)
    cpu = StepCpu()
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
