"""What a graph pass is, and where to find one by name.

Knows no pass by itself: built-in ones are named here and imported when asked for, and an installed package
adds its own through the entry point group ``dpro.passes`` (value: a class without constructor arguments).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

from dpro.adapter import Knob
from dpro.errors import DproError
from dpro.graph.graph import Graph

ENTRY_POINT_GROUP = "dpro.passes"
_BUILT_IN = {
    "accumulate": "dpro.passes.accumulate:Accumulate",
    "batch_shares": "dpro.passes.batch_shares:BatchShares",
    "batched_copy": "dpro.passes.batched_copy:BatchedCopy",
    "bucket_view": "dpro.passes.bucket_view:BucketView",
    "compression": "dpro.passes.compression:Compression",
    "cycle_time": "dpro.passes.cycle_time:CycleTime",
    "mixed_precision": "dpro.passes.mixed_precision:MixedPrecision",
    "op_fusion": "dpro.passes.op_fusion:OpFusion",
    "recompute": "dpro.passes.recompute:Recompute",
    "tensor_fusion": "dpro.passes.tensor_fusion:TensorFusion",
    "fused_partition": "dpro.passes.fused_partition:FusedPartition",
    "in_flight": "dpro.passes.in_flight:InFlight",
    "tensor_partition": "dpro.passes.tensor_partition:TensorPartition",
}


@runtime_checkable
class Pass(Protocol):
    """One way to change a graph. A candidate is a hashable value that says how; its form is the pass's own."""

    name: str
    #: Any one of these lets a plan carry the pass's result into a job.
    knobs: frozenset[Knob]

    def candidates(self, graph: Graph) -> Iterable[Any]:
        """A few legal candidates worth trying, best guesses first."""

    def legal(self, graph: Graph, candidate: Any) -> bool:
        """Whether :meth:`apply` may be called with it and a job could be set that way."""

    def apply(self, graph: Graph, candidate: Any) -> int:
        """Edit the graph; returns the mark that ``graph.undo`` takes back to the state before."""

    def cost(self, graph: Graph, candidate: Any) -> float:
        """A cheap figure in ns, smaller is better, to rank candidates before they are replayed."""


def names() -> list[str]:
    """Every pass that :func:`find` knows, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def built_in(name: str) -> bool:
    """Whether it is dpro's own."""
    return name in _BUILT_IN


def find(name: str) -> Pass:
    """Make the pass registered under ``name``; a built-in one wins over a third party's.

    Raises:
        DproError: no such pass, or the package that offers it is broken.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        made = getattr(import_module(module), attribute)()
    else:
        points = [*entry_points(group=ENTRY_POINT_GROUP, name=name)]
        if not points:
            raise DproError(f"no pass named {name!r}; there are: {', '.join(names())}")
        made = _make(points[0])
    if not isinstance(made, Pass):
        raise DproError(f"pass {name!r}: {type(made).__name__} lacks part of the Pass protocol")
    return made


def _make(point: EntryPoint) -> Any:
    try:
        return point.load()()
    except Exception as error:  # whatever a third party's import raises must not end the job
        raise DproError(f"pass {point.name!r} ({point.value}): {error}") from error
