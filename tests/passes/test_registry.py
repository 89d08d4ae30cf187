"""Passes by name: the built-in ones, third parties', and broken third parties'."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from dpro.errors import DproError
from dpro.passes import registry
from dpro.passes.tensor_fusion import TensorFusion


class Widen(TensorFusion):
    name = "widen"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("third_party")
    module.Widen, module.NoPass = Widen, int
    monkeypatch.setitem(sys.modules, "third_party", module)
    values = {"widen": "Widen", "no_pass": "NoPass", "missing": "Missing", "tensor_fusion": "NoPass"}
    points = EntryPoints(EntryPoint(n, f"third_party:{v}", registry.ENTRY_POINT_GROUP) for n, v in values.items())
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))


def test_built_in() -> None:
    for name in ("batched_copy", "bucket_view", "cycle_time", "op_fusion", "tensor_fusion"):
        assert name in registry.names()
        assert registry.find(name).name == name
    assert isinstance(registry.find("tensor_fusion"), TensorFusion)


@pytest.mark.usefixtures("installed")
def test_third_party() -> None:
    built_in = [
        "accumulate",
        "batch_shares",
        "batched_copy",
        "bucket_view",
        "compression",
        "cycle_time",
        "fused_partition",
        "in_flight",
    ]
    built_in += ["mixed_precision", "op_fusion", "recompute", "tensor_fusion", "tensor_partition"]
    assert registry.names() == sorted([*built_in, "missing", "no_pass", "widen"])
    assert isinstance(registry.find("widen"), Widen)
    assert registry.built_in("tensor_fusion") and not registry.built_in("widen")
    assert type(registry.find("tensor_fusion")) is TensorFusion  # not to be replaced from outside


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "reason"), [("missing", "Missing"), ("no_pass", "Pass protocol"), ("x", "no pass")])
def test_broken_is_one_line(name: str, reason: str) -> None:
    with pytest.raises(DproError, match=reason) as caught:
        registry.find(name)
    assert "\n" not in str(caught.value)
