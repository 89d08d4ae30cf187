"""From pairs to clocks: along a tree, and around circles that contradict themselves, by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from dpro.clock.line import Line
from dpro.clock.pairs import Pair
from dpro.clock.reconcile import reconcile

US = 1_000
WINDOW = (0, 10**9)
FREE = 10_000  # a bound that never holds anybody back


def pair(first: int, second: int, offset_us: int, sure_us: int, allowed_us: tuple[int, int] | None = None) -> Pair:
    """``allowed_us``: what cause and effect allow around the offset."""
    below, above = allowed_us or (-FREE, FREE)
    corners = [np.array([[t, (offset_us + by) * US] for t in WINDOW], np.int64) for by in (below, above)]
    return Pair(first, second, Line(offset_us * US, 0.0, WINDOW[1] // 2), sure_us * US, "messages", *corners)


def test_a_chain_adds_up() -> None:
    # the second pair is between 1 and 2, the third read from the far end
    found = reconcile([pair(0, 1, 100, 5), pair(1, 2, -30, 7), pair(2, 3, 1, 1)], [WINDOW] * 4)
    assert [line.offset_ns for line in found.lines] == [0, 100 * US, 70 * US, 71 * US]
    assert found.uncertainty_ns == [0, 5 * US, 12 * US, 13 * US]
    assert found.warnings == []


def test_lines_compose_exactly() -> None:
    a = Line(5_000_000, 20e-6, 10**15)
    b = Line(-300_000, -50e-6, 10**15 + 77)
    for t in (10**15, 10**15 + 10**9, 10**15 - 10**9):
        assert abs(a.after(b)(t) - a(b(t))) <= 1
        assert abs(a.inverse()(a(t)) - t) <= 1
        assert abs(a.about(10**15 + 123_456_789)(t) - a(t)) <= 1
    times = np.array([10**15, 10**15 + 10**9])
    assert a.apply(times).tolist() == [a(t) for t in times.tolist()]


def test_the_best_way_is_taken_and_a_clock_nobody_knows_is_not() -> None:
    found = reconcile([pair(0, 1, 10, 5), pair(1, 2, 10, 5), pair(0, 2, 26, 50)], [WINDOW] * 4)
    assert [line.offset_ns for line in found.lines] == [0, 10 * US, 20 * US, 0]
    assert found.uncertainty_ns == [0, 5 * US, 10 * US, np.inf]


def test_a_triangle_that_the_best_ways_break() -> None:
    """0-1 and 1-2 say 10 each, known to 5; 0-2 says 26, known to 50, but 24 is the least that its messages allow.

    The 4 that are missing cost as much on either of the first two (1/5 per us), on the third nothing helps: the bound
    holds the sum at 24. Total deviation is 4/5 + 2/50, wherever on the two edges the 4 are put.
    """
    pairs = [pair(0, 1, 10, 5), pair(1, 2, 10, 5), pair(0, 2, 26, 50, (-2, 30))]
    found = reconcile(pairs, [WINDOW] * 3)
    at = [line.offset_ns / US for line in found.lines]
    assert at[0] == 0 and at[2] == pytest.approx(24, abs=0.01)
    assert 10 - 0.01 <= at[1] <= 14 + 0.01
    assert found.warnings == []
    # 20 along the best way, known to 10: what is 4 from there is known to 14
    assert found.uncertainty_ns[2] == pytest.approx(14 * US, abs=10)


def test_the_less_certain_pair_gives_way() -> None:
    pairs = [pair(0, 1, 10, 5), pair(1, 2, 10, 20), pair(0, 2, 26, 50, (-2, 30))]
    at = [line.offset_ns / US for line in reconcile(pairs, [WINDOW] * 3).lines]
    assert at == pytest.approx([0, 10, 24], abs=0.01)


def test_drift_is_reconciled_too() -> None:
    # as above, but the third pair's bound holds at the end alone: 24 there, nothing at the beginning
    low = np.array([[WINDOW[1], 24 * US]], np.int64)
    third = pair(0, 2, 26, 50)
    pairs = [pair(0, 1, 10, 5), pair(1, 2, 10, 20), Pair(0, 2, third.line, 50 * US, "messages", low, third.high)]
    found = reconcile(pairs, [WINDOW] * 3)
    assert found.lines[2](WINDOW[1]) - WINDOW[1] == pytest.approx(24 * US, abs=10)
    assert found.lines[2](WINDOW[0]) - WINDOW[0] == pytest.approx(20 * US, abs=10)
    assert found.lines[2].drift == pytest.approx(4e-6, abs=1e-8)


def test_bounds_that_cannot_all_hold_give_way_and_say_so() -> None:
    tight = (-1, 1)
    pairs = [pair(0, 1, 10, 1, tight), pair(1, 2, 10, 1, tight), pair(0, 2, 29, 1, tight)]
    found = reconcile(pairs, [WINDOW] * 3)
    # 9 around the circle, 1 of it allowed on each of three edges: 2 more on each
    assert found.warnings == ["clocks of hosts contradict each other around a circle: 2.0 us given way"]
    assert [line.offset_ns / US for line in found.lines] == pytest.approx([0, 13, 26], abs=0.01)


def test_no_solver_where_there_is_nothing_to_solve() -> None:
    code = (
        "import sys; from tests.clock.test_reconcile import *\n"
        "reconcile([pair(0, 1, 10, 5), pair(1, 2, 10, 5), pair(0, 2, 20, 50, (-5, 5))], [WINDOW] * 3)\n"
        "assert not {'cvxpy', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_the_solver_the_best_ways_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    pairs = [pair(0, 1, 10, 5), pair(1, 2, 10, 5), pair(0, 2, 26, 50, (-2, 30))]
    found = reconcile(pairs, [WINDOW] * 3)
    assert [line.offset_ns for line in found.lines] == [0, 10 * US, 20 * US]
    assert len(found.warnings) == 1 and "not reconciled" in found.warnings[0]
