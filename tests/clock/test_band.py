"""The band of lines between two sets of points: by hand, and against random lines tried one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.clock.band import MAX_DRIFT, band


def points(*rows: tuple[float, float]) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def test_one_point_on_each_side_leaves_the_drift_open() -> None:
    found = band(points((0, -10)), points((0, 30)))
    assert found.drifts[[0, -1]].tolist() == [-MAX_DRIFT, MAX_DRIFT]
    assert found.offsets(0.0) == (-10, 30)
    assert found.middle() == pytest.approx((0, 10))
    assert found.farthest(0, 10, [0]) == pytest.approx(20)
    assert found.farthest(0, 10, [-1000, 1000]) == pytest.approx(20 + 1000 * MAX_DRIFT)


def test_a_corridor_known_by_heart() -> None:
    # not below 0 at ±1e6, not above 100 at ±1e6: drift between ∓100/2e6, a kite that is symmetric
    low, high = points((-1e6, 0), (1e6, 0), (0, -50)), points((-1e6, 100), (1e6, 100))
    found = band(low, high)
    assert found.low.tolist() == [[-1e6, 0], [1e6, 0]]  # (0, -50) is under the hull
    assert found.drifts[[0, -1]] == pytest.approx([-5e-5, 5e-5])
    assert found.middle() == pytest.approx((0, 50))
    assert found.offsets(5e-5) == pytest.approx((50, 50))
    assert found.farthest(0, 50, [-1e6, 1e6]) == pytest.approx(50)
    assert found.slack == 0


def test_drift_is_told_by_bounds_that_move() -> None:
    # 20 ppm over two seconds: 40 us, between bounds 1 us apart
    at = np.linspace(-1e9, 1e9, 21)
    line = 500 + 20e-6 * at
    found = band(np.stack([at, line - 500], axis=1), np.stack([at, line + 500], axis=1))
    drift, offset = found.middle()
    assert (drift, offset) == pytest.approx((20e-6, 500))
    assert found.farthest(drift, offset, [-1e9, 1e9]) == pytest.approx(500)


def test_contradiction_gives_way_by_half() -> None:
    found = band(points((0, 30)), points((0, 10)))
    assert found.slack == 10
    assert found.middle()[1] == pytest.approx(20)
    # the truth may break either bound by what they contradict each other
    assert found.farthest(*found.middle(), [0]) >= 10


def test_many_points_have_the_hull_of_all_of_them() -> None:
    # a parabola whose top points are corners, half of them, under a cloud that is not
    rng = np.random.default_rng(0)
    at = np.sort(rng.uniform(-1e6, 1e6, 20_000))
    value = -(at**2) / 1e10 - np.where(np.arange(20_000) % 2, rng.exponential(50, 20_000), 0.0)
    found = band(np.stack([at, value], axis=1), points((0, 1e4)))
    assert {tuple(corner) for corner in found.low.tolist()} >= {(at[k], value[k]) for k in range(100, 19_900, 2)}


coordinates = st.tuples(st.integers(-1_000_000, 1_000_000), st.integers(-300, 300))


@settings(deadline=None)
@given(st.lists(coordinates, min_size=1, max_size=8), st.lists(coordinates, min_size=1, max_size=8))
def test_a_line_is_allowed_just_if_no_point_forbids_it(low: list[tuple[int, int]], high: list[tuple[int, int]]) -> None:
    found = band(points(*low), points(*high))
    rng = np.random.default_rng(0)
    grid = np.linspace(-MAX_DRIFT, MAX_DRIFT, 401)
    least = min(max(v - d * t for t, v in low) - min(v - d * t for t, v in high) for d in grid.tolist())
    assert found.slack <= max(0.0, least / 2) + 1e-6  # no line on the grid needs less
    for drift in [*rng.uniform(-MAX_DRIFT, MAX_DRIFT, 40).tolist(), *found.drifts.tolist()]:
        floor = max(v - drift * t for t, v in low) - found.slack
        ceiling = min(v - drift * t for t, v in high) + found.slack
        inside = found.drifts[0] <= drift <= found.drifts[-1]
        if inside:
            assert found.offsets(drift) == pytest.approx((floor, ceiling), abs=1e-6)
            assert floor <= ceiling + 1e-6
        else:
            assert floor > ceiling - 1e-6
    drift, offset = found.middle()
    floor, ceiling = found.offsets(drift)
    assert floor - 1e-6 <= offset <= ceiling + 1e-6
    # nothing allowed is farther away than said
    said = found.farthest(drift, offset, [-1e6, 1e6])
    for other in found.drifts.tolist():
        for edge in found.offsets(other):
            assert max(abs(edge + other * t - offset - drift * t) for t in (-1e6, 1e6)) <= said + 1e-6
