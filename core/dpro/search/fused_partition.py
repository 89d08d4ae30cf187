"""dPRO's Algorithm 1 for parameter servers: which gradients go as one, and in how many parts.

Along the critical path each group gets its ``k*``, and is fused with the one before it where Theorem 2 says that it may
pay; then single changes of what is on the path, as long as one makes the replayed step shorter. A what-if: no library
fuses there, so nothing comes of it but what it would be worth.

Gradients are fused in runs of the ready order: queues are served in that order. Deterministic; stops early, with what
it has, when its time is up; leaves the graph as it found it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from dpro.cost.ps import MODEL, best_parts, fit_ps
from dpro.graph.graph import Graph, OpKind
from dpro.graph.ps_ops import resources
from dpro.passes.fused_partition import Fused, FusedPartition, pushed, runs
from dpro.passes.push_pull import add_parts
from dpro.passes.tensor_partition import own, told
from dpro.plan import Plan
from dpro.replay.delta import DeltaReplay
from dpro.replay.engine import replay
from dpro.replay.path import critical_path
from dpro.search.critical_path import Candidate, SearchResult
from dpro.search.pipeline import IDLE, Line, Pair, State, pair
from dpro.search.tensor_partition import slowest_lines, why_not
from dpro.search.view import ALL, Speedups
from dpro.trace.byteps import aligned, cut

#: Into how many parts a group may be cut.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: The walk along the path ends when so many rounds in a row brought little (dPRO), and that is this share.
_ROUNDS, _LITTLE = 5, 0.001
#: Runs of about total / 2^i bytes are where it starts from, among others.
_HALVINGS = 5
#: Starts from which it climbs, and replays granted to each round of that.
_CLIMBS, _JUDGED = 3, 24
#: A line of stages that is this exact (share of the step) for all that was replayed may refuse a merge.
_EXACT = 1e-6


class Steps:
    """The replay, with a memory and a deadline; and what a line of stages says without one."""

    def __init__(self, graph: Graph, deadline_s: float, speedups: Speedups, counts: Sequence[int]) -> None:
        self.graph, self.speedups, self.counts = graph, speedups, sorted(counts)
        self.evaluations = 0
        self.known: dict[Fused, int] = {}
        self._pass = FusedPartition()
        self._deadline_s = deadline_s
        self._mark = graph.mark()
        self._delta: DeltaReplay | None = None
        self._stars: dict[tuple[int, int], int] = {}
        self._ran: dict[tuple[State, tuple[int, ...], int], State] = {}
        ps, model = told(graph)
        largest = max(graph.tensors[t].nbytes for t in pushed(graph))
        there, add, back = slowest_lines(graph, pushed(graph)[0], largest)
        copy_out, copy_in = (
            max((model.copy(resources(rank)[way]) for rank in ps.layout.ranks), key=lambda line: line.time_ns(largest))
            for way in (0, 1)
        )
        self.line = Line(
            copy_out, there, add, back, copy_in,
            workers=len(ps.layout.ranks), out_lag=model.lag("out"), push_lag=model.lag("push"),
            ask_lag=model.lag("acknowledge") + model.lag("ask"), sum_lag=model.lag("sum"), pull_lag=model.lag("pull"),
            in_lag=model.lag("in"),
        )  # fmt: skip
        #: when each gradient is ready on the last worker; the step without any on its way; what follows the last one
        self.ready_ns: dict[int, int] = {}
        self.compute_ns = self.rest_ns = 0
        self._look()
        #: whether nothing can overtake: what a line says of a state then holds whatever comes after
        self.exact = ps.layout.servers == 1 and not ps.layout.orderly and not ps.layout.credit
        names = [name for pair in ps.layout.links.values() for name in pair]
        self.exact = self.exact and len(set(names)) == len(names)

    def _look(self) -> None:
        """One replay without synchronisation."""
        graph = self.graph
        gone = [op for bucket in graph.buckets for op in bucket.ops]
        graph.remove_ops(gone)
        played, arrays = replay(graph), graph.arrays()
        graph.undo(self._mark)
        row = {op: i for i, op in enumerate(arrays.ids.tolist())}
        for (_, tensor), op in graph.out_op.items():
            self.ready_ns[tensor] = max(self.ready_ns.get(tensor, 0), int(played.end[row[op]]))
        taken = [int(played.end[row[op]]) for op in graph.in_op.values()]
        self.compute_ns = played.makespan_ns
        self.rest_ns = played.makespan_ns - max(taken, default=played.makespan_ns)

    def out_of_time(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def sizes(self, group: tuple[int, ...], bound: int) -> list[int]:
        return cut(sum(self.graph.tensors[t].nbytes for t in group), bound)

    def rebase(self, fused: Fused) -> None:
        """Let the graph have these, so that what differs little from them costs little to judge."""
        self.graph.undo(self._mark)
        self._pass.apply(self.graph, fused)
        self._delta = DeltaReplay(self.graph) if self.speedups.delta else None

    def restore(self) -> None:
        self.graph.undo(self._mark)
        self._delta = None

    def step_ns(self, fused: Fused) -> int:
        """Replayed; asked once, remembered."""
        if fused not in self.known:
            mark = self._pass.apply(self.graph, fused)
            try:
                self.evaluations += 1
                step_ns = self._delta.makespan_ns() if self._delta is not None else replay(self.graph).makespan_ns
            finally:
                self.graph.undo(mark)
            self.known[fused] = step_ns
            self.exact = self.exact and abs(self.estimate_ns(fused) - step_ns) <= _EXACT * step_ns
        return self.known[fused]

    def states(self, fused: Fused) -> list[State]:
        """Of the line: before the first group, and after each."""
        found = [IDLE]
        for group, bound in fused:
            key = found[-1], group, bound
            if key not in self._ran:
                self._ran[key] = self.line.run(found[-1], self.ready(group), self.sizes(group, bound))
            found.append(self._ran[key])
        return found

    def ready(self, group: Iterable[int]) -> int:
        return max(self.ready_ns[t] for t in group)

    def estimate_ns(self, fused: Fused) -> int:
        """Length of the step as the line has it."""
        return max(self.compute_ns, self.states(fused)[-1][-1] + self.rest_ns)

    def pair(self, fused: Fused, at: int, bound: int) -> Pair:
        """Groups ``at`` and the one after it on the line, apart and as one in parts of up to ``bound`` bytes."""
        (first, first_bound), (second, second_bound) = fused[at : at + 2]
        return pair(
            self.line,
            self.states(fused[:at])[-1],
            (self.ready(first), self.ready(second)),
            (self.sizes(first, first_bound), self.sizes(second, second_bound)),
            self.sizes((*first, *second), bound),
        )

    def bound(self, group: tuple[int, ...], count: int) -> int:
        """Bytes of a part at most of a group in ``count`` parts, as nearly as whole pages allow."""
        return aligned(-(-sum(self.sizes(group, 1 << 62)) // count))

    def bounds(self, group: tuple[int, ...]) -> list[int]:
        return list(dict.fromkeys(self.bound(group, count) for count in self.counts))

    def star(self, group: tuple[int, ...]) -> int:
        """Bytes of a part at ``k*``: the closed form, and from there as long as it gets better in a replay of this
        group alone (dPRO's partial replay)."""
        nbytes = sum(self.graph.tensors[t].nbytes for t in group)
        key = group[0], nbytes
        if key not in self._stars:
            star = best_parts(nbytes, *slowest_lines(self.graph, group[0], nbytes))
            at = min(range(len(self.counts)), key=lambda i: abs(self.counts[i] - star))
            if self.speedups.partial:
                alone = {at: self._alone_ns(group, self.counts[at])}
                for way in (1, -1):
                    while 0 <= at + way < len(self.counts):
                        alone[at + way] = self._alone_ns(group, self.counts[at + way])
                        if alone[at + way] >= alone[at]:
                            break
                        at += way
            self._stars[key] = self.bound(group, self.counts[at])
        return self._stars[key]

    def _alone_ns(self, group: tuple[int, ...], count: int) -> int:
        ps, model = told(self.graph)
        scratch = Graph()
        scratch.tensors = self.graph.tensors
        for rank in ps.layout.ranks:
            scratch.out_op[rank, group[0]] = scratch.add_op("out", OpKind.OUT, rank=rank)
        add_parts(scratch, group[:1], self.sizes(group, self.bound(group, count)), ps, model)
        return replay(scratch).makespan_ns


def search(
    graph: Graph,
    *,
    time_budget_s: float = 10.0,
    speedups: Speedups = ALL,
    counts: Sequence[int] = COUNTS,
) -> SearchResult:
    """Find the groups and parts that make the replayed step of a parameter server job shortest.

    The one candidate, if any is faster than the job's own partitions, has a plan that sets nothing.

    Args:
        counts: of parts that are tried.
    """
    began = time.monotonic()
    why = _nothing_to_do(graph)
    if why:
        baseline_ms = replay(graph).makespan_ns / 1e6
        return SearchResult(baseline_ms, evaluations=1, seconds=time.monotonic() - began, stopped=why)
    mark, known = graph.mark(), graph.info.get(MODEL)
    try:
        graph.info[MODEL] = known or fit_ps([graph])
        steps = Steps(graph, began + time_budget_s, speedups, counts)
        jobs = dict(own(graph))
        start = tuple(((t,), jobs[t]) for t in pushed(graph))
        baseline_ns = steps.step_ns(start)
        _search(steps)
        found = min(steps.known, key=lambda fused: (steps.known[fused], len(fused), fused))
        graph.undo(mark)
        FusedPartition().apply(graph, found)  # edits of another's schedule may break ties otherwise
        step_ns = replay(graph).makespan_ns
    finally:
        graph.undo(mark)
        graph.info[MODEL] = known
        if known is None:
            del graph.info[MODEL]
    return SearchResult(
        baseline_ns / 1e6,
        [_candidate(found, step_ns, baseline_ns)] if step_ns < baseline_ns else [],
        evaluations=steps.evaluations,
        seconds=time.monotonic() - began,
        stopped="time budget" if steps.out_of_time() else "no improvement left",
    )


def _nothing_to_do(graph: Graph) -> str:
    if (why := why_not(graph)) or sorted(pushed(graph)) == sorted(t for t, _ in own(graph)):
        return why
    return "no gradient's size is known"


def _candidate(fused: Fused, step_ns: int, baseline_ns: int) -> Candidate:
    plan = Plan(predicted_ms=step_ns / 1e6, baseline_ms=baseline_ns / 1e6)
    name = f"{len(fused)} group{'s' * (len(fused) > 1)}, if the library fused"
    return Candidate(name, plan, step_ns / 1e6, tuple(group for group, _ in fused), ((FusedPartition(), fused),))


def _search(steps: Steps) -> None:
    for start in _starts(steps):
        if steps.out_of_time():
            return
        steps.step_ns(start)
    climbed: list[Fused] = []
    for start in sorted(steps.known, key=lambda fused: (steps.known[fused], len(fused), fused)):
        if len(climbed) < _CLIMBS and all(len(start) != len(other) for other in climbed):
            climbed.append(start)
    try:
        for start in climbed:
            _climb(steps, _walk(steps, start))
    finally:
        steps.restore()


def _starts(steps: Steps) -> Iterator[Fused]:
    """Each gradient by itself, runs up to a size, what is ready at once (Theorem 3: it was made together); at k*."""
    graph = steps.graph
    total = sum(graph.tensors[t].nbytes for t in pushed(graph))
    groupings = [runs(graph, total >> i) for i in range(_HALVINGS)]
    at_once: dict[tuple[int, str], list[int]] = {}
    for t in pushed(graph):
        at_once.setdefault((steps.ready_ns[t], graph.tensors[t].dtype), []).append(t)
    for groups in (runs(graph, 0), *groupings, [tuple(group) for group in at_once.values()]):
        yield tuple((group, steps.star(group)) for group in groups)


def _walk(steps: Steps, start: Fused) -> Fused:
    """Algorithm 1's loop from ``start``; the best of it."""
    here = best = start
    little = 0
    while little < _ROUNDS and not steps.out_of_time():
        steps.rebase(here)
        now = list(here)
        for lead in [here[at][0][0] for at in _on_path(steps, here)]:
            if steps.out_of_time():
                return best
            at = next(i for i, (group, _) in enumerate(now) if lead in group)
            now[at] = now[at][0], steps.star(now[at][0])
            if at and _alike(steps, now[at - 1][0], now[at][0]):
                fused = (*now[at - 1][0], *now[at][0])
                if steps.pair(tuple(now), at - 1, steps.star(fused)).pays:
                    now[at - 1 : at + 1] = [(fused, steps.star(fused))]
        if tuple(now) == here:
            break
        here = tuple(now)
        little = little + 1 if steps.step_ns(here) > steps.step_ns(best) * (1 - _LITTLE) else 0
        best = min(best, here, key=steps.step_ns)
    return best


def _climb(steps: Steps, start: Fused) -> None:
    """To the best of what is one change away, as long as that is better."""
    here = start
    while not steps.out_of_time():
        steps.rebase(here)
        ways: dict[Fused, int] = {}
        for way in neighbours(steps, here, _on_path(steps, here)):
            if steps.out_of_time():
                return
            if way not in steps.known and way not in ways:
                ways[way] = steps.estimate_ns(way) if steps.speedups.partial else 0
        most = _JUDGED if steps.speedups.partial else len(ways)
        judged = sorted(ways, key=lambda way: (ways[way], way))[:most]
        for way in judged:
            if steps.out_of_time():
                return
            steps.step_ns(way)
        best = min(judged, key=lambda way: (steps.step_ns(way), way), default=here)
        if steps.step_ns(best) >= steps.step_ns(here):
            return
        here = best


def _on_path(steps: Steps, here: Fused) -> list[int]:
    """Places in ``here``, which is what the graph has, of groups on the critical path, in its order."""
    owner = steps.graph.column("tensor")
    place = {group[0]: at for at, (group, _) in enumerate(here)}
    path = (int(owner[step.op]) for step in critical_path(steps.graph, replay(steps.graph)).steps)
    return list(dict.fromkeys(place[tensor] for tensor in path if tensor in place))


def _alike(steps: Steps, first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return steps.graph.tensors[first[0]].dtype == steps.graph.tensors[second[0]].dtype


def neighbours(steps: Steps, here: Fused, places: Iterable[int]) -> Iterator[Fused]:
    """One change of a group at one of ``places``: cut otherwise, fused with the one before or after it (where
    :func:`worth_merging`), split, or some gradients from its end to the next one or back."""
    for at in places:
        group, bound = here[at]
        for other in steps.bounds(group):
            yield (*here[:at], (group, other), *here[at + 1 :])
        for low in (at - 1, at):
            if 0 <= low < len(here) - 1 and _alike(steps, here[low][0], here[low + 1][0]):
                fused = (*here[low][0], *here[low + 1][0])
                for other in steps.bounds(fused):
                    merged = (*here[:low], (fused, other), *here[low + 2 :])
                    if worth_merging(steps, here, low, merged):
                        yield merged
                yield from _moved(steps, here, low)
        for cut_at in _steps_from(len(group)):
            first, second = group[:cut_at], group[cut_at:]
            for a, b in (*_around(steps, first, second, bound, bound), (steps.star(first), steps.star(second))):
                yield (*here[:at], (first, a), (second, b), *here[at + 1 :])


def worth_merging(steps: Steps, here: Fused, low: int, merged: Fused) -> bool:
    """Whether ``merged``, which is ``here`` but for groups ``low`` and the next as one, may be better."""
    return not steps.exact or steps.pair(here, low, merged[low][1]).may_pay


def _moved(steps: Steps, here: Fused, low: int) -> Iterator[Fused]:
    """Both cut otherwise at once, with and without gradients that change sides."""
    (first, a), (second, b) = here[low : low + 2]
    both = (*first, *second)
    for cut_at in _steps_from(len(both)):
        left, right = both[:cut_at], both[cut_at:]
        for one, other in (*_around(steps, left, right, a, b), (steps.star(left), steps.star(right))):
            yield (*here[:low], (left, one), (right, other), *here[low + 2 :])


def _around(steps: Steps, first: tuple[int, ...], second: tuple[int, ...], a: int, b: int) -> Iterator[tuple[int, int]]:
    """Bounds of two groups in about the number of parts that ``a`` and ``b`` make of them."""
    return product(_near(steps.bounds(first), a), _near(steps.bounds(second), b))


def _near(bounds: Sequence[int], bound: int) -> Sequence[int]:
    at = min(range(len(bounds)), key=lambda i: abs(math.log(bounds[i] / bound)))
    return bounds[max(0, at - 1) : at + 2]


def _steps_from(n: int) -> list[int]:
    """Places at which to cut a run of ``n``: all of a short one, else those near the ends and its middle."""
    near = {1 << i for i in range(n.bit_length())} | set(range(1, min(n, 9)))
    return sorted(at for at in near | {n - at for at in near} | {n // 2} if 0 < at < n)
