"""What idle threads take, by made-up scheduler statistics."""

from __future__ import annotations

import threading

import pytest

from dpro_integrations import host_load
from dpro_integrations.host_load import IdleLoad

MAIN = threading.get_native_id()


def test_rounds_are_told_from_compute_and_from_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stretches of 100 ms; (on a core, waiting for one) in ms by thread."""
    stretches = [
        ({MAIN: (0, 0), 7: (0, 0), 8: (0, 0), 9: (0, 0)}, {MAIN: (80, 20), 7: (15, 60), 8: (60, 20), 9: (5, 0)}),
        ({MAIN: (90, 20), 7: (50, 60), 8: (80, 20)}, {MAIN: (170, 20), 7: (65, 120), 8: (160, 20), 5: (30, 0)}),
    ]
    clock = iter([0, 100, 300, 400])
    reads = iter([read for stretch in stretches for read in stretch])
    ms = 1_000_000
    monkeypatch.setattr(host_load.time, "monotonic_ns", lambda: next(clock) * ms)
    monkeypatch.setattr(
        host_load, "_read", lambda: {tid: (cpu * ms, delay * ms) for tid, (cpu, delay) in next(reads).items()}
    )
    load = IdleLoad()
    load.end()  # nothing was begun
    assert load.share() == 0.0
    for _ in stretches:
        load.begin()
        load.end()
        load.end()
    # 7 both times and 9 once; 8 computes, 5 was not there before
    assert load.share() == pytest.approx((15 + 5 + 15) / 200)
