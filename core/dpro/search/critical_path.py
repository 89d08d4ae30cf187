"""The search for better DDP buckets and Horovod groups: dynamic programming and dPRO's Theorem 2 propose, the replay
decides.

dPRO's Algorithm 1 walks the critical path for ops worth fusing. Buckets are one chain of few links, so here all
of them are candidates and no path is followed.

Knows knobs, plans and the pieces of this folder. Deterministic; stops early, with what it has, when its
time is up; leaves the graph as it found it. It never proposes what the replay does not find faster than
the settings in force.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dpro.adapter import Knob
from dpro.cost.sync import fit_buckets
from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO
from dpro.graph.threads import COPY_IN
from dpro.passes.batched_copy import BatchedCopy
from dpro.passes.bucket_view import BucketView
from dpro.passes.compression import Compression
from dpro.passes.contention import relieve
from dpro.passes.ddp_buckets import MIB
from dpro.passes.op_fusion import Fusion, OpFusion
from dpro.passes.registry import Pass
from dpro.passes.tensor_fusion import Grouping, captured
from dpro.plan import Plan
from dpro.replay.engine import replay
from dpro.search.cycle_time import best_cycles
from dpro.search.defaults import HAND_TRIED_CAPS_MIB
from dpro.search.judge import NEVER, Judge, Verdict
from dpro.search.op_fusion import Unsynchronised, best_fusion, with_their_gradients
from dpro.search.team import Team
from dpro.search.tensor_fusion import Cuts, Timeline, best_cuts, neighbours
from dpro.search.view import ALL, Speedups, view
from dpro.trace.regions import REGIONS

#: Any of them lets it be changed what is synchronised together.
FUSION = frozenset({Knob.BUCKET_LIST, Knob.BUCKET_CAP, Knob.GROUPS})
#: Those of any runs of gradients.
LISTS = frozenset({Knob.BUCKET_LIST, Knob.GROUPS})
#: The same of how gradients are cut.
PARTITION = frozenset({Knob.PARTITIONS, Knob.PARTITION_BOUND, Knob.PARTITION_BYTES, Knob.IN_FLIGHT})
#: All that can be turned where gradients are reduced.
TURNED = FUSION | {Knob.BUCKET_VIEW, Knob.BATCHED_COPY, Knob.COMPRESSION, Knob.CYCLE_TIME, Knob.COMPILE_REGIONS}
#: Replays granted to the dynamic programme's proposals, and to each round of hill climbing.
JUDGED_PROPOSALS = 50
JUDGED_NEIGHBOURS = 16
#: Times that buckets and regions are searched in turn.
COMPILED_ROUNDS = 3
#: With no more groupings than this all of them are replayed.
EXHAUSTIVE = 64
#: Uniform caps between total/128 and the total are spaced by about 12 %.
SWEEP_POINTS = 44
#: A list must be better than a single number by this to be preferred to it.
SAME = 0.001
#: Replayed steps this close are level: finer than any replay is right.
LEVEL = 0.003
#: How much worse than the best a plan may be to be kept for being different.
CLOSE = 0.03


@dataclass(frozen=True)
class Candidate:
    """A plan, the step it should give, the buckets (tensor ids) behind it, and other edits: (pass, candidate)."""

    name: str
    plan: Plan
    predicted_ms: float
    groups: Grouping
    edits: tuple[tuple[Pass, Any], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class SearchResult:
    """``baseline_ms``: replay of the captured buckets, costed by the same model as the candidates.

    ``candidates``: best first (a list of caps only counts as better than a uniform cap by 0.1 % or more), all
    faster than the baseline, unlike each other; may be empty. ``at_start``: what can be put
    in force only when a job is started (:attr:`Knob.CYCLE_TIME`, :attr:`Knob.PARTITION_BYTES`), best first; with groups
    only what beats them all.
    """

    baseline_ms: float
    candidates: list[Candidate] = field(default_factory=list)
    at_start: list[Candidate] = field(default_factory=list)
    evaluations: int = 0
    seconds: float = 0.0
    stopped: str = ""


def optimize(
    graph: Graph,
    *,
    knobs: set[Knob],
    fingerprint: dict[str, str] | None = None,
    time_budget_s: float = 10.0,
    top: int = 3,
    speedups: Speedups = ALL,
    team: Team | None = None,
) -> SearchResult:
    """Find the DDP bucket caps, or the Horovod groups, that make the replayed step shortest.

    Returns up to ``top`` plans that differ: the best list of caps, the best uniform cap, and further ones
    with a clearly different number of buckets within 3 % of the best. With :attr:`Knob.BUCKET_CAP` alone
    only uniform caps are considered; with :attr:`Knob.BUCKET_VIEW` and :attr:`Knob.BATCHED_COPY` the best
    is also offered with DDP's other ways to copy gradients, where they save time, with :attr:`Knob.COMPRESSION` with
    gradients reduced in 16 bit (what lossy knobs are allowed is for the caller to know). With :attr:`Knob.GROUPS`
    plans have groups and no caps (:meth:`~dpro.search.judge.Judge.together` says what Horovod makes of them).
    A group may be any set of gradients, but in a queue served in the order in which groups are complete nothing
    is gained by holding an early gradient back for a late group while a later one goes ahead of it: runs of the
    ready order are all there is to search.
    ``result.stopped`` says why the search ended.

    ``graph.info["sync"]`` is the cost of a bucket; without it, it is fitted to the captured buckets (no host
    contention then). If it knows of contention and the graph is a captured one, host ops are first relieved
    of what the captured buckets cost them.

    With :attr:`Knob.COMPILE_REGIONS` regions whose times were measured (``graph.info["regions"]``) are considered as
    well, with the captured buckets and together with others (:mod:`dpro.search.op_fusion`).

    A parameter server job (``graph.info["ps"]``) has no buckets: its partitions are searched
    (:mod:`dpro.search.tensor_partition`), and nothing else. In a job of one process, which has none
    either, regions are.

    ``team``: other ranks that replay buckets as well, as long as nothing else is edited.

    What is searched is a smaller view of the graph (:mod:`dpro.search.view`); what it finds counts as the whole graph
    replays it.
    """
    began = time.monotonic()
    if INFO in graph.info and knobs & PARTITION:
        from dpro.search.tensor_partition import search

        return search(
            graph, knobs=knobs, fingerprint=fingerprint, time_budget_s=time_budget_s, top=top, speedups=speedups
        )
    if not graph.buckets and Knob.COMPILE_REGIONS in knobs:
        return _unsynchronised(graph, fingerprint or {}, began, time_budget_s)
    nothing = _nothing_to_do(graph, knobs)
    if nothing:
        baseline_ms = replay(graph).makespan_ns / 1e6
        return SearchResult(baseline_ms, evaluations=1, seconds=time.monotonic() - began, stopped=nothing)

    mark, known = graph.mark(), graph.info.get("sync")
    try:
        graph.info["sync"] = known or fit_buckets([graph])
        relieve(graph, graph.info["sync"])
        seen = view(graph, speedups, [COPY_IN] if Knob.BATCHED_COPY in knobs else [])
        if team is not None:
            team.forget()
        others = team.evaluations if team is not None else 0
        result = _search(Judge(seen, began + time_budget_s, speedups, team), knobs, fingerprint or {}, top)
        if seen is not graph:
            result = _on_the_whole(graph, result)
        if team is not None:
            result = replace(result, evaluations=result.evaluations + team.evaluations - others)
    finally:
        graph.undo(mark)
        graph.info["sync"] = known
        if known is None:
            del graph.info["sync"]
    return replace(result, seconds=time.monotonic() - began)


def _search(judge: Judge, knobs: set[Knob], fingerprint: dict[str, str], top: int) -> SearchResult:
    """Of the graph that ``judge`` judges."""
    graph = judge.graph
    baseline_ns = judge.first(captured(graph))
    if not graph.info.get(REGIONS):
        knobs = knobs - {Knob.COMPILE_REGIONS}
    compiled = []
    if Knob.COMPILE_REGIONS in knobs:  # with half the time, so that there is some for what is done without
        half = judge.with_half_the_time()
        compiled = _compiled(graph, half, knobs, fingerprint, baseline_ns, None)
        judge.evaluations += half.evaluations
    _search_buckets(judge, knobs)
    stopped = "time budget" if judge.out_of_time() else "no improvement left"
    better = [v for v in judge.verdicts.values() if v.step_ns < baseline_ns]
    found = [_candidate(graph, v, knobs, fingerprint, baseline_ns) for v in _choose(better, top)]
    if Knob.COMPILE_REGIONS in knobs and found:  # what does not pay with the captured buckets may with these
        again = _compiled(graph, judge, knobs, fingerprint, baseline_ns, found[0])
        if again and (not compiled or again[0].predicted_ms < compiled[0].predicted_ms):
            compiled = [again[0], *compiled[-1:]]
    found = _with_options(graph, judge, found, knobs, baseline_ns, fingerprint)[:top]
    cycles = _cycles(graph, judge, found, baseline_ns, fingerprint) if Knob.CYCLE_TIME in knobs else []
    first = 1 if found and compiled and found[0].predicted_ms < compiled[0].predicted_ms else 0
    found = [*found[:first], *compiled, *found[first:]][:top]
    return SearchResult(baseline_ns / 1e6, found, cycles, judge.evaluations, stopped=stopped)


def _on_the_whole(graph: Graph, result: SearchResult) -> SearchResult:
    judge = Judge(graph, float("inf"))

    def replayed_ns(candidate: Candidate) -> int:
        there = judge.elsewhere() if candidate.edits else judge
        return there.replayed_ns(there.together(candidate.groups))

    return confirmed(graph, result, judge.replayed_ns(captured(graph)), replayed_ns)


def confirmed(
    graph: Graph, result: SearchResult, baseline_ns: int, replayed_ns: Callable[[Candidate], int]
) -> SearchResult:
    """``result``, found in a view of ``graph``, as the whole graph sees it; what that does not find faster is left out.

    What takes effect when a job is started is a ratio of two replays in any case.

    Args:
        replayed_ns: the step of the graph, in which the candidate's edits have been made.
    """
    candidates = []
    for candidate in result.candidates:
        mark = graph.mark()
        try:
            for edit, chosen in candidate.edits:
                edit.apply(graph, chosen)
            step_ns = replayed_ns(candidate)
        finally:
            graph.undo(mark)
        if step_ns < baseline_ns:
            candidates.append(_told(candidate, step_ns / 1e6, baseline_ns / 1e6))
    best_ms = min((c.predicted_ms for c in candidates), default=0.0)
    candidates.sort(key=lambda c: c.predicted_ms if c.predicted_ms > best_ms * (1 + LEVEL) else 0.0)
    ratio = baseline_ns / 1e6 / result.baseline_ms
    return replace(
        result,
        baseline_ms=baseline_ns / 1e6,
        candidates=candidates,
        at_start=[_told(c, c.predicted_ms * ratio, baseline_ns / 1e6) for c in result.at_start],
    )


def _told(candidate: Candidate, predicted_ms: float, baseline_ms: float) -> Candidate:
    plan = replace(candidate.plan, predicted_ms=predicted_ms, baseline_ms=baseline_ms)
    return replace(candidate, plan=plan, predicted_ms=predicted_ms)


def _nothing_to_do(graph: Graph, knobs: set[Knob]) -> str:
    if INFO in graph.info or not knobs & TURNED:
        return "no knob that this search can turn"
    if not graph.buckets or not sum(tensor.nbytes for tensor in graph.tensors):
        return "no gradients are synchronised in buckets"
    if "sync" not in graph.info:
        try:
            fit_buckets([graph])
        except ValueError as error:
            return str(error)
    return ""


def _unsynchronised(graph: Graph, fingerprint: dict[str, str], began: float, time_budget_s: float) -> SearchResult:
    """A job of one process: which regions to compile is all there is to choose."""
    times = Unsynchronised(graph, began + time_budget_s)
    baseline_ns = times.replayed_ns(())
    fusion, step_ns = best_fusion(graph, times, ())
    found = [_with_regions(graph, None, (), fusion, step_ns, fingerprint, baseline_ns)] if step_ns < baseline_ns else []
    known = graph.info.get(REGIONS, ())
    return SearchResult(
        baseline_ms=baseline_ns / 1e6,
        candidates=found,
        evaluations=times.evaluations,
        seconds=time.monotonic() - began,
        stopped="no improvement left" if known else "no layer was timed that XLA could compile",
    )


def _search_buckets(judge: Judge, knobs: set[Knob]) -> None:
    if knobs & FUSION:
        _sweep_uniform(judge)
    if knobs & LISTS:
        _search_lists(judge)


def _compiled(
    graph: Graph,
    judge: Judge,
    knobs: set[Knob],
    fingerprint: dict[str, str],
    baseline_ns: int,
    buckets: Candidate | None,
) -> list[Candidate]:
    """Regions compiled with the captured buckets (or ``buckets``), and with buckets of their own where these are
    better; best first.

    By dPRO's Theorem 3 one calls for the other: what is compiled together is synchronised together (its gradients are
    there at once, so that buckets found then hold them), and with other buckets other regions may pay.
    """
    groups = captured(graph) if buckets is None else judge.together(buckets.groups)
    fusion, step_ns = best_fusion(graph, judge, groups)
    found = []
    if fusion and step_ns < baseline_ns:
        found = [_with_regions(graph, buckets, groups, fusion, step_ns, fingerprint, baseline_ns)]
    if knobs & LISTS and (both := with_their_gradients(graph, judge, groups, fusion, step_ns)) is not None:
        fusion, step_ns = both[0], both[1].step_ns
        buckets = _candidate(graph, both[1], knobs, fingerprint, baseline_ns)
        found.insert(0, _with_regions(graph, buckets, buckets.groups, fusion, step_ns, fingerprint, baseline_ns))
    if not found or step_ns >= baseline_ns:
        return []
    for _ in range(COMPILED_ROUNDS):
        mark = OpFusion().apply(graph, fusion)
        try:
            there = judge.elsewhere()
            _search_buckets(there, knobs)
            better = [v for v in there.verdicts.values() if v.step_ns * (1 + LEVEL) < step_ns]
            best = next((_candidate(graph, v, knobs, fingerprint, baseline_ns) for v in _choose(better, 1)), None)
            groups = there.together(best.groups) if best is not None else ()
        finally:
            graph.undo(mark)
        judge.evaluations += there.evaluations
        if best is None:
            break
        fusion, step_ns = best_fusion(graph, judge, groups, fusion)
        found.insert(0, _with_regions(graph, best, best.groups, fusion, step_ns, fingerprint, baseline_ns))
        if not fusion:
            break
    return [found[0], *found[-1:]] if len(found) > 1 else found


def _with_regions(
    graph: Graph,
    buckets: Candidate | None,
    groups: Grouping,
    fusion: Fusion,
    step_ns: int,
    fingerprint: dict[str, str],
    baseline_ns: int,
) -> Candidate:
    base = Plan(fingerprint=dict(fingerprint), baseline_ms=baseline_ns / 1e6) if buckets is None else buckets.plan
    layers = [layer for region in fusion for layer in region.layers]
    plan = replace(base, compile_regions=layers, predicted_ms=step_ns / 1e6)
    name = f"{len(layers)} layers compiled to {len(fusion)} clusters"
    edits: tuple[tuple[Pass, Any], ...] = ((OpFusion(), fusion),)
    return Candidate(f"{buckets.name}, {name}" if buckets else name, plan, step_ns / 1e6, groups, edits)


def _with_options(
    graph: Graph, judge: Judge, found: list[Candidate], knobs: set[Knob], baseline_ns: int, fingerprint: dict[str, str]
) -> list[Candidate]:
    """The best buckets (or the captured ones) once more with each DDP option, or in 16 bit, that makes them faster."""
    groups = found[0].groups if found else captured(graph)
    base = found[0].plan if found else Plan(fingerprint=dict(fingerprint), baseline_ms=baseline_ns / 1e6)
    limit_ns = min(judge.step_ns(groups), baseline_ns)
    name = found[0].name if found else "same buckets"
    better = []
    views, batched = ({"ddp_options": {option: True}} for option in ("gradient_as_bucket_view", "batched_grad_copy"))
    narrow = next(iter(Compression().candidates(graph)), "")
    options: list[tuple[Knob, Pass, Any, dict[str, Any], str]] = [
        (Knob.BUCKET_VIEW, BucketView(), True, views, "gradients as views"),
        (Knob.BATCHED_COPY, BatchedCopy(), groups, batched, "copied in together"),
        (Knob.COMPRESSION, Compression(), narrow, Compression().settings(narrow), f"gradients in {narrow}"),
    ]
    for knob, edit, candidate, fields, words in options:
        if knob not in knobs or judge.out_of_time() or not edit.legal(graph, candidate):
            continue
        mark = edit.apply(graph, candidate)
        try:
            step_ns = judge.replayed_ns(groups)
        finally:
            graph.undo(mark)
        if step_ns * (1 + SAME) < limit_ns:
            plan = replace(base, **fields, predicted_ms=step_ns / 1e6)
            better.append(Candidate(f"{name}, {words}", plan, step_ns / 1e6, groups, ((edit, candidate),)))
    return sorted(better, key=lambda c: c.predicted_ms) + found


def _cycles(
    graph: Graph, judge: Judge, found: list[Candidate], baseline_ns: int, fingerprint: dict[str, str]
) -> list[Candidate]:
    """The best cycle time with Horovod's own fusion, if it beats the captured settings, and with groups, if it beats
    ``found``.

    Groups may turn out to be no help in the trial: what can be had without them is then still worth saying.
    """
    plain = Plan(fingerprint=dict(fingerprint), baseline_ms=baseline_ns / 1e6)
    grouped_limit_ms = min([baseline_ns / 1e6, *(c.predicted_ms for c in found)])
    better = []
    for cycle in best_cycles(graph, judge, found[0].groups if found else None):
        step_ms, cycle_ms = cycle.step_ns / 1e6, cycle.cycle_ns / 1e6
        limit_ms = baseline_ns / 1e6 if cycle.groups is None else grouped_limit_ms
        if step_ms * (1 + LEVEL) < limit_ms:  # who starts a job anew wants to see a difference
            base, name = (plain, "") if cycle.groups is None else (found[0].plan, f"{found[0].name}, ")
            plan = replace(base, cycle_time=cycle_ms, predicted_ms=step_ms)
            better.append(
                Candidate(f"{name}cycle time {cycle_ms:g} ms", plan, step_ms, cycle.groups or captured(graph))
            )
    return better


def _sweep_uniform(judge: Judge) -> None:
    total = int(judge.cum_bytes[-1])
    caps = [mib * MIB for mib in HAND_TRIED_CAPS_MIB]
    caps += [_round_cap(cap) for cap in np.geomspace(max(1, total / 128), total, SWEEP_POINTS)] + [total]
    judge.uniform(caps)
    # Once more, finer, between the caps on both sides of the best.
    tried = sorted(v.caps_bytes[0] for v in judge.verdicts.values())
    best = tried.index(min(judge.verdicts.values(), key=lambda v: (v.step_ns, v.caps_bytes)).caps_bytes[0])
    low, high = tried[max(0, best - 1)], tried[min(len(tried) - 1, best + 1)]
    judge.uniform([_round_cap(cap) for cap in np.linspace(low, high, 10)])


def _round_cap(cap: float) -> int:
    """To 1/16 MiB where that is fine enough: a number that a person can read and type."""
    grain = MIB // 16 if cap >= MIB else 1
    return max(grain, round(cap / grain) * grain)


def _search_lists(judge: Judge) -> None:
    n = len(judge.main)
    if 2 ** (n - 1) <= EXHAUSTIVE:
        judge.cut([(*(i + 1 for i in range(n - 1) if bits >> i & 1), n) for bits in range(2 ** (n - 1))])
        return
    if judge.out_of_time():
        return
    timeline = judge.timeline()
    starts = [judge.cuts_of(v.grouping) for v in sorted(judge.verdicts.values(), key=_rank)[:3]]
    proposals = sorted(best_cuts(timeline), key=lambda cuts: (timeline.estimate_ns(cuts), cuts))
    judge.cut([*starts, *proposals[:JUDGED_PROPOSALS]])
    try:
        _climb(judge, timeline)
    finally:
        judge.rebase()


def _climb(judge: Judge, timeline: Timeline) -> None:
    """From the best few that are not alike to the best of their neighbours, as long as there is a better one."""
    climbed: set[Cuts] = set()
    for verdict in _choose((v for v in judge.verdicts.values() if v.step_ns < NEVER), 3):
        here: Verdict | None = verdict
        while here is not None and (cuts := judge.cuts_of(here.grouping)) not in climbed:
            climbed.add(cuts)
            judge.rebase(here.caps_bytes)
            ways = neighbours(timeline, cuts)
            if judge.speedups.partial:
                ways = sorted(ways, key=lambda c: (timeline.estimate_ns(c), c))[:JUDGED_NEIGHBOURS]
            best = min(judge.cut(ways), key=lambda v: v.step_ns, default=here)
            if judge.out_of_time():
                return
            here = best if best.step_ns < here.step_ns else None


def _rank(verdict: Verdict) -> tuple[float, int, tuple[int, ...]]:
    """Smaller is better: time, with a handicap for lists, then fewer buckets."""
    return verdict.step_ns * (1 if verdict.uniform else 1 + SAME), len(verdict.grouping), verdict.caps_bytes


def _choose(verdicts: Iterable[Verdict], top: int) -> list[Verdict]:
    """The simplest of the best, the best, the best uniform one, and close ones with clearly other numbers of buckets.

    What the replay cannot tell apart is decided by what it leaves out: every bucket has some cost of its own.
    """
    ranked = sorted(verdicts, key=_rank)
    if not ranked:
        return []
    level = [v for v in ranked if v.step_ns <= ranked[0].step_ns * (1 + LEVEL)]
    chosen = [min(level, key=lambda v: (len(v.grouping), _rank(v)))]
    uniform = next((v for v in ranked if v.uniform), ranked[0])
    for verdict in (ranked[0], uniform, *ranked):
        if verdict.step_ns > ranked[0].step_ns * (1 + CLOSE) and verdict is not uniform:
            break
        if all(_unlike(verdict, other) for other in chosen):
            chosen.append(verdict)
    return chosen[:top]


def _unlike(one: Verdict, other: Verdict) -> bool:
    count = len(other.grouping)
    return abs(len(one.grouping) - count) >= max(2, count // 4)


def _candidate(
    graph: Graph, verdict: Verdict, knobs: set[Knob], fingerprint: dict[str, str], baseline_ns: int
) -> Candidate:
    caps = [cap / MIB for cap in verdict.caps_bytes]
    count = len(verdict.grouping)
    grouped = Knob.GROUPS in knobs
    buckets = f"{count} {'group' if grouped else 'bucket'}{'s' * (count > 1)}"
    sizes = [sum(graph.tensors[t].nbytes for t in group) / MIB for group in verdict.grouping]
    name = (
        f"{buckets} of {min(sizes):.2g} to {max(sizes):.3g} MiB"
        if len(caps) > 1 or grouped
        else f"uniform {caps[0]:.4g} MiB, {buckets}"
    )
    if len(caps) == 1 and Knob.BUCKET_CAP not in knobs:
        caps *= 2  # the same as a list, where only lists can be set
    plan = Plan(
        fingerprint=dict(fingerprint),
        tensor_groups=[[graph.tensors[t].name for t in group] for group in verdict.grouping],
        bucket_caps=None if grouped else caps,
        predicted_ms=verdict.step_ns / 1e6,
        baseline_ms=baseline_ns / 1e6,
    )
    return Candidate(name=name, plan=plan, predicted_ms=verdict.step_ns / 1e6, groups=verdict.grouping)
