"""Our model of DDP's bucketing against the installed torch, and against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.passes.ddp_buckets import DEFAULT_LIMITS, MIB, assign, caps_for, limits_bytes


def test_default_limits_by_hand() -> None:
    # 0.5 MiB tensors: two fill the first bucket, fifty each further one
    buckets = assign([MIB // 2] * 103, ["float32"] * 103, DEFAULT_LIMITS)
    assert [len(b) for b in buckets] == [2, 50, 50, 1]


def test_a_bucket_closes_when_it_reaches_its_cap_not_before() -> None:
    assert assign([10, 10, 10, 30, 1], ["f"] * 5, [15, 40]) == [[0, 1], [2, 3], [4]]


def test_each_dtype_has_its_own_place_in_the_list() -> None:
    # f: caps 10 then 20; h: caps 10 then 20, unfinished
    assert assign([10, 5, 10, 10, 5], ["f", "h", "f", "f", "h"], [10, 20]) == [[0], [2, 3], [1, 4]]


@pytest.mark.parametrize(
    ("caps", "first", "limits"),
    [
        (None, None, (MIB, 25 * MIB)),
        ([4], None, (4 * MIB,)),
        ([4], MIB, (MIB, 4 * MIB)),
        ([0.5, 2], MIB, (MIB // 2, 2 * MIB)),
    ],
)
def test_limits(caps: list[float] | None, first: int | None, limits: tuple[int, ...]) -> None:
    assert limits_bytes(caps, first) == limits


def test_no_caps() -> None:
    with pytest.raises(ValueError):
        assign([1], ["f"], [])
    with pytest.raises(ValueError):
        assign([1], ["f", "f"], [1])


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    """Element counts and dtypes; sizes small, so that caps are met exactly now and then."""
    n = draw(st.integers(1, 25))
    elements = draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
    kinds = draw(st.sampled_from([["float32"], ["float32", "bfloat16"], ["float32", "float16", "float64"]]))
    return elements, draw(st.lists(st.sampled_from(kinds), min_size=n, max_size=n))


def _ask_torch(elements: list[int], dtypes: list[str], limits: list[int]) -> list[list[int]]:
    torch: Any = pytest.importorskip("torch")
    tensors = [torch.empty(n, dtype=getattr(torch, dtype)) for n, dtype in zip(elements, dtypes, strict=True)]
    # Given indices, as in the rebuild by ready order: the result is not sorted.
    order = list(range(len(tensors)))
    found: list[list[int]] = torch.distributed._compute_bucket_assignment_by_size(tensors, limits, [], order)[0]
    return found


_WIDTH = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


@settings(max_examples=150, deadline=None)
@given(_tensors(), st.lists(st.integers(0, 120), min_size=1, max_size=6))
def test_assign_is_what_torch_does(tensors: tuple[list[int], list[str]], limits: list[int]) -> None:
    elements, dtypes = tensors
    nbytes = [n * _WIDTH[dtype] for n, dtype in zip(elements, dtypes, strict=True)]
    assert assign(nbytes, dtypes, limits) == _ask_torch(elements, dtypes, limits)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.booleans()), min_size=1, max_size=30))
def test_any_contiguous_grouping_of_one_dtype_is_expressible(tensors: list[tuple[int, bool]]) -> None:
    groups: list[list[int]] = [[]]
    for i, (_, ends) in enumerate(tensors):
        groups[-1].append(i)
        if ends and i + 1 < len(tensors):
            groups.append([])
    elements, dtypes = [n for n, _ in tensors], ["float32"] * len(tensors)
    caps = caps_for(groups, [4 * n for n in elements], dtypes)
    assert caps is not None
    assert [int(cap * MIB) for cap in caps] == [4 * sum(elements[i] for i in group) for group in groups]
    assert _ask_torch(elements, dtypes, list(limits_bytes(caps))) == groups


@settings(max_examples=80, deadline=None)
@given(_tensors(), st.lists(st.integers(1, 120), min_size=1, max_size=4))
def test_caps_for_mixed_dtypes_are_right_or_none(tensors: tuple[list[int], list[str]], limits: list[int]) -> None:
    elements, dtypes = tensors
    nbytes = [n * _WIDTH[dtype] for n, dtype in zip(elements, dtypes, strict=True)]
    groups = assign(nbytes, dtypes, limits)
    caps = caps_for(groups, nbytes, dtypes)
    if caps is not None:
        assert _ask_torch(elements, dtypes, list(limits_bytes(caps))) == groups


@pytest.mark.parametrize(
    ("groups", "dtypes"),
    [
        ([[0, 1, 2]], ["f", "h", "f"]),  # mixed
        ([[0], [2]], ["f", "f", "f"]),  # one left out
        ([[0, 2], [1]], ["f", "f", "f"]),  # not contiguous
        ([[1, 0], [2]], ["f", "f", "f"]),  # not in order
        ([[0], [], [1, 2]], ["f", "f", "f"]),
        ([], ["f", "f", "f"]),
    ],
)
def test_not_expressible(groups: list[list[int]], dtypes: list[str]) -> None:
    assert caps_for(groups, [8, 8, 8], dtypes) is None


def test_dtypes_that_contradict_each_other() -> None:
    # f wants its first bucket to hold 8 bytes and no more, h wants 16 in its first and something after
    nbytes, dtypes = [8, 8, 8, 8, 8], ["f", "f", "h", "h", "h"]
    assert caps_for([[0], [1], [2, 3], [4]], nbytes, dtypes) is None
    # f's second bucket may stay open while h's is filled, but then it comes last
    assert caps_for([[0], [1], [2], [3, 4]], nbytes, dtypes) is None
    assert caps_for([[0], [2], [3, 4], [1]], nbytes, dtypes) is not None
