"""Is it faster? Against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.verdict import Window, compare, slowest_rank, timing


def test_slowest_rank_per_step_cut_to_the_shortest() -> None:
    assert slowest_rank([[1.0, 5.0, 9.0], [2.0, 4.0]]).tolist() == [2.0, 5.0]
    assert slowest_rank([]).tolist() == []
    assert slowest_rank([[1.0], []]).tolist() == []


def test_timing_by_hand() -> None:
    # median 12; deviations 2 1 0 1 2 -> MAD 1
    found = timing([10, 11, 12, 13, 14])
    assert found.median_ms == 12
    assert found.error_ms == pytest.approx(1.2533 * 1.4826 / math.sqrt(5))
    assert found.steps == 5


def test_one_stalled_step_moves_nothing() -> None:
    assert timing([10, 10, 10, 10, 900]).median_ms == 10
    assert timing([10, 10, 10, 10, 900]).error_ms == 0


def windows(*rows: list[float], first: int = 0, every: int = 2) -> list[Window]:
    """Windows at places first, first + every, …"""
    return [Window(first + every * k, row) for k, row in enumerate(rows)]


def test_nothing_measured_is_not_faster() -> None:
    assert not compare([], [], 0).faster
    assert not compare(windows([10.0]), windows([]), 0).faster
    assert not compare(windows([0.0, 0.0]), windows([0.0]), 0).faster


def test_ratio_and_noise_by_hand() -> None:
    # before: median 10, MAD 1; after: median 7, MAD 1; five steps each
    found = compare(windows([8, 9, 10, 11, 12]), windows([5, 6, 7, 8, 9]), 0.0)
    error = 1.2533 * 1.4826 / math.sqrt(5)
    assert found.ratio == pytest.approx(0.7)
    assert found.noise == pytest.approx(2 * 0.7 * math.hypot(error / 10, error / 7))  # 0.20
    assert found.faster  # 0.7 < 1 - 0.20


def test_noise_between_windows_counts_where_it_is_larger() -> None:
    # ratios 0.8 and 0.9: mean 0.85, sample deviation 0.0707, its standard error 0.05
    found = compare(windows([10.0] * 5), windows([8.0] * 5, [9.0] * 5), 0.0)
    assert found.ratio == pytest.approx(0.85)
    assert found.noise == pytest.approx(0.1)
    assert found.faster  # 0.85 < 1 - 0.1


def test_a_gain_inside_the_noise_is_not_faster() -> None:
    assert not compare(windows([8, 9, 10, 11, 12]), windows([7, 8, 9, 10, 11]), 0.0).faster  # 0.9 > 1 - 0.22


def test_a_gain_below_the_least_is_not_faster() -> None:
    assert compare(windows([100.0] * 5), windows([99.0] * 5), 0.005).faster
    assert not compare(windows([100.0] * 5), windows([99.6] * 5), 0.005).faster


def test_baseline_is_interpolated_to_the_place_of_the_window() -> None:
    # baseline 10 at step 0 and 14 at step 4: expected 11 at step 1; 9.9 is a tenth less
    found = compare([Window(0, [10.0] * 3), Window(4, [14.0] * 3)], [Window(1, [9.9] * 3)], 0.0)
    assert found.ratio == pytest.approx(0.9)


def test_a_window_that_was_slower_forbids_it() -> None:
    assert not compare(windows([10.0] * 9, [10.0] * 9), windows([10.1] * 9, [2.0] * 9, first=1), 0.0).faster


@given(st.floats(0.5, 2.0), st.floats(-0.2, 0.2), st.integers(3, 20), st.integers(0, 20))
def test_no_steady_drift_makes_equal_settings_faster(start: float, drift: float, window: int, settle: int) -> None:
    """Baseline, plan, baseline, plan, baseline on a machine that steadily changes: never "faster"."""
    length = window + settle
    times = start + 0.01 * np.cumsum(np.full(5 * length, drift)) + 100
    rows = [Window(k * length + window / 2, times[k * length : k * length + window].tolist()) for k in range(5)]
    assert not compare(rows[::2], rows[1::2], 1e-9).faster
