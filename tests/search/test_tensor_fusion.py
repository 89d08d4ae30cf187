"""The dynamic programme against all groupings of its own timeline, and Theorem 2 against its definition."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.sync import SyncModel
from dpro.search.tensor_fusion import MAX_UNITS, Timeline, best_cuts, fusion_pays, neighbours


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    n = draw(st.integers(1, 8))
    ready = np.cumsum(draw(st.lists(st.integers(0, 10_000), min_size=n, max_size=n)))
    sizes = draw(st.lists(st.integers(1, 10_000), min_size=n, max_size=n))
    copies = draw(st.lists(st.integers(0, 500), min_size=n, max_size=n))
    steal = draw(st.sampled_from([0.0, 0.5]))
    return Timeline(
        ready_ns=ready,
        cum_bytes=np.concatenate([[0], np.cumsum(sizes)]),
        cum_copy_ns=np.concatenate([[0], np.cumsum(copies)]),
        host_ns=float(ready[-1]),
        rest_ns=100.0,
        launch_ns=draw(st.sampled_from([0.0, 200.0])),
        model=SyncModel(draw(st.sampled_from([0.0, 100.0, 2_000.0])), draw(st.sampled_from([0.1, 1.0])), steal),
    )


@settings(max_examples=60, deadline=None)
@given(timelines())
def test_best_for_every_number_of_buckets(timeline: Timeline) -> None:
    n = len(timeline)
    found = best_cuts(timeline)
    assert all(cuts == tuple(sorted(set(cuts))) and cuts[-1] == n and cuts[0] >= 1 for cuts in found)
    for k in range(1, n + 1):
        everything = [(*cuts, n) for cuts in combinations(range(1, n), k - 1)]

        # what the programme minimises: the last collective's end, and the copies of its bucket
        def last_ns(cuts: tuple[int, ...]) -> float:
            begin = cuts[-2] if len(cuts) > 1 else 0
            return timeline.buckets(cuts)[-1][1] + float(timeline.cum_copy_ns[n] - timeline.cum_copy_ns[begin])

        best = min(map(last_ns, everything))
        assert min(last_ns(cuts) for cuts in found if len(cuts) == k) == pytest.approx(best)


def test_timeline_by_hand() -> None:
    # ready at 10, 20, 30 µs; 1 µs + 1 ns/B; launches 0.1 µs; copies 2, 3, 4 µs; 5 µs of update
    timeline = Timeline(
        ready_ns=np.array([10_000, 20_000, 30_000]),
        cum_bytes=np.array([0, 4_000, 24_000, 26_000]),
        cum_copy_ns=np.array([0, 2_000, 5_000, 9_000]),
        host_ns=30_000.0,
        rest_ns=5_000.0,
        launch_ns=100.0,
        model=SyncModel(1_000, 1.0),
    )
    # bucket 0: launched 10.1, done 15.1; bucket 1 (22,000 B): launched 30.2, done 53.2
    assert timeline.buckets((1, 3)) == [(10_100, 15_100), (30_200, 53_200)]
    # host: waits from 30.2, copies tensor 0 until 32.2, the rest from 53.2 to 60.2, update
    assert timeline.estimate_ns((1, 3)) == 65_200
    # all apart: bucket 1 from 20.2 to 41.2, bucket 2 from there to 44.2, copied until 48.2
    assert timeline.estimate_ns((1, 2, 3)) == 53_200


def test_many_tensors_are_joined_to_units_of_like_size() -> None:
    n = 5_000
    timeline = Timeline(
        ready_ns=np.arange(n) * 1_000,
        cum_bytes=np.arange(n + 1) * 100,
        cum_copy_ns=np.zeros(n + 1, dtype=np.int64),
        host_ns=n * 1_000.0,
        rest_ns=0.0,
        launch_ns=0.0,
        model=SyncModel(50_000, 5.0),
    )
    found = best_cuts(timeline)
    cuts = {cut for grouping in found for cut in grouping}
    assert len(cuts) <= MAX_UNITS
    assert all(grouping[-1] == n for grouping in found)


@settings(max_examples=60, deadline=None)
@given(timelines(), st.data())
def test_neighbours_are_groupings_one_move_away(timeline: Timeline, data: st.DataObject) -> None:
    n = len(timeline)
    cuts = (*sorted(data.draw(st.sets(st.integers(1, n - 1)))), n) if n > 1 else (n,)
    for other in neighbours(timeline, cuts):
        assert other != cuts and other[-1] == n and list(other) == sorted(set(other)) and other[0] >= 1
        assert len(set(other) ^ set(cuts)) <= 2


@settings(deadline=None)
@given(*[st.integers(0, 100) for _ in range(4)], st.integers(1, 50), st.floats(0, 1))
def test_theorem_2_compares_the_two_ends(p_n: int, q_2: int, d_1: int, d_2: int, a: int, share: float) -> None:
    # t_sync = a + d; q_{n-1} follows q_{n-2} on the channel, p_{n-1} somewhere before p_n
    q_1 = max(share * p_n, q_2) + a + d_1
    pays = fusion_pays(
        ready_ns=p_n, end_before_last_ns=q_2, end_last_ns=q_1, sync_ns=a + d_2, fused_sync_ns=a + d_1 + d_2
    )
    apart = max(p_n, q_1) + a + d_2
    fused = max(p_n, q_2) + a + d_1 + d_2
    assert pays == (apart > fused)


def test_theorem_2_where_the_papers_form_is_wrong() -> None:
    # The channel is idle when gradient n is ready (q_{n-1} < p_n): the paper's form compares q_{n-1} with p_n
    # plus the extra time and refuses, rightly; with a latency above the extra bytes' time it says yes only
    # if q_{n-1} is late. Here q_{n-1} = 12 > 10 + (8 - 7), but the channel was busy with n-2 until 11.8:
    # fused it ends at 11.8 + 8 = 19.8, apart at 12 + 7 = 19.
    assert not fusion_pays(ready_ns=10, end_before_last_ns=11.8, end_last_ns=12, sync_ns=7, fused_sync_ns=8)


def _line(launch_ns: float = 0.0, steal: float = 0.0, in_flight: int = 1) -> Timeline:
    """Gradients of 10, 100 and 10 bytes at 1 ns a byte and no latency, ready at 0, 100 and 400."""
    return Timeline(
        ready_ns=np.array([0, 100, 400]),
        cum_bytes=np.array([0, 10, 110, 120]),
        cum_copy_ns=np.zeros(4, dtype=np.int64),
        host_ns=400.0,
        rest_ns=0.0,
        launch_ns=launch_ns,
        model=SyncModel(0.0, 1.0, steal_ns_per_byte=steal),
        in_flight=in_flight,
    )


def test_merges_are_refused_only_where_the_theorem_holds() -> None:
    # apart the second is through at 200, with the first one at 210
    assert (2, 3) not in neighbours(_line(), (1, 2, 3))
    # the last one waits for its gradient whatever they do, and that is there a launch earlier: 400 + 2 · 4 + 10
    assert _line(launch_ns=4.0).estimate_ns((1, 2, 3)) == 422
    assert _line(launch_ns=4.0).estimate_ns((2, 3)) == 418
    assert (2, 3) in neighbours(_line(launch_ns=4.0), (1, 2, 3))
    assert (2, 3) in neighbours(_line(steal=0.1), (1, 2, 3))
    assert (2, 3) in neighbours(_line(in_flight=2), (1, 2, 3))
