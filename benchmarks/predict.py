"""What dpro says of captured steps and of plans never run, as its tuner would: from trace files to numbers.

No job here; the same calls as ``dpro.planning`` makes, for one setting at a time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.comms import COMMS
from dpro.adapter import Knob
from dpro.graph.assemble import assemble
from dpro.graph.graph import Graph
from dpro.passes.contention import relieve
from dpro.passes.ddp_buckets import MIB
from dpro.passes.tensor_fusion import Grouping, captured, ddp_grouping, ready_order
from dpro.plan import Plan
from dpro.planning import inform, replayed_ms
from dpro.replay.baselines import daydream
from dpro.replay.engine import replay
from dpro.search.critical_path import optimize
from dpro.search.judge import Judge
from dpro.trace.model import RankTrace

#: What a tuner may set, by way of synchronising.
KNOBS = {"buckets": {Knob.BUCKET_CAP, Knob.BUCKET_LIST}, "groups": {Knob.GROUPS}}
_SEARCH_S = 10.0


@dataclass(frozen=True)
class Replayed:
    """One capture, replayed; ms per step. ``unaligned_ms``: with the hosts' clocks as they are."""

    replayed_ms: float
    daydream_ms: float
    unaligned_ms: float
    warnings: list[str]


def load(files: Iterable[str | Path]) -> list[RankTrace]:
    """The traces of one capture, by rank."""
    return [RankTrace.load(Path(file)) for file in files]


def replayed(traces: list[RankTrace]) -> Replayed:
    """Replay of a capture beside what others would say of it."""
    graph = assemble(traces)
    unaligned = assemble(traces, align=False)
    return Replayed(
        replayed_ms(graph, traces, replay(graph)),
        daydream(graph) / 1e6,
        replayed_ms(unaligned, traces, replay(unaligned)),
        list(dict.fromkeys(graph.warnings)),
    )


class Predictor:
    """Predicts step times under other buckets or groups, from one capture.

    Args:
        traces: of the captured settings, un-profiled step times included.
        comm: of :data:`benchmarks.comms.COMMS`; one whose plans are buckets or groups.
        measured_ms: un-profiled step time of the captured settings; predictions are it times a ratio of replays.

    Raises:
        ValueError: no bucket was seen to be synchronised.
    """

    def __init__(self, traces: list[RankTrace], comm: str, measured_ms: float) -> None:
        self.graph: Graph = assemble(traces)
        self._sets, self._measured_ms = COMMS[comm].sets, measured_ms
        inform(self.graph, traces)
        if "sync" not in self.graph.info:
            raise ValueError("no bucket was seen to be synchronised")

    @property
    def total_bytes(self) -> int:
        """Of all gradients together."""
        return sum(self.graph.tensors[t].nbytes for t in ready_order(self.graph))

    def spread(self) -> list[tuple[str, Plan]]:
        """Four plans from many buckets to all in one, predicted."""
        total = self.total_bytes
        caps = {
            "24ths": total / 24,
            "eighths": total / 8,
            "thirds": total / 3,
            "all in one": float(total),
        }
        return self.predict([(name, self.uniform(cap)) for name, cap in caps.items()])

    def best(self) -> tuple[str, Plan] | None:
        """The search's best plan, predicted; None where it finds nothing better than the captured settings."""
        found = optimize(self.graph, knobs=KNOBS[self._sets], time_budget_s=_SEARCH_S, top=1)
        if not found.candidates:
            return None
        plan, scale = found.candidates[0].plan, self._measured_ms / found.baseline_ms
        return found.candidates[0].name, replace(plan, predicted_ms=found.candidates[0].predicted_ms * scale)

    def predict(self, plans: list[tuple[str, Plan]]) -> list[tuple[str, Plan]]:
        """The plans with ``predicted_ms`` filled in."""
        graph = self.graph
        mark = graph.mark()
        try:
            relieve(graph, graph.info["sync"])
            judge = Judge(graph, time.monotonic() + 3600)
            scale = self._measured_ms / judge.replayed_ns(captured(graph))  # as it was fused, not once more
            return [(name, replace(p, predicted_ms=judge.step_ns(self.grouping(p)) * scale)) for name, p in plans]
        finally:
            graph.undo(mark)

    def uniform(self, cap_bytes: float) -> Plan:
        """Buckets, or groups, closed as soon as they reach ``cap_bytes``, in the order gradients become ready."""
        if self._sets == "buckets":
            return Plan(bucket_caps=[cap_bytes / MIB])
        graph = self.graph
        groups = ddp_grouping(graph, [int(cap_bytes)])
        return Plan(tensor_groups=[[graph.tensors[t].name for t in group] for group in groups])

    def grouping(self, plan: Plan) -> Grouping:
        """The buckets or groups (tensor numbers) that ``plan`` makes."""
        if plan.bucket_caps:
            return ddp_grouping(self.graph, [int(cap * MIB) for cap in plan.bucket_caps])
        number = {tensor.name: t for t, tensor in enumerate(self.graph.tensors)}
        return tuple(tuple(number[name] for name in group) for group in plan.tensor_groups or [])


def spearman(predicted: list[float], measured: list[float], noise: float) -> float | None:
    """Rank correlation; measured values within the share ``noise`` of one another are ties.

    Measured values are sorted, and a chain of neighbours that are closer than noise shares one mean rank. Predictions
    of plans that tie in the measurement are no evidence either way: they share their mean rank as well. None where
    everything ties.
    """
    order = np.argsort(measured, kind="stable")
    group = np.zeros(len(measured), dtype=int)
    for before, here in itertools.pairwise(order):
        group[here] = group[before] + (measured[here] > measured[before] * (1 + noise))
    place = np.argsort(np.argsort(predicted, kind="stable"), kind="stable").astype(float)
    true = np.argsort(order, kind="stable").astype(float)
    for k in np.unique(group):
        true[group == k] = true[group == k].mean()
        place[group == k] = place[group == k].mean()
    if len(np.unique(group)) < 2:
        return None
    if np.ptp(place) == 0:  # the predictions tell none of the groups apart
        return 0.0
    return float(np.corrcoef(place, true)[0, 1])
