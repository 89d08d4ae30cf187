"""The search for better partitions of a parameter server job: one bound for all, then by tensor; the replay judges.

dPRO's Algorithm 1 sets each tensor's ``k*`` along the critical path. Here the closed form is where a tensor's search
begins: what a link, a server's queue or the order of messages make of many tensors' parts, only the replay knows.

Deterministic; stops early, with what it has, when its time is up; leaves the graph as it found it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dpro.adapter import Knob
from dpro.cost.ps import MODEL, PsModel, best_parts, fit_ps
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO, Ps
from dpro.passes.in_flight import InFlight
from dpro.passes.tensor_partition import HAND_TRIED_BYTES, Cuts, TensorPartition, captured, own, uniform
from dpro.plan import Plan
from dpro.replay.delta import DeltaReplay
from dpro.replay.engine import replay
from dpro.replay.path import critical_path
from dpro.search.critical_path import CLOSE, LEVEL, SAME, Candidate, SearchResult, confirmed
from dpro.search.in_flight import best_flows
from dpro.search.view import ALL, Speedups, view
from dpro.trace.byteps import MAX_PARTS, aligned, cut

#: Parts below this are headers more than payload.
LEAST_BYTES = 64 << 10
#: Bounds between the least and the largest tensor are spaced by this factor; around the best one four times finer.
_SPACING = 2**0.5
_FINER = 4
#: The sweep of ever smaller bounds ends when so many in a row were this much worse than the best.
_WORSE_IN_A_ROW, _WORSE = 3, 0.05
#: Parts of all tensors in one replay: more take seconds to make.
_MOST_PARTS = 4_000
#: Times that the tensors on the critical path are gone through one by one.
_ROUNDS = 5
#: Flows beyond the best that a search in a view hands on.
_RUNNERS_UP = 6
#: Of the time, where it is also searched how much to have on its way at once.
_PARTITIONS_SHARE = 0.6
#: A tensor is tried in its ``k*`` parts, in the captured number, and in these.
_FEW_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_MIB = 2**20


@dataclass(frozen=True)
class _Verdict:
    """Cuts of all gradients and the step they give. ``bound`` is the one bound behind them, 0 if there are several."""

    cuts: Cuts
    step_ns: int
    parts: int
    bound: int = 0


class _Judge:
    """The replay, with a memory and a deadline. Cuts are compared by the parts that they make, not by their bounds."""

    def __init__(self, graph: Graph, deadline_s: float, speedups: Speedups) -> None:
        self.graph = graph
        self.evaluations = 0
        self.verdicts: dict[tuple[tuple[int, ...], ...], _Verdict] = {}
        self._pass = TensorPartition()
        self._deadline_s = deadline_s
        self._mark = graph.mark()
        self._base: dict[int, list[int]] = {}
        self._quick = speedups.delta
        self._delta: DeltaReplay | None = None

    def out_of_time(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def sizes(self, tensor: int, bound: int) -> list[int]:
        return cut(self.graph.tensors[tensor].nbytes, bound)

    def parts(self, cuts: Cuts) -> int:
        return sum(len(self.sizes(tensor, bound)) for tensor, bound in cuts)

    def rebase(self, cuts: Cuts) -> None:
        """Let the graph have these cuts, so that what differs little from them costs little to judge."""
        self.graph.undo(self._mark)
        self._pass.apply(self.graph, cuts)
        self._base = {tensor: self.sizes(tensor, bound) for tensor, bound in cuts}
        self._delta = DeltaReplay(self.graph) if self._quick else None

    def move(self, tensor: int, bound: int) -> None:
        """The same for one tensor."""
        if self._base[tensor] != self.sizes(tensor, bound):
            self._pass.apply(self.graph, ((tensor, bound),))
            self._base[tensor] = self.sizes(tensor, bound)
            self._delta = DeltaReplay(self.graph) if self._quick else None

    def judge(self, cuts: Cuts, bound: int = 0) -> _Verdict:
        """The step with these cuts; asked once, remembered."""
        key = tuple(tuple(self.sizes(tensor, n)) for tensor, n in cuts)
        known = self.verdicts.get(key)
        if known is None or (bound and not known.bound):
            step_ns = self._replayed_ns(cuts) if known is None else known.step_ns
            self.verdicts[key] = known = _Verdict(cuts, step_ns, sum(map(len, key)), bound)
        return known

    def _replayed_ns(self, cuts: Cuts) -> int:
        changed = tuple((t, n) for t, n in cuts if self._base.get(t) != self.sizes(t, n))
        mark = self._pass.apply(self.graph, changed)
        try:
            self.evaluations += 1
            return self._delta.makespan_ns() if self._delta is not None else replay(self.graph).makespan_ns
        finally:
            self.graph.undo(mark)


def search(
    graph: Graph,
    *,
    knobs: set[Knob],
    fingerprint: dict[str, str] | None = None,
    time_budget_s: float = 10.0,
    top: int = 3,
    speedups: Speedups = ALL,
) -> SearchResult:
    """Find the partitions that make the replayed step shortest.

    Returns up to ``top`` plans that differ: the best one, the best with one bound for all gradients, and further
    bounds within 3 % of the best. Without :attr:`Knob.PARTITIONS` all have one bound; with :attr:`Knob.PARTITION_BYTES`
    alone the best is for a job that is started anew (:func:`dpro.trace.byteps.launch_bytes`). The baseline is the
    replay of the job's own partitions under the same cost model, ``graph.info["ps_model"]``; without one it is fitted
    to the graph's own.
    """
    began = time.monotonic()
    why = why_not(graph)
    if why:
        baseline_ms = replay(graph).makespan_ns / 1e6
        return SearchResult(baseline_ms, evaluations=1, seconds=time.monotonic() - began, stopped=why)
    mark, known = graph.mark(), graph.info.get(MODEL)
    try:
        if known is None:
            graph.info[MODEL] = fit_ps([graph])
        seen = view(graph, speedups)
        # a view of few workers is approximate: the whole graph says which of the best is best
        more = 0 if seen is graph else _RUNNERS_UP
        result = _search(seen, knobs, fingerprint or {}, began, time_budget_s, top, speedups, more)
        if seen is not graph:
            TensorPartition().apply(graph, captured(graph))
            mark_now = graph.mark()
            TensorPartition().apply(graph, own(graph))
            baseline_ns = replay(graph).makespan_ns
            graph.undo(mark_now)
            result = confirmed(graph, result, baseline_ns, lambda _: replay(graph).makespan_ns)
            flows = [c for c in result.candidates if c.edits][:2]  # more of them would be much the same
            unlike = [c for c in result.candidates if not c.edits or c in flows]
            result = replace(result, candidates=unlike[:top])
    finally:
        graph.undo(mark)
        graph.info[MODEL] = known
        if known is None:
            del graph.info[MODEL]
    if not knobs & {Knob.PARTITIONS, Knob.PARTITION_BOUND, Knob.IN_FLIGHT}:
        result = replace(result, candidates=[], at_start=result.candidates[:1])
    return replace(result, seconds=time.monotonic() - began)


def _search(
    graph: Graph,
    knobs: set[Knob],
    fingerprint: dict[str, str],
    began_s: float,
    budget_s: float,
    top: int,
    speedups: Speedups,
    more: int,
) -> SearchResult:
    cutting = bool(knobs & TensorPartition.knobs)
    share = _PARTITIONS_SHARE if Knob.IN_FLIGHT in knobs else 1.0
    mark = graph.mark()
    try:
        judge = _Judge(graph, began_s + share * budget_s, speedups)
        judge.rebase(captured(graph))
        baseline = judge.judge(own(graph))
        if cutting:
            _sweep(judge)
        if Knob.PARTITIONS in knobs:
            _one_by_one(judge)
        found = [_candidate(graph, v, baseline, fingerprint) for v in _choose(judge, baseline, top)]
        stopped = "time budget" if cutting and judge.out_of_time() else "no improvement left"
        flows, replays = best_flows(graph, began_s + budget_s, more) if Knob.IN_FLIGHT in knobs else ([], 0)
        groups = tuple(bucket.tensors for bucket in graph.buckets)
        flowing = [
            Candidate(
                v.name, v.plan(graph, fingerprint, baseline.step_ns), v.step_ns / 1e6, groups, ((InFlight(), v.flow),)
            )
            for v in flows
            if v.step_ns * (1 + LEVEL) < baseline.step_ns
        ]
    finally:
        graph.undo(mark)
    if flowing and (not found or flowing[0].predicted_ms * (1 + LEVEL) < found[0].predicted_ms):
        found = [*flowing, *found][: top + more]
    return SearchResult(baseline.step_ns / 1e6, found, evaluations=judge.evaluations + replays, stopped=stopped)


def why_not(graph: Graph) -> str:
    """Why a parameter server job's partitions can't be searched; '' if they can."""
    if not isinstance(graph.info.get(INFO), Ps):
        return "no gradients are pushed to a server"
    if not captured(graph):
        return "no gradient's size is known"
    if MODEL not in graph.info:
        try:
            fit_ps([graph])
        except ValueError as error:
            return str(error)
    return ""


def _sweep(judge: _Judge) -> None:
    """One bound for all: what people try, then ever smaller ones, then finer around the best."""
    graph = judge.graph
    largest = max(graph.tensors[tensor].nbytes for tensor, _ in captured(graph))
    count = max(1, round(np.log(max(1.0, largest / LEAST_BYTES)) / np.log(_SPACING)))
    ladder = [aligned(largest), *(_round(largest * _SPACING**-i) for i in range(1, count + 1))]
    worse = 0
    for bound in dict.fromkeys([*(n for n in HAND_TRIED_BYTES if LEAST_BYTES <= n <= largest), *ladder]):
        verdict = _uniform(judge, bound)
        if verdict is not None:
            best = _best_uniform(judge)
            worse = worse + 1 if bound < best.bound and verdict.step_ns > best.step_ns * (1 + _WORSE) else 0
            if worse >= _WORSE_IN_A_ROW:
                break
    tried = sorted(v.bound for v in judge.verdicts.values() if v.bound)
    if not tried:
        return
    at = tried.index(_best_uniform(judge).bound)
    around = tried[max(0, at - 1)], tried[min(len(tried) - 1, at + 1)]
    for bound in dict.fromkeys(_round(n) for n in np.geomspace(*around, 2 * _FINER + 1)):
        _uniform(judge, bound)


def _uniform(judge: _Judge, bound: int) -> _Verdict | None:
    """None where there is no time left, or where there would be too many parts."""
    cuts = uniform(judge.graph, bound)
    if judge.out_of_time() or judge.parts(cuts) > _MOST_PARTS:
        return None
    return judge.judge(cuts, bound)


def _best_uniform(judge: _Judge) -> _Verdict:
    return min((v for v in judge.verdicts.values() if v.bound), key=_rank)


def _one_by_one(judge: _Judge) -> None:
    """From the best so far, each tensor on the critical path by itself, until none is better cut otherwise."""
    graph = judge.graph
    here = min(judge.verdicts.values(), key=_rank)
    judge.rebase(here.cuts)
    for _ in range(_ROUNDS):
        before = here
        for tensor in _on_path(graph):
            for bound in _bounds(graph, tensor):
                if judge.out_of_time():
                    return
                cuts = tuple((t, bound if t == tensor else n) for t, n in here.cuts)
                if judge.parts(cuts) <= _MOST_PARTS and (verdict := judge.judge(cuts)).step_ns < here.step_ns:
                    here = verdict
            judge.move(tensor, dict(here.cuts)[tensor])
        if here is before:
            return


def _on_path(graph: Graph) -> list[int]:
    """Pushed tensors on the critical path of the graph as it is, by their time there."""
    pushed = {bucket.tensors[0] for bucket in graph.buckets}
    owner = graph.column("tensor")
    found: dict[int, int] = {}
    for step in critical_path(graph, replay(graph)).steps:
        tensor = int(owner[step.op])
        if tensor in pushed:
            found[tensor] = found.get(tensor, 0) + step.end_ns - step.start_ns
    return sorted(found, key=lambda t: (-found[t], t))


def _bounds(graph: Graph, tensor: int) -> list[int]:
    """Bounds worth trying for one tensor, from its ``k*`` on; none for one that is not worth cutting."""
    nbytes = graph.tensors[tensor].nbytes
    most = min(MAX_PARTS, nbytes // LEAST_BYTES)
    if most < 2:
        return []
    star = best_parts(nbytes, *slowest_lines(graph, tensor, nbytes))
    counts = [round(star * factor) for factor in (1, 0.7, 1.4, 0.5, 2)]
    counts += [*_FEW_PARTS, 2 * _FEW_PARTS[-1], 4 * _FEW_PARTS[-1]]
    return list(dict.fromkeys(aligned(-(-nbytes // k)) for k in counts if 1 <= k <= most))


def slowest_lines(graph: Graph, tensor: int, nbytes: int) -> tuple[SyncModel, SyncModel, SyncModel]:
    """What the closed form asks for: the slowest way to the tensor's server, the server, the slowest way back, of
    ``nbytes``."""
    ps: Ps = graph.info[INFO]
    model: PsModel = graph.info[MODEL]
    server = ps.layout.server(tensor, 0)
    there, back = (
        max((model.link(ps.layout.links[w, server][way]) for w in range(len(ps.layout.ranks))), key=_time_of(nbytes))
        for way in (0, 1)
    )
    return there, model.sums, back


def _time_of(nbytes: int) -> Callable[[SyncModel], int]:
    return lambda line: line.time_ns(nbytes)


def _choose(judge: _Judge, baseline: _Verdict, top: int) -> list[_Verdict]:
    """The simplest of the best, the best, the best single bound, and close ones with clearly other bounds."""
    better = [v for v in judge.verdicts.values() if v.step_ns < baseline.step_ns]
    ranked = sorted(better, key=_rank)
    if not ranked:
        return []
    level = [v for v in ranked if v.step_ns <= ranked[0].step_ns * (1 + LEVEL)]
    chosen = [min(level, key=lambda v: (not v.bound, v.parts, _rank(v)))]
    single = next((v for v in ranked if v.bound), ranked[0])
    for verdict in (ranked[0], single, *ranked):
        if verdict.step_ns > ranked[0].step_ns * (1 + CLOSE) and verdict is not single:
            break
        if all(_unlike(verdict, other) for other in chosen):
            chosen.append(verdict)
    return chosen[:top]


def _unlike(one: _Verdict, other: _Verdict) -> bool:
    """Single bounds if one is twice as large as the other; a bound and cuts by tensor if the step differs."""
    if one.bound and other.bound:
        return max(one.bound, other.bound) >= 2 * min(one.bound, other.bound)
    return abs(one.step_ns - other.step_ns) > SAME * other.step_ns and bool(one.bound) != bool(other.bound)


def _candidate(graph: Graph, verdict: _Verdict, baseline: _Verdict, fingerprint: dict[str, str]) -> Candidate:
    """A single bound is said of all gradients, as a job is started with it; else only what changes."""
    before = dict(baseline.cuts)
    sizes = {t: cut(graph.tensors[t].nbytes, n) for t, n in verdict.cuts}
    changed = {t: n for t, n in verdict.cuts if verdict.bound or sizes[t] != cut(graph.tensors[t].nbytes, before[t])}
    parts = f"{verdict.parts} part{'s' * (verdict.parts > 1)}"
    bounds = [min(n, max(sizes[t])) for t, n in changed.items()]
    name = (
        f"partitions of {verdict.bound / _MIB:.4g} MiB, {parts}"
        if verdict.bound
        else f"partitions by tensor, {min(bounds) / _MIB:.2g} to {max(bounds) / _MIB:.3g} MiB, {parts}"
    )
    step_ms = verdict.step_ns / 1e6
    plan = Plan(
        fingerprint=dict(fingerprint),
        partitions={graph.tensors[t].name: n for t, n in changed.items()},
        predicted_ms=step_ms,
        baseline_ms=baseline.step_ns / 1e6,
    )
    groups = tuple(bucket.tensors for bucket in graph.buckets)
    return Candidate(name, plan, step_ms, groups, ((TensorPartition(), verdict.cuts),))


def _round(nbytes: float) -> int:
    """To 1/16 MiB where that is fine enough, else to whole pages: a number that a person can read and type."""
    grain = _MIB // 16 if nbytes >= _MIB else aligned(1)
    return max(grain, round(nbytes / grain) * grain)


def _rank(verdict: _Verdict) -> tuple[float, int]:
    """Smaller is better: time, with a handicap for what is not one bound, then fewer parts."""
    return verdict.step_ns * (1 if verdict.bound else 1 + SAME), verdict.parts
