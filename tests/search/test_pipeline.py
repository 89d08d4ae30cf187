"""A line of stages: by hand, against the replay, and what Theorem 2 on it may refuse."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.sync import SyncModel
from dpro.search.fused_partition import Steps
from dpro.search.pipeline import IDLE, Line, State, pair
from dpro.search.tensor_fusion import fusion_pays
from dpro.search.view import ALL
from tests.graph.ps_jobs import FREE, layout, model, ps_graph

NS = SyncModel(0.0, 1.0)


def test_parts_follow_each_other() -> None:
    """Copied out for 10, pushed for 10 + 5, added for 10 by each of two, pulled for 10 + 5, copied in for 10.

    The first part is copied at 10, pushed at 25, added at 45, pulled at 60, back at 70; the second: 20, 40, 65, 80, 90.
    """
    line = Line(NS, SyncModel(5.0, 1.0), NS, SyncModel(5.0, 1.0), NS, workers=2)
    assert line.run(IDLE, 0, [10]) == (10, 25, 45, 60, 70)
    assert line.run(IDLE, 0, [10, 10]) == (20, 40, 65, 80, 90)
    # once more, ready in between: copied until 30, pushed until 55, added until 85, pulled until 100
    assert line.run((20, 40, 65, 80, 90), 15, [10]) == (30, 55, 85, 100, 110)


def test_lags_pass_while_nothing_is_held() -> None:
    """Copied from 1 on, pushed from 13 to 23, asked for at 27, summed at 33 + 8 = 41, pulled from 57 on."""
    line = Line(NS, NS, NS, NS, NS, out_lag=1, push_lag=2, ask_lag=4, sum_lag=8, pull_lag=16, in_lag=32)
    assert line.run(IDLE, 0, [10]) == (11, 23, 33, 67, 109)


lines = st.builds(SyncModel, st.sampled_from([0.0, 3.0, 50.0]), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
whole = st.builds(
    Line, lines, lines, lines, lines, lines, st.integers(1, 3), *[st.sampled_from([0, 7, 90])] * 6
)  # fmt: skip
parts = st.lists(st.integers(1, 200), min_size=1, max_size=4)
states = st.tuples(*[st.integers(0, 300)] * 5)
readies = st.tuples(st.integers(0, 400), st.integers(0, 400)).map(lambda both: (min(both), max(both)))


@settings(max_examples=300, deadline=None)
@given(whole, states, readies, parts, parts, st.integers(1, 300), st.lists(st.tuples(st.integers(0, 500), parts)))
def test_what_is_refused_helps_nobody_later(
    line: Line,
    state: State,
    ready: tuple[int, int],
    first: list[int],
    second: list[int],
    bound: int,
    later: list[tuple[int, list[int]]],
) -> None:
    total = sum(first) + sum(second)
    fused = [bound] * (total // bound) + [total % bound] * bool(total % bound)
    found = pair(line, state, ready, (first, second), fused)
    assert found.may_pay or not found.pays
    one, two = found.as_one, found.as_two
    for extra, sizes in later:
        one, two = (line.run(each, ready[1] + extra, sizes) for each in (one, two))
        assert found.may_pay or one[-1] >= two[-1]


@settings(max_examples=100, deadline=None)
@given(lines, st.integers(0, 300), readies, st.integers(1, 200), st.integers(1, 200))
def test_of_one_stage_it_is_the_general_form(
    push: SyncModel, free_ns: int, ready: tuple[int, int], first: int, second: int
) -> None:
    found = pair(
        Line(FREE, push, FREE, FREE, FREE), (0, free_ns, 0, 0, 0), ready, ([first], [second]), [first + second]
    )
    assert found.pays == fusion_pays(
        ready_ns=ready[1],
        end_before_last_ns=free_ns,
        end_last_ns=max(ready[0], free_ns) + push.time_ns(first),
        sync_ns=push.time_ns(second),
        fused_sync_ns=push.time_ns(first + second),
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 90_000), st.integers(1, 50_000)), min_size=1, max_size=5),
    lines,
    lines,
    lines,
    st.dictionaries(st.sampled_from(["out", "push", "acknowledge", "ask", "sum", "pull", "in"]), st.integers(0, 9_000)),
)
def test_it_is_the_replay_of_workers_that_are_alike(
    workers: int,
    tensors: list[tuple[int, int]],
    link: SyncModel,
    copy: SyncModel,
    add: SyncModel,
    lags: dict[str, int],
) -> None:
    where = layout(workers, orderly=False)
    sizes, backward = zip(*tensors, strict=True)
    graph = ps_graph(sizes, 1 << 20, where, model(where, link, copy=copy, add=add, lags=lags), bwd_ns=backward)
    steps = Steps(graph, float("inf"), ALL, (1, 2, 3))
    for count in (1, 2, 3):
        all_in_one = tuple(range(len(sizes)))
        alone = tuple(((t,), steps.bound((t,), count)) for t in all_in_one)
        for fused in (alone, ((all_in_one, steps.bound(all_in_one, count)),)):
            assert steps.step_ns(fused) == steps.estimate_ns(fused)
    assert steps.exact
