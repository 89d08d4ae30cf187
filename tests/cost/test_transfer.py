import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.cost.transfer import fit_line


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 10**9))
def test_a_line_is_found_in_whatever_order_its_points_come(latency_ns: int, ps_per_byte: int, seed: int) -> None:
    sizes = [1_000, 50_000, 50_000, 3_000_000]
    samples = [(size, latency_ns + size * ps_per_byte / 1000) for size in sizes]
    random.Random(seed).shuffle(samples)
    line = fit_line([(size, round(ns)) for size, ns in samples])
    assert line.ns_per_byte == pytest.approx(ps_per_byte / 1000, abs=1e-5)
    assert line.latency_ns == pytest.approx(latency_ns, abs=2.0, rel=1e-6)


def test_pairs_stay_pairs() -> None:
    # sorted apart, as FastT's code does, these would lie on the line of slope 1; as pairs they fall
    line = fit_line([(100, 300), (200, 200), (300, 100)])
    assert (line.latency_ns, line.ns_per_byte) == (200.0, 0.0)


def test_neither_number_is_below_zero() -> None:
    # y = 2x - 100: through the origin by least squares, (100·100 + 200·300) / (100² + 200²)
    line = fit_line([(100, 100), (200, 300)])
    assert (line.latency_ns, line.ns_per_byte) == (0.0, pytest.approx(70_000 / 50_000))


def test_one_size_says_nothing_of_latency() -> None:
    assert fit_line([(100, 50), (100, 150)]).ns_per_byte == 1.0
    assert fit_line([(0, 50), (0, 150)]).latency_ns == 100.0


def test_without_a_sample_there_is_no_line() -> None:
    with pytest.raises(ValueError, match="no transfer"):
        fit_line([])
