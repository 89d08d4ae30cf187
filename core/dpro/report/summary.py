"""One replay in numbers: what every report (terminal, JSON, HTML) shows of it.

Turns a graph, its replay and its critical path into ms and shares, and says in a sentence where
the time goes and what to try. Knows no output format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dpro.graph.graph import Graph, OpKind

if TYPE_CHECKING:
    from dpro.replay.path import CriticalPath

NS_PER_MS = 1e6


@dataclass
class Summary:
    """Figures of one capture. Times in ms; ``error_pct`` is |replayed - reference| / reference.

    ``reference_ms`` is the step time the replay must meet: un-profiled where the trace carries it
    (``reference`` says so), else as measured under the profiler.
    """

    title: str
    ranks: int
    steps: int
    ops: int
    measured_ms: float
    replayed_ms: float
    daydream_ms: float
    reference_ms: float
    reference: str = "measured"
    breakdown_ms: dict[str, float] = field(default_factory=dict)
    #: (name, kind, count, ms, share of the critical path), largest first
    top: list[tuple[str, str, int, float, float]] = field(default_factory=list)
    critical: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def error_pct(self) -> float | None:
        """None where there is no step time to compare with."""
        if self.reference_ms <= 0:
            return None
        return 100 * abs(self.replayed_ms - self.reference_ms) / self.reference_ms

    @property
    def advice(self) -> str:
        """What to do next, from the largest part of the critical path that a user can change."""
        total = sum(self.breakdown_ms.values())
        if total <= 0:
            return "Nothing ran in this step."
        share = {key: value / total for key, value in self.breakdown_ms.items()}
        if share.get("communication", 0) >= 0.15:
            return (
                f"{share['communication']:.0%} of the step waits for the network with nothing to overlap it: "
                "see what other buckets would do with `dpro optimize`, a faster link with `dpro whatif --bandwidth 2x`."
            )
        if share.get("wait", 0) >= 0.15:
            return (
                f"{share['wait']:.0%} of the step is queueing: work was ready, but its stream or thread was busy. "
                "Look at what runs there first, with `dpro export --perfetto`."
            )
        if share.get("gap", 0) >= 0.25:
            return (
                f"{share['gap']:.0%} of the step is between ops (Python, launches, data loading): "
                "the host is the bottleneck. Try torch.compile, larger batches, or more loader workers."
            )
        return f"Compute bound ({share.get('compute', 0):.0%} of the step): the network is not what limits this job."


def critical_steps(path: CriticalPath) -> list[dict[str, Any]]:
    """The path as JSON values: name, kind, rank, start_ms, ms."""
    return [
        {
            "name": step.name,
            "kind": OpKind(step.kind).name,
            "rank": int(step.rank),
            "start_ms": step.start_ns / NS_PER_MS,
            "ms": (step.end_ns - step.start_ns) / NS_PER_MS,
        }
        for step in path.steps
    ]


def top_ops(critical: Sequence[dict[str, Any]], limit: int = 12) -> list[tuple[str, str, int, float, float]]:
    """The path's time by (name, kind), largest first: (name, kind, count, ms, share)."""
    groups: dict[tuple[str, str], list[float]] = {}
    for step in critical:
        groups.setdefault((step["name"], step["kind"]), []).append(step["ms"])
    end_ms = critical[-1]["start_ms"] + critical[-1]["ms"] if critical else 0.0
    rows = [(name, kind, len(ms), sum(ms), sum(ms) / end_ms if end_ms else 0.0) for (name, kind), ms in groups.items()]
    return sorted(rows, key=lambda row: (-row[3], row[0]))[:limit]


def median_ms(values_ns: Sequence[int] | np.ndarray[Any, Any]) -> float:
    return float(np.median(np.asarray(values_ns, dtype=np.float64))) / NS_PER_MS if len(values_ns) else 0.0


def op_count(graphs: Sequence[Graph]) -> int:
    """Ops of the typical step."""
    return round(float(np.median([len(graph) for graph in graphs]))) if graphs else 0
