"""How a plan's gradients go to BytePS' servers in turn, and which plans are refused. No BytePS is needed for that."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from dpro.errors import PlanError
from dpro.plan import Plan
from dpro_integrations import byteps_partitions
from dpro_integrations.byteps_flow import Piece, flow_of
from dpro_integrations.byteps_partitions import Bounds

PAGE = 4096
KNOWN = {"a": 3 * PAGE, "b": 8, "c": PAGE + 4}


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Bounds:
    monkeypatch.setenv("BYTEPS_PARTITION_BYTES", str(4 * PAGE))
    return Bounds(ctypes.CDLL(None), lambda _: None, 1)


def plan(**more: Any) -> Plan:
    wanted = {"partitions": dict.fromkeys(KNOWN, 2 * PAGE), "in_flight_bytes": 3 * PAGE, "push_order": ["c", "a", "b"]}
    return Plan(**(wanted | more))


def test_pieces_go_in_the_plans_order_and_wait_for_what_was_before(bounds: Bounds) -> None:
    flow = flow_of(plan(), KNOWN, bounds)
    assert flow.pieces == (
        Piece("c", 0, 0, PAGE + 4, True),
        Piece("a", 0, 0, 2 * PAGE, False),
        Piece("a", 1, 2 * PAGE, 3 * PAGE, False),
        Piece("b", 0, 0, 8, True),
    )
    # 1 page and 4 bytes, 2 more: too much; 1 more beside the 2; 8 bytes find no room beside these 3
    assert flow.waits() == [[], [0], [0], [1]]
    assert flow.waits([1, 2, 3]) == [[], [], [1]]  # without the first
    assert flow.of("a") == [1, 2]


def test_another_limit_needs_no_other_names(bounds: Bounds) -> None:
    assert flow_of(plan(), KNOWN, bounds).key == flow_of(plan(in_flight_bytes=1), KNOWN, bounds).key
    assert flow_of(plan(), KNOWN, bounds).key != flow_of(plan(push_order=["a", "b", "c"]), KNOWN, bounds).key


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"push_order": None}, "not the job's (a, b)"),
        ({"push_order": ["a", "b"]}, "not the job's (c)"),
        ({"push_order": ["a", "b", "c", "c"]}, "some more than once"),
        ({"push_order": ["a", "b", "c", "d"]}, "not the job's (d)"),
        ({"partitions": {"a": PAGE, "b": PAGE}}, "not the job's (c)"),
        ({"partitions": None}, "not the job's"),
        ({"partitions": {"a": PAGE + 1, "b": PAGE, "c": PAGE}}, "no whole pages"),
    ],
)
def test_a_plan_that_does_not_fit_is_one_line(more: dict[str, Any], said: str, bounds: Bounds) -> None:
    with pytest.raises(PlanError) as refused:
        flow_of(plan(**more), KNOWN, bounds)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_parts_that_byteps_would_cut_are_refused(bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_PARTITION_BYTES", str(PAGE))
    with pytest.raises(PlanError, match="cuts what is larger than 4096 bytes"):
        flow_of(plan(), KNOWN, bounds)


def test_names_are_limited(bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limited, pytest.raises(PlanError, match="4 parts need as many names"):
        limited.setattr(byteps_partitions, "MOST_GRADIENTS", 3)
        flow_of(plan(), KNOWN, bounds)
    monkeypatch.setattr(byteps_partitions, "_made", byteps_partitions.MOST_BOUNDS)
    with pytest.raises(PlanError, match="frees no memory"):
        flow_of(plan(), KNOWN, bounds)
