"""Which collective is which: by hand, and common subsequences against the textbook's dynamic programme."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dpro.clock.match import common_subsequence, match_collectives
from dpro.trace.model import Collective, EventKind, Meta, RankTrace, TraceBuilder

STEP_NS = 1_000


def rank(*steps: str) -> RankTrace:
    """One collective per word of each step, as name:group."""
    builder = TraceBuilder(Meta())
    for step, words in enumerate(steps):
        for place, word in enumerate(words.split()):
            name, _, group = word.partition(":")
            at = step * STEP_NS + 10 * place
            builder.add(name, EventKind.COLLECTIVE, "stream/7", at, at + 5, Collective(name, group))
    return builder.freeze([(k * STEP_NS, (k + 1) * STEP_NS) for k in range(len(steps))])


def test_steps_groups_and_order_tell_which_is_which() -> None:
    # rank 1 lost the reduce of step 0 and the first gather of step 1
    first = rank("reduce gather reduce:a", "gather reduce gather")
    second = rank("gather reduce:b", "reduce gather")
    assert sorted(match_collectives([first, second]).tolist()) == [[1, 0], [4, 2], [5, 3]]


def test_a_rank_that_lost_one_does_not_part_the_others() -> None:
    found = match_collectives([rank("reduce"), rank("reduce gather"), rank("reduce gather"), rank("reduce:x")])
    assert found.tolist() == [[0, 0, 0, -1], [-1, 1, 1, -1]]


def test_alone_and_outside_every_step_there_is_nothing_to_match() -> None:
    assert match_collectives([rank("reduce")]).shape == (0, 1)
    late = rank("reduce")
    late.step_bounds = late.step_bounds + STEP_NS
    assert match_collectives([rank("reduce"), late]).shape == (0, 2)


def test_a_kernel_belongs_to_the_step_that_launched_it() -> None:
    traces = []
    for start in (90, 110):  # the second rank's device is behind: its kernel starts in the next step
        builder = TraceBuilder(Meta())
        builder.add("cudaLaunchKernel", EventKind.RUNTIME, "cpu/1", 50, 55, flow=1)
        builder.add("k", EventKind.COLLECTIVE, "stream/7", start, 150, Collective("all_reduce"), flow=1)
        traces.append(builder.freeze([(0, 100), (100, 200)]))
    assert match_collectives(traces).tolist() == [[1, 1]]


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_common_subsequence_is_one_and_is_longest(a: str, b: str) -> None:
    pairs = common_subsequence(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))
    length = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            length[i + 1][j + 1] = length[i][j] + 1 if x == y else max(length[i][j + 1], length[i + 1][j])
    assert len(pairs) == length[-1][-1]


def test_of_equals_the_earliest_are_taken() -> None:
    assert common_subsequence("aaa", "aa") == [(0, 0), (1, 1)]
    assert common_subsequence("aa", "aaa") == [(0, 0), (1, 1)]


def test_thousands_of_equal_names_are_no_trouble() -> None:
    a, b = ["all_reduce"] * 4_000 + ["gather"], ["gather"] + ["all_reduce"] * 4_000
    assert len(common_subsequence(a, b)) == 4_000
