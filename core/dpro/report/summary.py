"""One replay in numbers: what every report (terminal, JSON, HTML) shows of it.

Turns a graph, its replay and its critical path into ms and shares, and says in a sentence where
the time goes and what to try. Knows no output format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.replay.baselines import daydream
from dpro.replay.engine import replay
from dpro.replay.path import CriticalPath, critical_path

NS_PER_MS = 1e6


@dataclass(frozen=True)
class LinkRow:
    """One link direction over the captured steps; shares are of their time.

    ``busy_share``: bytes of a collective were under way. ``mbit_s``: payload over the busy time. ``queue_us``: mean
    time of a message behind others. ``late_share``: the receiver was in the collective, the sender not yet.
    """

    link: str
    messages: int
    nbytes: int
    busy_share: float
    mbit_s: float | None
    queue_us: float
    late_share: float


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
    #: ms of ``compute`` that are host ops beside a device (0 in a job without one: there the host computes)
    launching_ms: float = 0.0
    #: (name, kind, count, ms, share of the step) of ops on the critical path, largest first
    top: list[tuple[str, str, int, float, float]] = field(default_factory=list)
    critical: list[dict[str, Any]] = field(default_factory=list)
    links: list[LinkRow] = field(default_factory=list)
    #: share of the payload bytes on the wire whose collective is known; None where no message was seen
    attributed_share: float | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def error_pct(self) -> float | None:
        """None where there is no step time to compare with."""
        if self.reference_ms <= 0:
            return None
        return 100 * abs(self.replayed_ms - self.reference_ms) / self.reference_ms

    @property
    def size(self) -> str:
        """How much was captured, in words."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        return f"{ranks} · {self.steps} step{'s' * (self.steps != 1)} · {self.ops:,} ops per step"

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
                f"{share['wait']:.0%} of the step goes by in ops that hold no thread, stream or link (latency): "
                "see which with `dpro export --perfetto`, on the track named other."
            )
        host = share.get("gap", 0) + self.launching_ms / total
        if host >= 0.25:
            return (
                f"{host:.0%} of the step is host work (Python, launches, data loading) that the device waits for: "
                "try torch.compile, CUDA graphs, larger batches or more loader workers."
            )
        return f"Compute bound ({share.get('compute', 0):.0%} of the step): the network is not what limits this job."


def summarise(graph: Graph, title: str, warnings: Sequence[str] = ()) -> Summary:
    """Replay ``graph`` and sum it up. The step it must meet is un-profiled where the graph knows one."""
    played = replay(graph)
    path = critical_path(graph, played)
    measured_ms = graph.info.get("measured_ns", 0.0) / NS_PER_MS
    unprofiled_ns = graph.info.get("unprofiled_ns")
    critical = critical_steps(path)
    return Summary(
        title=title,
        ranks=graph.ranks,
        steps=graph.info.get("captured_steps", 1),
        ops=len(graph),
        measured_ms=measured_ms,
        replayed_ms=played.makespan_ns / NS_PER_MS,
        daydream_ms=daydream(graph) / NS_PER_MS,
        reference_ms=unprofiled_ns / NS_PER_MS if unprofiled_ns else measured_ms,
        reference="un-profiled" if unprofiled_ns else "measured",
        breakdown_ms={key: value / NS_PER_MS for key, value in path.breakdown.items()},
        launching_ms=_launching_ns(graph, path) / NS_PER_MS,
        top=top_ops(critical),
        critical=critical,
        links=link_rows(graph),
        attributed_share=graph.info.get("messages", {}).get("attributed_share"),
        warnings=list(dict.fromkeys([*warnings, *graph.warnings])),
    )


def _launching_ns(graph: Graph, path: CriticalPath) -> int:
    """Time of the path on host threads, if there is a device they could be ahead of."""
    host = np.asarray(["/cpu/" in name for name in graph.resource_names], "?")
    if not any("/stream/" in name for name in graph.resource_names):
        return 0
    resource = graph.column("resource")
    return sum(
        step.end_ns - step.start_ns
        for step in path.steps
        if resource[step.op] != NO_RESOURCE and host[resource[step.op]]
    )


def link_rows(graph: Graph) -> list[LinkRow]:
    """What the captured messages say of every link direction; none without messages."""
    facts = graph.info.get("messages", {"links": []})
    return [
        LinkRow(
            f"{link['sender']} → {link['receiver']}",
            link["messages"],
            link["nbytes"],
            link["transmit_ns"] / facts["span_ns"],
            8e3 * link["nbytes"] / link["transmit_ns"] if link["transmit_ns"] else None,
            link["queue_ns"] / link["messages"] / 1e3,
            link["wait_ns"] / facts["span_ns"],
        )
        for link in facts["links"]
        if facts["span_ns"] > 0
    ]


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
    """The path's time by (name, kind), largest first: (name, kind, count, ms, share of the step)."""
    groups: dict[tuple[str, str], list[float]] = {}
    for step in critical:
        groups.setdefault((step["name"], step["kind"]), []).append(step["ms"])
    end_ms = critical[-1]["start_ms"] + critical[-1]["ms"] if critical else 0.0
    rows = [(name, kind, len(ms), sum(ms), sum(ms) / end_ms if end_ms else 0.0) for (name, kind), ms in groups.items()]
    return sorted(rows, key=lambda row: (-row[3], row[0]))[:limit]
