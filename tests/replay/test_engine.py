"""The native engine: cases worked out by hand, and equality with the oracle."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.graph import NO_RESOURCE, Arrays, Graph, OpKind
from dpro.replay import engine, oracle
from dpro.replay.engine import CycleError, Replay, replay, replay_arrays
from tests.replay.random_graphs import random_graph

Engine = Callable[[Arrays], Replay]
ENGINES: list[Engine] = [engine.replay_arrays, oracle.replay_arrays]


def build(*ops: tuple[str | None, int, int, int, list[int]]) -> Arrays:
    """Arrays of ops given as (resource or None, duration, gap, priority, after)."""
    graph = Graph()
    for resource in sorted({r for r, *_ in ops if r}):
        graph.resource(resource)
    for on_name, duration, gap, priority, _ in ops:
        on = graph.resource(on_name) if on_name else NO_RESOURCE
        graph.add_op("op", OpKind.LOCAL, resource=on, duration=duration, gap=gap, priority=priority)
    for op, (*_, after) in enumerate(ops):
        for before in after:
            graph.add_edge(before, op)
    return graph.arrays()


def times(result: Replay) -> tuple[list[int], list[int], list[int], int]:
    return result.start.tolist(), result.end.tolist(), result.cause.tolist(), result.makespan_ns


def assert_equal(arrays: Arrays) -> Replay:
    native, plain = (run(arrays) for run in ENGINES)
    np.testing.assert_array_equal(native.start, plain.start)
    np.testing.assert_array_equal(native.end, plain.end)
    np.testing.assert_array_equal(native.cause, plain.cause)
    assert native.makespan_ns == plain.makespan_ns
    return native


# -- by hand ---------------------------------------------------------------------------------------

FIVE_OPS = build(
    ("z", 100, 0, 0, []),
    ("y", 20, 0, 0, [0]),  # ready late, at 100
    ("x", 10, 0, 0, []),
    ("x", 40, 0, 0, [2]),
    ("y", 50, 0, 0, [3]),  # ready sooner, at 50
)


@pytest.mark.parametrize("run", ENGINES)
def test_the_earliest_op_runs_first(run: Engine) -> None:
    # Y runs op 4 from 50 to 100 and is free when op 1 is ready: 120, not 170.
    assert times(run(FIVE_OPS)) == (
        [0, 100, 0, 10, 50],
        [100, 120, 10, 50, 100],
        [-1, 0, -1, 2, 3],
        120,
    )


def test_the_papers_rule_would_need_170() -> None:
    # dPRO, section 4.3: pop from the device with the smallest device time. What FIVE_OPS is there for.
    arrays, clock, end = FIVE_OPS, [0, 0, 0], [0] * 5
    after = {0: 1, 2: 3, 3: 4}
    queues: list[list[int]] = [[], [], []]
    for row in (0, 2):
        queues[arrays.resource[row]].append(row)
    ready = [0] * 5
    while any(queues):
        device = min((d for d in range(3) if queues[d]), key=lambda d: clock[d])
        row = queues[device].pop(0)
        clock[device] = end[row] = max(clock[device], ready[row]) + int(arrays.duration[row])
        if row in after:
            ready[after[row]] = end[row]
            queues[arrays.resource[after[row]]].append(after[row])
    assert max(end) == 170


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        pytest.param(build(), ([], [], [], 0), id="empty"),
        pytest.param(build(("a", 5, 3, 0, [])), ([3], [8], [-1], 8), id="a source starts after its gap"),
        pytest.param(
            build((None, 5, 0, 0, []), (None, 7, 0, 0, []), (None, 1, 2, 0, [0, 1])),
            ([0, 0, 9], [5, 7, 10], [-1, -1, 1], 10),
            id="without a resource nothing waits",
        ),
        pytest.param(
            # launch latency 4 of op 2 passes while the stream runs op 1: hidden
            build(("cpu", 2, 0, 0, []), ("s", 10, 4, 0, [0]), ("s", 10, 4, 0, [3]), ("cpu", 2, 0, 0, [0])),
            ([0, 6, 16, 2], [2, 16, 26, 4], [-1, 0, 1, 0], 26),
            id="a gap counts from readiness",
        ),
        pytest.param(
            # ops 1 (eligible 5) and 2 (eligible 3) wait for op 0: first come, first served
            build(("a", 9, 0, 0, []), ("a", 1, 5, 0, []), ("a", 1, 3, 0, [])),
            ([0, 10, 9], [9, 11, 10], [-1, 2, 0], 11),
            id="fifo",
        ),
        pytest.param(
            # op 1 comes later, but goes first among the waiting; it cannot stop op 0
            build(("a", 9, 0, 5, []), ("a", 1, 5, 0, []), ("a", 1, 3, 1, [])),
            ([0, 9, 10], [9, 10, 11], [-1, 0, 1], 11),
            id="priority",
        ),
        pytest.param(
            build(("a", 9, 0, 0, []), ("a", 1, 3, 0, []), ("a", 1, 3, 0, [])),
            ([0, 9, 10], [9, 10, 11], [-1, 0, 1], 11),
            id="row breaks a tie",
        ),
        pytest.param(
            # op 2, better in priority, becomes eligible at 4, when the resource picks: it is seen
            build(("a", 4, 0, 0, []), ("a", 1, 0, 7, []), ("a", 1, 0, 0, [3]), (None, 4, 0, 0, [])),
            ([0, 5, 4, 0], [4, 6, 5, 4], [-1, 2, 3, -1], 6),
            id="eligible at the instant of the pick",
        ),
        pytest.param(
            # At 0 resource a picks before b; b's op 0 takes no time and frees op 1 for a, too late for
            # the pick: op 2 has gone.
            build(("b", 0, 0, 0, []), ("a", 1, 0, 0, [0]), ("a", 6, 0, 9, [])),
            ([0, 6, 0], [0, 7, 6], [-1, 2, -1], 7),
            id="a zero op on a later resource is not seen",
        ),
        pytest.param(
            # The same with the resources' order turned: now op 1 is there in time.
            build(("a", 0, 0, 0, []), ("b", 1, 0, 0, [0]), ("b", 6, 0, 9, [])),
            ([0, 0, 1], [0, 1, 7], [-1, 0, 1], 7),
            id="a zero op on an earlier resource is seen",
        ),
        pytest.param(
            build((None, 5, 0, 0, []), (None, 5, 0, 0, []), ("a", 1, 0, 0, [1, 0])),
            ([0, 0, 5], [5, 5, 6], [-1, -1, 0], 6),
            id="of causes that end together the smallest row",
        ),
    ],
)
def test_by_hand(run: Engine, arrays: Arrays, expected: object) -> None:
    assert times(run(arrays)) == expected


# -- engine == oracle ------------------------------------------------------------------------------


def test_equals_the_oracle_on_1000_random_graphs() -> None:
    for seed in range(1000):
        assert_equal(random_graph(random.Random(seed)).arrays())


@settings(max_examples=200, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_equals_the_oracle_and_keeps_its_promises(rng: random.Random) -> None:
    arrays = random_graph(rng).arrays()
    result = assert_equal(arrays)
    rows = len(arrays.ids)
    source = np.repeat(np.arange(rows), np.diff(arrays.indptr))
    preds: list[list[int]] = [[] for _ in range(rows)]
    for before, after in zip(source.tolist(), arrays.indices.tolist(), strict=True):
        preds[after].append(before)
    start, end, cause = result.start, result.end, result.cause
    assert (end == start + arrays.duration).all()
    for row in range(rows):
        ready = max((int(end[p]) for p in preds[row]), default=0)
        eligible = ready + int(arrays.gap[row])
        assert start[row] >= eligible
        if start[row] == eligible:
            last = [p for p in preds[row] if end[p] == ready]
            assert cause[row] == min(last, default=-1)
        else:
            assert arrays.resource[cause[row]] == arrays.resource[row] != NO_RESOURCE
            assert end[cause[row]] == start[row]
    for resource in range(arrays.resources):
        on = np.flatnonzero(arrays.resource == resource)
        on = on[np.lexsort((end[on], start[on]))]
        assert (start[on][1:] >= end[on][:-1]).all(), "a resource runs one op at a time"


def test_equals_the_oracle_on_a_ddp_job() -> None:
    from benchmarks.replay_speed import ddp_graph

    assert_equal(ddp_graph(20_000, ranks=4).arrays())


def test_a_long_queue_out_of_order_is_kept_in_order() -> None:
    # 2,000 ops wait for one resource, eligible in an order that is not the rows': 1 ns each after op 0.
    rng = random.Random(5)
    gaps = rng.sample(range(1, 2001), 2000)
    result = assert_equal(build(("a", 5000, 0, 0, []), *[("a", 1, gap, 0, []) for gap in gaps]))
    assert result.start.tolist() == [0, *[5000 + gap - 1 for gap in gaps]]


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ENGINES)
def test_a_cycle_is_an_error_that_names_an_op_on_it(run: Engine) -> None:
    # 1 -> 2 -> 3 -> 1 is the cycle, 4 is only behind it, 0 runs
    arrays = build(("a", 1, 0, 0, []), *[("a", 1, 0, 0, [before]) for before in (3, 1, 2, 3)])
    with pytest.raises(CycleError, match=r"^4 ops can never run: op [123] waits for itself$") as caught:
        run(arrays)
    assert caught.value.stuck == 4
    assert caught.value.op in (1, 2, 3)
    assert isinstance(caught.value, ValueError)


def test_a_cycle_in_a_graph_is_told_by_name_and_op_id() -> None:
    graph = Graph()
    graph.remove_ops([graph.add_op("gone", OpKind.LOCAL)])
    op = graph.add_op("aten::mm", OpKind.FORWARD)
    graph.add_edge(op, op)
    with pytest.raises(CycleError, match=r"^1 op can never run: op 1 \('aten::mm'\) waits for itself$"):
        replay(graph)


@pytest.mark.parametrize("key", ["duration", "gap"])
@pytest.mark.parametrize("run", ENGINES)
def test_negative_times_are_refused(run: Engine, key: str) -> None:
    arrays = replace(FIVE_OPS, **{key: np.array([0, 0, 0, -1, 0])})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative duration or gap"):
        run(arrays)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"indices": np.array([1, 3, 5], "i4")}, ValueError, "successor out of range"),
        ({"indices": np.array([1, -1, 4], "i4")}, ValueError, "successor out of range"),
        ({"indices": np.array([1, 3], "i4")}, ValueError, "indptr does not span"),
        ({"indptr": np.array([0, 2, 1, 2, 3, 3])}, ValueError, "indptr is not increasing"),
        ({"resource": np.array([0, 1, 2, 3, 0], "i4")}, ValueError, "resource out of range"),
        ({"gap": np.zeros(4, "i8")}, ValueError, "agree in length"),
        ({"duration": np.full(5, 2**61)}, ValueError, "62 bits"),
        ({"duration": np.zeros(5, "f8")}, TypeError, "incompatible"),
        ({"duration": np.zeros(10, "i8")[::2]}, TypeError, "incompatible"),
    ],
)
def test_what_is_not_a_graph_is_refused(change: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replay_arrays(replace(FIVE_OPS, **change))  # type: ignore[arg-type]


# -- cost ------------------------------------------------------------------------------------------


def test_memory_stays_under_300_bytes_per_op_and_is_reported() -> None:
    from benchmarks.replay_speed import ddp_graph, graph_bytes, replay_bytes

    arrays = ddp_graph(20_000).arrays()
    result = replay_arrays(arrays)
    # Waiting is 16 bytes an op, so the engine cannot have worked with less
    assert result.working_bytes > 16 * 20_000
    assert (graph_bytes(arrays) + replay_bytes(result)) / 20_000 < 300


def test_threads_replay_at_once_without_disturbing_each_other() -> None:
    arrays = [random_graph(random.Random(seed)).arrays() for seed in range(8)]
    expected = [oracle.replay_arrays(a).makespan_ns for a in arrays]
    found: list[list[int]] = [[] for _ in arrays]

    def work(i: int) -> None:
        found[i] = [replay_arrays(arrays[i]).makespan_ns for _ in range(50)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[makespan] * 50 for makespan in expected]


def test_the_gil_is_free_during_a_replay() -> None:
    ops = 400_000  # one resource, arrivals in random order: slow enough to look on
    arrays = Arrays(
        ids=np.arange(ops, dtype=np.int32),
        resource=np.zeros(ops, dtype=np.int32),
        duration=np.ones(ops, dtype=np.int64),
        gap=np.random.default_rng(0).permutation(ops).astype(np.int64),
        priority=np.zeros(ops, dtype=np.int32),
        indptr=np.zeros(ops + 1, dtype=np.int64),
        indices=np.zeros(0, dtype=np.int32),
        resources=1,
    )
    spans: list[float] = []

    def work() -> None:
        begin = time.perf_counter()
        replay_arrays(arrays)
        spans.extend((begin, time.perf_counter()))

    for _ in range(5):  # the machine may be busy: one good look in five is enough
        spans.clear()
        ticks = []
        thread = threading.Thread(target=work)
        thread.start()
        while not spans:
            ticks.append(time.perf_counter())
            time.sleep(0)
        thread.join()
        begin, end = spans
        seen = [begin, *[t for t in ticks if begin < t < end], end]
        longest = max(b - a for a, b in pairwise(seen))
        if longest < (end - begin) / 2:
            return
    pytest.fail(f"Python stood still for {longest:.3f} of {end - begin:.3f} s")
