"""The exact scan of dPRO's variance: by hand, and against a fine grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.clock.scan import Receives, scan, total_variance


def receives(*rows: tuple[int, int, float, float]) -> Receives:
    family, sign, turn, took = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Receives(np.array(family, np.int64), np.array(sign, np.int64), np.array(turn, float), np.array(took, float))


def test_waiting_is_taken_off_what_a_receive_took() -> None:
    # The second was posted 40 before its SEND, by clocks that agree; both then took 10. Were they 20 apart, it
    # would seem to have waited for 20 only: 30 against 10, variance 100.
    two = receives((0, 1, 0, 10), (0, 1, 40, 50))
    assert total_variance(two, 0) == 0
    assert total_variance(two, 20) == 100
    assert scan(two, 0, 100) == pytest.approx(0, abs=1e-6)
    # below 0 the first waits as well, and both say the same whatever it is
    assert scan(two, -10, 100) == pytest.approx(-5, abs=1e-3)


def test_flat_means_the_middle() -> None:
    never = receives((0, 1, -100, 10), (0, 1, -200, 30))  # on [0, 50] neither waits
    assert scan(never, 0, 50) == 25
    assert scan(receives(), 0, 50) == 25
    assert scan(receives((0, 1, 20, 10)), 0, 50) == 25  # one alone has no variance


def test_the_other_direction_waits_the_other_way() -> None:
    # received on the first clock: waits while d > turn
    two = receives((0, -1, 60, 10), (0, -1, 20, 50))
    assert total_variance(two, 60) == 0
    assert scan(two, 0, 60) == pytest.approx(60, abs=1e-6)


rows = st.lists(
    st.tuples(st.integers(0, 2), st.just(0), st.integers(-60, 60), st.integers(0, 200)), min_size=1, max_size=12
)


@settings(deadline=None)
@given(rows, st.integers(-50, 0), st.integers(1, 50))
def test_no_difference_on_a_grid_is_better(found: list[tuple[int, int, int, int]], low: int, high: int) -> None:
    all_receives = receives(*((family, -1 if family == 2 else 1, turn, took) for family, _, turn, took in found))
    best = scan(all_receives, low, high)
    assert low <= best <= high
    grid = np.linspace(low, high, 4 * (high - low) + 1)
    values = np.array([total_variance(all_receives, d) for d in grid])
    least = float(values.min())
    near = grid[values <= least + 1e-6]
    if near[-1] - near[0] <= 1 / 2:  # one valley: the scan is in it, else between those it has
        assert total_variance(all_receives, best) <= least + 1e-3
    assert near[0] - 1 / 2 <= best <= near[-1] + 1 / 2
