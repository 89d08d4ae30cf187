"""Rank 0's work between capture and trial: traces in, judged plans out. No job, no framework."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dpro.adapter import Knob
from dpro.errors import TraceError
from dpro.plan import Plan
from dpro.settings import Settings
from dpro.trace.model import GRADIENT_DTYPES, RankTrace
from dpro.verdict import slowest_rank, timing

if TYPE_CHECKING:
    from dpro.cost.ps import PsModel
    from dpro.cost.sync import SyncModel
    from dpro.graph.graph import Graph
    from dpro.replay.engine import Replay
    from dpro.search.team import Team
    from dpro.session import Session

#: Share of a captured bucket's time from which its latency is worth doubting.
_LATENCY_MATTERS = 0.02
#: How far below its budget a plan is to stay, as predicted.
_MEMORY_MARGIN = 0.01
#: A capture larger than this is not sent: dpro must not be the job's heaviest message.
MAX_TRACE_BYTES = 64 << 20


@dataclass
class Planned:
    """What the traces say and what could be better."""

    #: slowest rank's step times before capture, ms
    unprofiled_ms: list[float]
    #: replayed step time of the captured settings, ms
    replayed_ms: float
    capture_overhead_pct: float | None
    #: (name for people, plan with ``predicted_ms``), best first
    plans: list[tuple[str, Plan]] = field(default_factory=list)
    #: what is better than all of them and takes effect only when a job is started, best first
    at_start: list[tuple[str, Plan]] = field(default_factory=list)
    #: why there are no plans, if there are none
    why_none: str = "no plan is predicted to be faster than your settings"
    #: replayed peak memory of the captured settings, bytes, the largest rank's; None: not measured
    peak_bytes: int | None = None
    #: it is above the budget, and the plans are there to make the job fit
    must_fit: bool = False
    evaluations: int = 0
    search_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    #: framework, world size, fingerprint
    job: dict[str, Any] = field(default_factory=dict)
    graph: Graph | None = None
    replay: Replay | None = None


def without_steps(trace: RankTrace, steps: list[int]) -> RankTrace:
    """``trace`` less some of its steps, whose events then belong to none.

    Raises:
        RuntimeError: no step would be left.
    """
    kept = np.setdiff1d(np.arange(trace.steps), steps)
    if not len(kept):
        raise RuntimeError("every captured step was interrupted (validation, a checkpoint)")
    number = np.full(trace.steps + 1, -1, dtype=np.int32)  # the last entry is for "no step", -1
    number[kept] = np.arange(len(kept), dtype=np.int32)
    trace.columns["step"] = number[trace.step]
    trace.step_bounds = trace.step_bounds[kept]
    return trace


def pack_trace(trace: RankTrace) -> bytes:
    """A trace as bytes for the meeting."""
    buffer = io.BytesIO()
    trace.save(buffer)
    blob = buffer.getvalue()
    if len(blob) > MAX_TRACE_BYTES:
        raise TraceError("capture", f"{len(blob) >> 20} MiB is too large to send; capture fewer steps")
    return blob


def inform(graph: Graph, traces: list[RankTrace]) -> None:
    """What a search must know beyond the graph: the library's settings, what a bucket costs, and a round with nothing.

    ``graph.info["sync"]`` is not there afterwards where no bucket was seen. A parameter server job has
    ``graph.info["ps_model"]`` in its place.
    """
    from dpro.cost.ps import MODEL, fit_ps
    from dpro.cost.sync import fit_buckets, idle_share
    from dpro.graph.assemble import assemble_steps
    from dpro.graph.ps_ops import INFO
    from dpro.search.view import waited_for
    from dpro.trace.memory import MICRO, load_micro
    from dpro.trace.regions import REGIONS, load
    from dpro.trace.shares import SHARES, load_share

    if INFO in graph.info:
        with contextlib.suppress(ValueError):
            graph.info[MODEL] = fit_ps(assemble_steps(traces))
        return
    graph.info.update(traces[0].meta.library())
    graph.info[GRADIENT_DTYPES] = traces[0].meta.gradient_dtypes()
    graph.info[MICRO] = {trace.meta.rank: load_micro(trace.meta.extra.get(MICRO)) for trace in traces}
    graph.info[SHARES] = {trace.meta.rank: load_share(trace.meta.extra.get(SHARES)) for trace in traces}
    graph.info[REGIONS] = [region for trace in traces for region in load(trace.meta.extra.get(REGIONS))]
    contention = [trace.meta.contention for trace in traces]
    graph.info["idle_share"] = idle_share(contention)
    # what a transfer takes is told by those that it waits for
    ranks = waited_for(graph)
    few = [trace for rank, trace in enumerate(traces) if rank in ranks]
    with contextlib.suppress(ValueError):  # nothing to fit to: the search says so
        steps = min(trace.steps for trace in traces)
        graph.info["sync"] = fit_buckets(assemble_steps(few), contention=contention, steps=steps)


def replayed_ms(graph: Graph, traces: list[RankTrace], played: Replay) -> float:
    """The step under the job's own settings: ``played``, the replay of ``graph``, unless it was recorded under others.

    That is so for a parameter server job with more partitions than can be recorded: theirs are the cost model's.
    """
    from dpro.passes.tensor_partition import TensorPartition, captured, own
    from dpro.replay.engine import replay

    if (cuts := own(graph)) == captured(graph):
        return played.makespan_ns / 1e6
    inform(graph, traces)
    if "ps_model" not in graph.info:
        return played.makespan_ns / 1e6
    mark = TensorPartition().apply(graph, cuts)
    try:
        return replay(graph).makespan_ns / 1e6
    finally:
        graph.undo(mark)


def make_plans(
    blobs: list[bytes],
    knobs: set[Knob],
    fingerprint: dict[str, str],
    settings: Settings,
    session: Session,
    team: Team | None = None,
) -> Planned:
    """Assemble, replay and search; ``blobs`` are the packed traces by rank, ``team`` the ranks that replay as well."""
    from dpro.graph.assemble import assemble
    from dpro.graph.horovod import with_responses
    from dpro.graph.ps import is_ps
    from dpro.replay.engine import replay
    from dpro.replay.memory import peak_bytes
    from dpro.search.critical_path import optimize

    traces = [RankTrace.load(io.BytesIO(blob)) for blob in blobs]
    told = traces if any(map(is_ps, traces)) else with_responses(traces)
    kept = [blob if new is old else pack_trace(new) for new, old, blob in zip(told, traces, blobs, strict=True)]
    traces = told
    session.keep_traces({trace.meta.rank: blob for trace, blob in zip(traces, kept, strict=True)})
    unprofiled_ms = slowest_rank([trace.meta.unprofiled_step_ns for trace in traces]) / 1e6
    profiled_ms = slowest_rank([trace.meta.extra["profiled_step_ns"] for trace in traces]) / 1e6
    measured_ms, overhead_pct = timing(unprofiled_ms).median_ms, None
    if measured_ms and len(profiled_ms):
        overhead_pct = 100 * (timing(profiled_ms).median_ms / measured_ms - 1)
    graph = assemble(traces)
    played = replay(graph)
    planned = Planned(
        unprofiled_ms=unprofiled_ms.tolist(),
        replayed_ms=replayed_ms(graph, traces, played),
        capture_overhead_pct=overhead_pct,
        warnings=list(dict.fromkeys(graph.warnings)),
        job={"framework": traces[0].meta.framework, "world_size": len(traces), "fingerprint": fingerprint},
        graph=graph,
        replay=played,
    )
    if settings.memory_bytes:
        planned.peak_bytes = max(peak_bytes(graph, played).values(), default=None)
        if planned.peak_bytes is None:
            planned.warnings.append("memory was not measured: its budget is not looked at")
    if not settings.bucket_views:
        knobs = knobs - {Knob.BUCKET_VIEW}
    if not settings.lossy:
        knobs = knobs - {Knob.COMPRESSION}
    if not knobs or settings.mode == "observe":
        return planned
    if not measured_ms:
        planned.why_none = "no step could be timed before capture"
        return planned
    inform(graph, traces)
    if (planned.peak_bytes or 0) > settings.memory_bytes > 0:
        _make_fit(planned, knobs, settings.memory_bytes, settings.search_s)
        return planned
    mark = graph.mark()
    shares = _share_batches(planned, knobs, measured_ms)
    # The replay's own clock may run a little fast or slow; what it says of two plans is their ratio.
    for cost, model in _beliefs(graph):
        if model is not None:
            graph.info[cost] = model
        budget_s = max(0.0, settings.search_s - planned.search_s)
        found = optimize(
            graph, knobs=knobs, fingerprint=fingerprint, time_budget_s=budget_s, top=settings.trials, team=team
        )
        planned.evaluations += found.evaluations
        planned.search_s += found.seconds
        scale = (shares.predicted_ms or measured_ms if shares else measured_ms) / found.baseline_ms
        plans, at_start = (
            [(c.name, replace(c.plan, predicted_ms=c.predicted_ms * scale, baseline_ms=measured_ms)) for c in some]
            for some in (found.candidates, found.at_start)
        )
        if shares:
            words, dealt = _words(shares), shares.batch_shares
            plans, at_start = [(f"{words}, {name}", replace(plan, batch_shares=dealt)) for name, plan in plans], []
        planned.at_start = planned.at_start or at_start
        known = [plan.settings() for _, plan in planned.plans]
        fresh = [named for named in plans if named[1].settings() not in known]
        # one trial is for the second belief, where it has a plan of its own
        planned.plans = [*planned.plans[: settings.trials - bool(fresh)], *fresh][: settings.trials]
    graph.undo(mark)
    if shares:  # by themselves as well: what comes on top of them may be no help
        planned.plans = [*planned.plans[: settings.trials - 1], (_words(shares), shares)]
    elif found.evaluations <= 1:
        planned.why_none = found.stopped  # there was nothing to search
    return planned


def _share_batches(planned: Planned, knobs: set[Knob], measured_ms: float) -> Plan | None:
    """Unequal shares of the batch, where they pay; the graph has them then, and what follows is searched with them."""
    from dpro.passes.batch_shares import BatchShares
    from dpro.search.batch_shares import best_shares

    graph = planned.graph
    if graph is None or Knob.BATCH_SHARES not in knobs or (best := best_shares(graph)) is None:
        return None
    shares, gain = best
    BatchShares().apply(graph, shares)
    fingerprint = planned.job["fingerprint"]
    return Plan(
        fingerprint=dict(fingerprint),
        batch_shares=list(shares),
        predicted_ms=measured_ms * gain,
        baseline_ms=measured_ms,
    )


def _words(plan: Plan) -> str:
    """For people."""
    return f"{' : '.join(map(str, plan.batch_shares or []))} samples"


def _make_fit(planned: Planned, knobs: set[Knob], budget_bytes: int, budget_s: float) -> None:
    """Plans that bring a job below its memory budget, fastest first, if there are any."""
    from dpro.search.memory import MemorySearch

    assert planned.graph is not None
    search = MemorySearch(planned.graph, knobs, budget_s)
    measured_ms = timing(planned.unprofiled_ms).median_ms
    fits = search.fitting(round(budget_bytes * (1 - _MEMORY_MARGIN)))
    fingerprint = planned.job["fingerprint"]
    planned.plans = [(fit.name, fit.plan(fingerprint, measured_ms / search.plain.step_ns, measured_ms)) for fit in fits]
    planned.must_fit = bool(fits)
    planned.evaluations = search.evaluations
    least_mb, budget_mb = search.smallest().peak / 1e6, budget_bytes / 1e6
    planned.why_none = f"nothing that can be set here fits {budget_mb:.1f} MB: the least found is {least_mb:.1f} MB"


def _beliefs(graph: Graph) -> list[tuple[str, SyncModel | PsModel | None]]:
    """The fitted cost of synchronisation; and, where latency matters in it, that there is none.

    Captured buckets are few and large: their times pin the bandwidth, and on a noisy machine hardly the
    latency. The two beliefs cost the captured buckets the same and lead to large and to small buckets;
    the clock decides in the trial. The same of a parameter server's partitions. With the key in ``graph.info``.
    """
    from dpro.cost.ps import MODEL

    pushed: PsModel | None = graph.info.get(MODEL)
    if pushed is not None:
        return [(MODEL, belief) for belief in pushed.beliefs()]
    fitted: SyncModel | None = graph.info.get("sync")
    if fitted is None or not graph.buckets:
        return [("sync", None)]
    mean_bytes = sum(bucket.nbytes for bucket in graph.buckets) / len(graph.buckets)
    mean_ns = fitted.time_ns(mean_bytes)
    if fitted.latency_ns < _LATENCY_MATTERS * mean_ns:
        return [("sync", fitted)]
    return [("sync", fitted), ("sync", replace(fitted, latency_ns=0.0, ns_per_byte=mean_ns / mean_bytes))]
