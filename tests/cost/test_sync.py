"""The line fitted to collectives: exact on exact data, robust to stalls, honest about thin data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.sync import SyncModel, fit, fit_buckets, steal
from tests.search.graphs import ddp_graph

SIZES = [1 << 20, 4 << 20, 16 << 20, 25 << 20]


@settings(deadline=None)
@given(
    latency=st.floats(0, 1e7),
    slope=st.floats(1e-3, 100),
    sizes=st.lists(st.integers(1_000, 2**30), min_size=2, max_size=20, unique=True),
)
def test_exact_line_is_found(latency: float, slope: float, sizes: list[int]) -> None:
    model = fit(sizes, [latency + slope * s for s in sizes])
    for s in sizes:
        assert model.time_ns(s) == pytest.approx(latency + slope * s, rel=1e-6, abs=1)
    assert model.spread < 1e-6


def test_stalls_do_not_move_it() -> None:
    # 200 µs + 8 ns/B; of five transfers per size one met a stall of up to 50 ms
    sizes = np.repeat(SIZES, 5)
    times = 200_000 + 8.0 * sizes
    times[::5] += [1e6, 50e6, 5e6, 20e6]
    model = fit(sizes, times)
    assert model.latency_ns == pytest.approx(200_000)
    assert model.ns_per_byte == pytest.approx(8)
    assert (model.observations, model.distinct_sizes, model.trust) == (20, 4, "good")


def test_noise_is_reported_as_spread() -> None:
    # +-30 % alternating around 10 ns/B: no line comes closer than 30 % to half of them
    sizes = np.repeat(SIZES, 20)
    model = fit(sizes, 10.0 * sizes * np.tile([0.7, 1.3], 40))
    assert 0.25 < model.spread < 0.45
    assert model.trust == "weak"


def test_never_negative() -> None:
    # times that grow faster than size would want a negative latency
    model = fit([1_000, 2_000, 4_000], [1_000, 3_000, 9_000])
    assert model.latency_ns == 0
    assert model.ns_per_byte > 0
    # times that fall with size would want a negative slope
    model = fit([1_000, 2_000, 4_000], [9_000, 5_000, 4_000])
    assert model.ns_per_byte == 0
    assert model.time_ns(10**9) == 5_000  # the middle one: least absolute relative deviation


def test_one_size_assumes_five_percent_latency_and_says_so() -> None:
    model = fit([1_000_000] * 3, [900_000, 1_000_000, 5_000_000])
    assert model.time_ns(1_000_000) == 1_000_000
    assert model.latency_ns == pytest.approx(50_000)
    assert model.trust == "assumed"


def test_two_sizes_are_weak_and_a_third_makes_it_good() -> None:
    assert fit([1_000, 2_000], [1_500, 2_500]).trust == "weak"
    model = fit([1_000, 2_000, 10], [1_500, 2_500, 510])
    assert (model.latency_ns, model.ns_per_byte, model.trust) == (pytest.approx(500), pytest.approx(1), "good")


def test_useless_observations_are_dropped() -> None:
    model = fit([0, -1, 1_000, 2_000, 3_000], [5, 5, 2_000, 3_000, float("nan")])
    assert (model.latency_ns, model.ns_per_byte, model.observations) == (pytest.approx(1_000), pytest.approx(1), 2)


def test_many_sizes_stay_quick_and_right() -> None:
    sizes = np.arange(1, 2001) * 1_000
    model = fit(sizes, 7_000 + 3.0 * sizes)
    assert (model.latency_ns, model.ns_per_byte) == (pytest.approx(7_000), pytest.approx(3))


def test_of_lines_as_good_the_one_with_more_latency() -> None:
    # Two sizes of noise +-10 %: nothing speaks for a latency of 0 more than for the line through the medians.
    sizes = [10_000_000] * 3 + [20_000_000] * 3 + [30_000_000] * 3
    times = [9e7, 1e8, 1.1e8, 1.8e8, 1.95e8, 2.2e8, 2.6e8, 2.9e8, 3.2e8]
    model = fit(sizes, times)
    assert model.latency_ns == pytest.approx(5e6)  # through (10 MB, 100 ms) and (30 MB, 290 ms): 9.5 ns/B
    assert model.ns_per_byte == pytest.approx(9.5)


def test_buckets_of_a_graph() -> None:
    truth = SyncModel(latency_ns=100_000, ns_per_byte=2.0)
    # far enough apart that the channel falls idle between them
    graph = ddp_graph([4_000_000, 1_000_000, 9_000_000], 0, [10**8] * 3, groups=((0,), (1,), (2,)), sync=truth)
    model = fit_buckets([graph, graph])
    assert (model.latency_ns, model.ns_per_byte) == (pytest.approx(100_000), pytest.approx(2))
    assert (model.observations, model.distinct_sizes, model.steal_ns_per_byte) == (6, 3, 0.0)
    # of two ranks and 5 steps of 14 MB: 28 and 42 ms went to others while main waited for a core
    contention = [
        {"main_delay_ns": 28e6, "others_cpu_ns": 99e6},
        {"main_delay_ns": 99e6, "others_cpu_ns": 42e6},
    ]
    model = fit_buckets([graph], contention=contention, steps=5)
    assert model.steal_ns_per_byte == pytest.approx(35e6 / 70e6)
    assert (model.distinct_sizes, model.trust) == (3, "good")


def test_buckets_back_to_back_count_together() -> None:
    """Two in flight share the channel unevenly: only their sum is a measurement."""
    truth = SyncModel(latency_ns=0, ns_per_byte=3.0)
    graph = ddp_graph([2_000_000] * 4, 0, [10, 10, 10**9, 10], groups=((0,), (1,), (2,), (3,)), sync=truth)
    for bucket, ns in zip(graph.buckets, (9_000_000, 3_000_000, 1_000_000, 11_000_000), strict=True):
        graph.set(bucket.ops[0], "duration", ns)  # each pair together: 4 MB in 12 ms
    model = fit_buckets([graph])
    assert model.time_ns(2_000_000) == 6_000_000
    assert (model.observations, model.spread) == (2, 0.0)


def test_one_core_for_all_is_lost_to_whoever_runs() -> None:
    """The buckets came after compute: 2 ms of waiting say nothing, 30 ms of the other threads' work do."""
    seen = {"main_delay_ns": 2e6, "others_cpu_ns": 30e6}
    assert steal([seen | {"cores": 1.0}], 10_000_000) == 3.0
    assert steal([seen | {"cores": 2.0}], 10_000_000) == steal([seen], 10_000_000) == 0.2


