"""Is it faster? Against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.verdict import compare, slowest_rank, timing


def test_slowest_rank_per_step_cut_to_the_shortest() -> None:
    assert slowest_rank([[1_000_000, 5_000_000, 9_000_000], [2_000_000, 4_000_000]]).tolist() == [2.0, 5.0]
    assert slowest_rank([]).tolist() == []
    assert slowest_rank([[1_000_000], []]).tolist() == []


def test_timing_by_hand() -> None:
    # median 12; deviations 2 1 0 1 2 -> MAD 1
    found = timing([10, 11, 12, 13, 14])
    assert found.median_ms == 12
    assert found.error_ms == pytest.approx(1.2533 * 1.4826 / math.sqrt(5))
    assert found.steps == 5


def test_one_stalled_step_moves_nothing() -> None:
    assert timing([10, 10, 10, 10, 900]).median_ms == 10
    assert timing([10, 10, 10, 10, 900]).error_ms == 0


def test_nothing_measured_is_not_faster() -> None:
    assert not compare([], [], 0).faster
    assert not compare([[10.0]], [[]], 0).faster
    assert not compare([[0.0, 0.0]], [[0.0]], 0).faster


def test_ratio_and_noise_by_hand() -> None:
    # before: median 10, MAD 1; after: median 7, MAD 1; five steps each
    found = compare([[8, 9, 10, 11, 12]], [[5, 6, 7, 8, 9]], 0.0)
    error = 1.2533 * 1.4826 / math.sqrt(5)
    assert found.ratio == pytest.approx(0.7)
    assert found.noise == pytest.approx(2 * 0.7 * math.hypot(error / 10, error / 7))  # 0.20
    assert found.faster  # 0.7 < 1 - 0.20


def test_a_gain_inside_the_noise_is_not_faster() -> None:
    assert not compare([[8, 9, 10, 11, 12]], [[7, 8, 9, 10, 11]], 0.0).faster  # 0.9 > 1 - 0.22


def test_a_gain_below_the_least_is_not_faster() -> None:
    assert compare([[100.0] * 5], [[99.0] * 5], 0.005).faster
    assert not compare([[100.0] * 5], [[99.6] * 5], 0.005).faster


def test_every_window_after_must_beat_every_window_before() -> None:
    # pooled medians 12 and 11: but the plan's first window was slower than the second baseline
    assert not compare([[12.0] * 5, [10.9] * 3], [[11.0] * 5, [10.0] * 3], 0.0).faster
    assert compare([[12.0] * 5, [11.1] * 3], [[11.0] * 5, [10.0] * 3], 0.0).faster


@given(st.floats(0.5, 2.0), st.floats(-0.2, 0.2), st.integers(3, 20), st.integers(0, 20))
def test_no_steady_drift_makes_equal_settings_faster(start: float, drift: float, window: int, settle: int) -> None:
    """Baseline, plan, baseline, plan on a machine that steadily changes: never "faster"."""
    times = start + 0.01 * np.cumsum(np.full(4 * (window + settle), drift)) + 2
    windows = [times[k * (window + settle) : k * (window + settle) + window].tolist() for k in range(4)]
    assert not compare([windows[0], windows[2]], [windows[1], windows[3]], 0.0).faster
