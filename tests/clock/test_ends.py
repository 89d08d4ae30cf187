"""Clock offsets from the ends of collectives, on spans chosen by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.clock.ends import align_on_ends
from dpro.trace.model import Collective, EventKind, Meta, RankTrace, TraceBuilder


def rank(spans: list[tuple[int, int]], host: str = "") -> RankTrace:
    builder = TraceBuilder(Meta(rank=0, host=host))
    for start, end in spans:
        builder.add("all_reduce", EventKind.COLLECTIVE, "stream/7", start, end, Collective("all_reduce"))
    return builder.freeze([(0, 10_000_000)])


REFERENCE = [(100, 1_000), (2_000, 3_000), (4_500, 5_000)]


def test_ends_decide_not_starts() -> None:
    # all ends 400 later on the other clock, starts wherever that rank happened to arrive
    other = [(1_300, 1_400), (1_900, 3_400), (4_500, 5_400)]
    found = align_on_ends([rank(REFERENCE), rank(other)])
    assert found.offsets_ns == [0, -400]
    assert found.spread_ns == [0, 0]
    assert found.used == [3, 3]


def test_one_late_end_does_not_move_the_clock() -> None:
    other = [(100, 1_000), (2_000, 3_000), (4_500, 5_900)]
    assert align_on_ends([rank(REFERENCE), rank(other)]).offsets_ns == [0, 0]


def test_nobody_leaves_before_everybody_arrived() -> None:
    # ends say -900, but the third collective started at 4,600 there: added -900 is 3,700, fine; the first
    # ended at 1,900 there and the reference arrived at 1,050: the offset can't be below 1,050 - 1,900
    reference = [(1_050, 1_060), (2_000, 3_000), (4_500, 5_000)]
    other = [(1_000, 1_900), (2_900, 3_900), (4_600, 5_900)]
    assert align_on_ends([rank(reference), rank(other)]).offsets_ns == [0, -850]


def test_one_host_has_one_clock() -> None:
    noisy = [(100, 1_300), (2_000, 3_300), (4_500, 5_300)]
    assert align_on_ends([rank(REFERENCE, "a"), rank(noisy, "a")]).offsets_ns == [0, 0]
    assert align_on_ends([rank(REFERENCE, "a"), rank(noisy, "b")]).offsets_ns == [0, -300]
    # the same name twice with clocks that can't be one: the ends decide
    far = (np.asarray(noisy) + 10_000).tolist()
    assert align_on_ends([rank(REFERENCE, "a"), rank(far, "a")]).offsets_ns == [0, -10_300]


@pytest.mark.parametrize("spans", [[], [(1, 2)]])
def test_nothing_in_common(spans: list[tuple[int, int]]) -> None:
    builder = TraceBuilder(Meta(rank=1))
    builder.add("x", EventKind.CPU_OP, "cpu/1", 0, 5)
    assert align_on_ends([rank(spans), builder.freeze([(0, 9)])]).offsets_ns == [0, 0]
