"""Layers that a compiler could make one cluster of, and what they take with and without it, as measured in the job.

Part of a capture (``meta.extra``, JSON); whose layers they are, and who compiles them, is known elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: Where a trace's ``meta.extra``, and a graph's ``info``, have them.
REGIONS = "regions"
#: Where a trace's ``meta.extra`` has the names of layers that its ops are of, where they are not in the ops' names.
LAYERS = "layers"
#: Nobody measures more, and nothing takes longer, ns.
_MOST_REGIONS, _MOST_NS = 10_000, 1 << 40
#: What stands before the path of a layer in the name of one of its ops: the model, and the tape for the backward pass.
_PATH = re.compile(r"(gradient_tape/)?[^/]+/(.+)")


@dataclass(frozen=True)
class RegionTime:
    """Time of a region, ns: forward and backward pass, as the framework runs them and compiled to one cluster."""

    forward_ns: int
    backward_ns: int
    fused_forward_ns: int
    fused_backward_ns: int

    @property
    def plain_ns(self) -> int:
        return self.forward_ns + self.backward_ns

    @property
    def fused_ns(self) -> int:
        return self.fused_forward_ns + self.fused_backward_ns


@dataclass(frozen=True)
class Region:
    """A run of layers that follow each other. Those of one ``kind`` compute alike, and were timed once for all.

    ``layers`` are called as in ``plan.compile_regions``; ``tensors`` are the gradients of their weights.
    """

    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    kind: str
    time: RegionTime


def dump(regions: Iterable[Region]) -> dict[str, Any]:
    """As JSON values."""
    told: dict[str, Any] = {"times": {}, "regions": []}
    for region in regions:
        time = region.time
        told["times"][region.kind] = [
            time.forward_ns, time.backward_ns, time.fused_forward_ns, time.fused_backward_ns
        ]  # fmt: skip
        told["regions"].append({"layers": [*region.layers], "tensors": [*region.tensors], "kind": region.kind})
    return told


def load(told: Any) -> list[Region]:
    """What :func:`dump` gave, of a stored trace, which may hold anything: what is no such region is left out."""
    if not isinstance(told, dict) or not isinstance(told.get("times"), dict):
        return []
    listed = told.get("regions")
    times = {kind: RegionTime(*ns) for kind, ns in told["times"].items() if _are_times(ns)}
    return [
        Region(tuple(one["layers"]), tuple(one["tensors"]), one["kind"], times[one["kind"]])
        for one in (listed[:_MOST_REGIONS] if isinstance(listed, list) else ())
        if isinstance(one, dict)
        and all(_are_names(one.get(key)) for key in ("layers", "tensors"))
        and one["layers"]
        and isinstance(one.get("kind"), str)
        and one["kind"] in times
    ]


def load_layers(told: Any) -> list[str]:
    """What is stored under :data:`LAYERS`; none of what is no list of names."""
    return told if _are_names(told) else []


def named(layer: str, op: str, back: bool) -> str:
    """An op's name with its layer in it, as :class:`LayerOps` finds it again."""
    return f"{'gradient_tape/' if back else ''}model/{layer}/{op}"


class LayerOps:
    """Tells to which of some layers an op belongs, by the op's name."""

    def __init__(self, layers: Iterable[str]) -> None:
        self._layers = frozenset(layers)

    def __call__(self, op: str) -> tuple[str, bool] | None:
        """The layer (of nested ones the outermost), and whether the op is of its backward pass."""
        path = _PATH.match(op)
        if path is None:
            return None
        parts = path[2].split("/")
        for end in range(1, len(parts)):
            if (layer := "/".join(parts[:end])) in self._layers:
                return layer, path[1] is not None
        return None


def _are_times(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(type(ns) is int and 0 <= ns < _MOST_NS for ns in value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