def test_steal_of_nothing_known() -> None:
    assert steal([], 1_000) == steal([{}], 1_000) == steal([{"main_delay_ns": 5.0}], 1_000) == 0
    assert steal([{"main_delay_ns": 5.0, "others_cpu_ns": 5.0}], 0) == 0


@pytest.mark.parametrize(("sizes", "times"), [([], []), ([0], [10]), ([10], [0]), ([1, 2], [1])])
def test_nothing_to_fit(sizes: list[int], times: list[int]) -> None:
    with pytest.raises(ValueError):
        fit(sizes, times)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_model_is_of_finite_times(bad: float) -> None:
    with pytest.raises(ValueError, match="latency_ns"):
        SyncModel(latency_ns=bad, ns_per_byte=1.0)


def test_what_a_librarys_rounds_took_is_not_the_bytes() -> None:
    """10 MB a step in 20 ms; in the other 400 of 5 steps of 100 ms rounds took a quarter of a core."""
    truth = SyncModel(latency_ns=0, ns_per_byte=2.0)
    graph = ddp_graph([10_000_000], 0, [10**8], groups=((0,),), sync=truth)
    graph.info["negotiated"] = True
    seen = {"main_delay_ns": 200e6, "others_cpu_ns": 130e6, "wall_ns": 500e6, "cores": 1.0}
    told = [seen | {"idle_share": 0.25}]
    for graphs in ([graph], [graph] * 5):  # an average step, or each
        model = fit_buckets(graphs, contention=told, steps=5)
        assert model.steal_ns_per_byte == pytest.approx(30e6 / 50e6)
    # a capture that does not say: nothing is put down to the bytes
    assert fit_buckets([graph], contention=[seen], steps=5).steal_ns_per_byte == 0.0
