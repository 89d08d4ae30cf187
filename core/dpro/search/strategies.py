"""FastT, HeteroG and DisCo asked in one way: a model, a cluster, and what came of it.

Knows who can be asked and how to say what they found; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dpro.errors import DproError
from dpro.graph.cluster import Cluster
from dpro.graph.graph import Graph
from dpro.replay.engine import Replay, replay
from dpro.replay.placed import Judged
from dpro.trace.model_graph import ModelGraph

FASTT, HETEROG, DISCO = "fastt", "heterog", "disco"
STRATEGIES = (FASTT, HETEROG, DISCO)
#: For HeteroG's and DisCo's searches, s, where nobody says.
SECONDS = 30.0


@dataclass(frozen=True)
class Answer:
    """What a strategy found, replayed: ``graph`` is the step as it would run, ``played`` its schedule.

    ``chosen``: the algorithm, or actions, that it comes from. ``baselines``: ms of what needs no search, None where it
    does not fit the memory. ``placement``: device (or what of several) by op; ``order``: ops, the first to start first.
    ``splits``: op, dimension and parts. ``fusions``: DisCo's, by kind. ``peak_bytes``: by device.
    """

    chosen: str
    makespan_ms: float
    baselines: dict[str, float | None]
    graph: Graph
    played: Replay
    seconds: float
    evaluations: int
    fits: bool = True
    placement: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    splits: list[dict[str, Any]] = field(default_factory=list)
    fusions: dict[str, list[list[str]]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def best_baseline_ms(self) -> float | None:
        """Of those that fit."""
        return min((ms for ms in self.baselines.values() if ms is not None), default=None)


def ask(
    strategy: str,
    model: ModelGraph,
    cluster: Cluster,
    *,
    batch: float = 1.0,
    seed: int = 0,
    seconds: float = SECONDS,
    by_layer: bool = False,
) -> Answer:
    """What ``strategy``, one of :data:`STRATEGIES`, makes of a step of ``model`` with ``batch`` times its batch.

    Args:
        seconds: for searches that end when their time is up.
        by_layer: FastT places the layers of one copy, as a running job can be told to; else copies on every device.

    Raises:
        DproError: no such strategy, or one device where it takes several.
    """
    if strategy == FASTT:
        return _fastt(model, cluster, batch, by_layer)
    if strategy == HETEROG:
        return _heterog(model, cluster, batch, seed, seconds)
    if strategy == DISCO:
        return _disco(model, cluster, batch, seed, seconds)
    raise DproError(f"no strategy {strategy!r}: there are {', '.join(STRATEGIES)}")


def _fastt(model: ModelGraph, cluster: Cluster, batch: float, by_layer: bool) -> Answer:
    from dpro.search.fastt import fastt

    found = fastt(model, cluster, batch=batch, by_layer=by_layer)
    judged = found.plan.judged
    splits = [{"op": cut.task, "dimension": str(cut.dimension), "parts": cut.parts} for cut in found.splits]
    return Answer(
        found.strategy, found.makespan_ns / 1e6, found.baselines, judged.placed.graph, judged.played, found.seconds,
        len(found.tried), found.fits, found.placement, found.order, splits, peak_bytes=_peaks(judged, cluster),
    )  # fmt: skip


def _heterog(model: ModelGraph, cluster: Cluster, batch: float, seed: int, seconds: float) -> Answer:
    from dpro.search.fastt import apart
    from dpro.search.hetero import Budget
    from dpro.search.mcts import search

    found = search(model, cluster, batch=batch, budget=Budget(seconds=seconds), seed=seed)
    names = [device.name for device in cluster.devices]
    where: list[list[str]] = [[] for _ in model.ops]
    for number, device in zip(found.tasks.origin.tolist(), found.device.tolist(), strict=True):
        if number >= 0:
            where[number].append(names[device])
    placement = dict(zip(apart([op.name for op in model.ops]), map(" + ".join, where), strict=True))
    baselines = {
        name: None if outcome.over_bytes else outcome.makespan_ns / 1e6 for name, outcome in found.baselines.items()
    }
    started = np.argsort(found.judged.played.start[: len(found.tasks)], kind="stable")
    mix = {name: found.actions.count(name) for name in dict.fromkeys(found.actions)}
    chosen = ", ".join(f"{count} groups {name}" for name, count in mix.items()) or "data parallel"
    return Answer(
        f"{chosen}; {found.order}", found.makespan_ns / 1e6, baselines, found.judged.placed.graph, found.judged.played,
        found.seconds, found.evaluations, found.judged.fits, placement, [found.tasks.names[i] for i in started],
        peak_bytes=_peaks(found.judged, cluster),
    )  # fmt: skip


def _disco(model: ModelGraph, cluster: Cluster, batch: float, seed: int, seconds: float) -> Answer:
    from dpro.cost.fused_choice import estimator
    from dpro.passes.joint_fusion import JointFusion
    from dpro.passes.worker_step import Step
    from dpro.search.backtracking import Settings, all_reduce_line, search

    if len(cluster) < 2:
        raise DproError("DisCo fuses what several devices reduce: the cluster has one")
    # one worker stands for all: the slowest, which the others wait for
    times = cluster.op_times_ns(model.ops)
    slow = [replace(op, time_ns=int(most)) for op, most in zip(model.ops, times.max(axis=1), strict=True)]
    step = Step.of(replace(model, ops=slow), batch / len(cluster))
    fusion = JointFusion(step, estimator(), all_reduce_line(cluster))
    found = search(fusion, Settings(seed=seed, time_budget_s=seconds))
    graph = fusion.lower(found.state, named=True)
    baselines: dict[str, float | None] = {name: ns / 1e6 for name, ns in found.defaults_ns.items()}
    named = fusion.named(found.state)
    chosen = f"{len(named['ops'])} fused kernels, {len(named['reduces'])} AllReduces"
    return Answer(
        chosen,
        found.makespan_ns / 1e6,
        baselines,
        graph,
        replay(graph),
        found.seconds,
        found.evaluations,
        fusions=named,
    )


def _peaks(judged: Judged, cluster: Cluster) -> dict[str, int]:
    return {device.name: int(peak) for device, peak in zip(cluster.devices, judged.peak_bytes, strict=True)}
