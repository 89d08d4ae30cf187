"""From the ranks' traces to one global graph.

Collectives are joined across ranks by group, name and order: every rank arrives, the transfer runs
once, every rank goes on. The transfer is the common end minus the *latest* arrival: the waiting of
early ranks belongs to the ranks they wait for. What the ranks do not have in common is left as
each rank's own op and listed in ``graph.warnings``; nothing here raises for a strange trace.

A gap is what the known dependencies leave of the measured time. Replaying the very steps a graph was
read from therefore agrees with their measurement almost by construction, even if a dependency is
missing: it checks consistency, not prediction. ``info["unexplained_ns"]``, one step against the mean
of the others, and what happens after an edit say more.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from dpro.clock.ends import align_on_ends
from dpro.errors import TraceError
from dpro.graph.ddp import CHANNEL
from dpro.graph.draft import DraftOp, Local
from dpro.graph.graph import NO_RESOURCE, Bucket, Graph, OpKind, TensorInfo
from dpro.graph.local import build_local
from dpro.graph.threads import costly_names
from dpro.trace.model import RankTrace
from dpro.trace.steps import step_finish_ns, used_steps

#: No launch takes longer to reach an idle device; a longer gap before a kernel has another cause.
LAUNCH_LATENCY_NS = 50_000
_UNEXPLAINED_SHARE = 0.01


@dataclass(frozen=True)
class Measured:
    """What the traces say a step takes: ``mean_ns`` over ``steps``, joined over all ranks."""

    mean_ns: float
    steps: list[int]


def common_steps(traces: list[RankTrace]) -> tuple[list[int], list[str]]:
    """Steps that every rank has and that are fit to be averaged, and remarks on the others."""
    if not traces:
        raise TraceError("traces", "none given")
    counts = [trace.steps for trace in traces]
    notes = []
    steps = set(range(min(counts)))
    if min(counts) != max(counts):
        notes.append(f"ranks captured {min(counts)} to {max(counts)} steps: the first {min(counts)} are used")
    for trace in traces:
        usable, note = used_steps(trace)
        if note:
            notes.append(f"rank {trace.meta.rank}: {note}")
        steps &= set(usable)
    return sorted(steps), notes


def measure(traces: list[RankTrace]) -> Measured:
    """Mean measured step time, with the ranks put on one clock.

    A step lasts from when the last work of the step before ended (the first: from its own begin, on
    the earliest rank) to when its own last work ended, on the last rank: the host's, or that of a
    device op launched in the step that ran on (:func:`dpro.trace.steps.step_finish_ns`).
    """
    steps, _ = common_steps(traces)
    return Measured(_span_ns(traces, steps, align_on_ends(traces).offsets_ns) / _step_count(steps), steps)


def assemble_window(traces: list[RankTrace]) -> Graph:
    """All used steps, one after the other, as one graph: ``info["steps"]`` says how many.

    Replaying it and dividing by the steps is the fair comparison with :func:`measure` for jobs
    whose host runs ahead of the device from step to step.
    """
    steps, notes = common_steps(traces)
    graph = _Assembly(traces, steps, _names(traces)).graph
    graph.warnings[:0] = notes
    return graph


def assemble_steps(traces: list[RankTrace]) -> list[Graph]:
    """One graph per used step."""
    steps, notes = common_steps(traces)
    names = _names(traces)
    graphs = [_Assembly(traces, [step], names).graph for step in steps]
    for graph in graphs:
        graph.warnings[:0] = notes
    return graphs


def assemble(traces: list[RankTrace], step: int | None = None) -> Graph:
    """The graph of one iteration.

    ``step`` picks a captured one; without it the median of the used steps is taken. (dPRO gives every op
    its mean over 10 iterations. On a noisy machine that is too fast: the mean of the latest arrivals is
    later than the latest of the mean arrivals.)

    ``info["measured_ns"]`` is the mean over the used steps, or that of ``step``.

    Raises:
        TraceError: no traces, or no such step.
    """
    steps, notes = common_steps(traces)
    if step is not None:
        if not 0 <= step < min(t.steps for t in traces):
            raise TraceError(traces[0].meta.source or "traces", f"no step {step}")
        graph = _Assembly(traces, [step], _names(traces)).graph
    else:
        names, offsets = _names(traces), align_on_ends(traces).offsets_ns
        by_length = sorted(steps, key=lambda s: _span_ns(traces, [s], offsets))
        median = by_length[(len(by_length) - 1) // 2]
        graph = _Assembly(traces, [median], names).graph
        graph.info["measured_ns"] = measure(traces).mean_ns
    graph.info["captured_steps"] = len(steps)
    graph.warnings[:0] = notes
    return graph


def _names(traces: list[RankTrace]) -> set[str]:
    """Names that are ops of their own, the same on all ranks so that their graphs are alike."""
    return set().union(*map(costly_names, traces))


def _window(trace: RankTrace, steps: list[int]) -> tuple[int, int]:
    return int(trace.step_bounds[steps[0], 0]), int(trace.step_bounds[steps[-1], 1])


def _step_count(steps: list[int]) -> int:
    return steps[-1] - steps[0] + 1


def _span_ns(traces: list[RankTrace], steps: list[int], offsets: list[int]) -> int:
    """From the beginning to the end of consecutive steps, see :func:`measure`."""
    finish = [step_finish_ns(t) + o for t, o in zip(traces, offsets, strict=True)]
    begin = min(int(t.step_bounds[steps[0], 0]) + o for t, o in zip(traces, offsets, strict=True))
    if steps[0] > 0:
        begin = max([begin, *(int(f[steps[0] - 1]) for f in finish if f[steps[0] - 1] < f[steps[0]])])
    return max(int(f[steps[-1]]) for f in finish) - begin


class _Assembly:
    """Builds one graph of the given consecutive steps."""

    def __init__(self, traces: list[RankTrace], steps: list[int], names: set[str]) -> None:
        self.traces = traces
        self.graph = Graph()
        self.offsets = align_on_ends(traces).offsets_ns
        self.locals = [build_local(t, *_window(t, steps), _rank(t, i), names) for i, t in enumerate(traces)]
        begins = [x.begin + o for x, o in zip(self.locals, self.offsets, strict=True)]
        # From the second step on, what a rank did before the last one began belongs to the time of the
        # step before: the graph begins with the last rank. The first step begins with the first.
        self.origin = max(begins) if steps[0] > 0 else min(begins)
        for local, begin in zip(self.locals, begins, strict=True):
            _skip_ahead(local, self.origin - begin)
        self.ids: dict[int, int] = {}  # id(draft) -> op, what successors of the draft depend on
        graph = self.graph
        graph.ranks = len(traces)
        for trace in traces:
            graph.warnings += [f"rank {trace.meta.rank}: {line}" for line in trace.warnings]
        for local in self.locals:
            graph.warnings += [f"rank {local.rank}: {line}" for line in local.warnings]
        joined = self._match()
        shared = {id(op) for group in joined for op in group}
        single: list[list[DraftOp | None]] = [
            [op if i == j else None for j in range(len(self.locals))]
            for i, local in enumerate(self.locals)
            for op in local.collectives
            if op.resource == CHANNEL and id(op) not in shared
        ]
        self._add_ops(joined, sorted([*joined, *single], key=self._launched))
        span = _span_ns(traces, steps, self.offsets)
        unexplained = self._unexplained()
        if unexplained > _UNEXPLAINED_SHARE * span * len(traces):
            graph.warnings.append(
                f"device work waited {unexplained / 1e6:.1f} ms for something the traces do not show (kept as gaps)"
            )
        graph.info.update(
            unexplained_ns=unexplained,
            steps=_step_count(steps),
            measured_ns=span / _step_count(steps),
            unprofiled_ns=_unprofiled(traces),
            launch_ns=self._launch_cost(),
            main_resource={x.rank: graph.resource(x.main) for x in self.locals},
            channel=CHANNEL,
        )
        self._add_tensors()

    # -- collectives -----------------------------------------------------------------------------

    def _match(self) -> list[list[DraftOp | None]]:
        """Groups of one op per rank (None where a rank has no part in it) that are one collective."""
        ranks = len(self.locals)
        if ranks == 1:
            return []
        keys = [[self._key(i, op) for op in local.collectives] for i, local in enumerate(self.locals)]
        rows: list[list[int | None]] = [[j] + [None] * (ranks - 1) for j in range(len(keys[0]))]
        for i in range(1, ranks):
            matcher = SequenceMatcher(None, keys[0], keys[i], autojunk=False)
            size = 0
            for a, b, n in matcher.get_matching_blocks():
                for k in range(n):
                    rows[a + k][i] = b + k
                size += n
            if size < max(len(keys[0]), len(keys[i])):
                self.graph.warnings.append(
                    f"rank {self.locals[i].rank} has {len(keys[i])} collectives, rank {self.locals[0].rank} "
                    f"{len(keys[0])}: {size} in common, the others stay each rank's own"
                )
        out: list[list[DraftOp | None]] = []
        for row in rows:
            found = [self.locals[i].collectives[j] if j is not None else None for i, j in enumerate(row)]
            if all(op is not None for op in found):
                out.append(found)
        return out

    def _key(self, index: int, op: DraftOp) -> tuple[str, str]:
        facts = self.traces[index].collectives[op.collective]
        return facts.group, facts.name

    # -- ops -------------------------------------------------------------------------------------

    def _add_ops(self, joined: list[list[DraftOp | None]], groups: list[list[DraftOp | None]]) -> None:
        """All ops and edges. ``groups`` are what becomes one op for all members, in launch order."""
        graph = self.graph
        shared = {id(op) for group in joined for op in group}
        grouped = {id(op) for group in groups for op in group}
        self._common_ends(groups)
        drafts = [(i, op) for i, local in enumerate(self.locals) for op in local.ops]
        times: list[int] = []  # measured start by op id
        arrivals: dict[int, int] = {}
        alone = 0
        for i, op in drafts:
            local = self.locals[i]
            alone += op.collective >= 0 and id(op) not in shared
            if id(op) not in grouped:
                self.ids[id(op)] = self._plain(i, op)
            elif op.resource != CHANNEL:
                arrivals[id(op)] = graph.add_op(
                    f"arrive {op.name}", OpKind.LOCAL, resource=graph.resource(op.resource),
                    gap=op.gap(local.begin), rank=local.rank,
                )  # fmt: skip
            else:
                continue
            times.append(op.start + self.offsets[i])
        previous_end = -(2**62)
        for group in groups:
            previous_end = self._transfer(group, previous_end)
            times.append(self._launched(group))
        if alone and (len(self.locals) > 1 or any(t.meta.world_size > 1 for t in self.traces)):
            graph.warnings.append(f"{alone} collective(s) seen by one rank only: waiting for its peers is inside")
        edges: set[tuple[int, int]] = set()
        for _, op in drafts:
            me = arrivals.get(id(op), self.ids[id(op)])
            edges.update((self.ids[id(p)], me) for p in op.preds if id(p) in self.ids)
            if id(op) in arrivals:
                edges.add((me, self.ids[id(op)]))
        broken = _break_cycles(times, edges)
        if broken:
            graph.warnings.append(f"{broken} dependencies that closed a cycle were dropped")
        for src, dst in sorted(edges):
            graph.add_edge(src, dst)

    def _plain(self, index: int, op: DraftOp) -> int:
        local = self.locals[index]
        gap = op.gap(local.begin)
        if not op.preds:  # a source starts when its rank does
            gap = max(0, gap + local.begin + self.offsets[index] - self.origin)
        return self.graph.add_op(
            op.name, op.kind, resource=self.graph.resource(op.resource), duration=op.duration, gap=gap,
            tensor=op.tensor, rank=local.rank, nbytes=op.nbytes,
        )  # fmt: skip

    def _members(self, group: list[DraftOp | None]) -> list[tuple[DraftOp, int]]:
        """Ops of a group with the offset of their rank's clock."""
        return [(op, offset) for op, offset in zip(group, self.offsets, strict=True) if op is not None]

    def _launched(self, group: list[DraftOp | None]) -> int:
        """Latest arrival: on a stream the kernel's start, on the host the end of the enqueueing call."""
        return max(
            (max(p.end for p in op.preds) if op.resource == CHANNEL else op.start) + offset
            for op, offset in self._members(group)
        )

    def _common_ends(self, groups: list[list[DraftOp | None]]) -> None:
        """Give the members of each group one end; that a rank goes on later is then its own gap.

        It is the end on the first rank to leave. On the host channel, where two may be in flight,
        ends are put in launch order: whoever waits for one has waited for those before it.
        """
        before = -(2**62)
        for group in groups:
            members = self._members(group)
            end = max(min(op.end + o for op, o in members), self._launched(group))
            if members[0][0].resource == CHANNEL:
                end = before = max(end, before)
            for op, offset in members:
                op.end = end - offset

    def _end(self, group: list[DraftOp | None]) -> int:
        op, offset = self._members(group)[0]
        return op.end + offset

    def _transfer(self, group: list[DraftOp | None], previous_end: int) -> int:
        """The one op that stands for a joined collective. Returns the end of the host channel's last.

        The channel is a queue of one (dPRO: a link is a device), so a transfer on it is charged from
        the moment that the one before it was through.
        """
        members = [op for op, _ in self._members(group)]
        end, arrival = self._end(group), self._launched(group)
        serial = members[0].resource == CHANNEL
        if serial:
            arrival = max(arrival, previous_end)
        made = self.graph.add_op(
            members[0].name, OpKind.COLLECTIVE, resource=self.graph.resource(CHANNEL) if serial else NO_RESOURCE,
            duration=max(0, end - arrival), nbytes=max(op.nbytes for op in members),
        )  # fmt: skip
        for op in members:
            self.ids[id(op)] = made
        return end if serial else previous_end

    def _unexplained(self) -> int:
        """ns that device ops were idle before their start beyond any launch latency."""
        gaps = (op.gap(x.begin) for x in self.locals for op in x.ops if "/stream/" in op.resource)
        return sum(gap for gap in gaps if gap > LAUNCH_LATENCY_NS)

    # -- tensors ---------------------------------------------------------------------------------

    def _add_tensors(self) -> None:
        graph, first = self.graph, self.locals[0]
        if not first.outs or self.graph.info.get("steps") != 1:
            return  # a graph of several steps has a gradient several times
        known = self.traces[0].tensors
        sizes = dict.fromkeys(first.outs, 0)
        for b in first.buckets:
            if b.run is not None and b.run.nbytes > 0:
                sizes.update((t, b.run.nbytes // len(b.members)) for t in b.members)
        for t in range(max(first.outs) + 1):
            told = known[t] if t < len(known) else None
            graph.tensors.append(
                TensorInfo(told.name, told.nbytes, told.dtype, told.ready)
                if told
                else TensorInfo(f"grad{t}", sizes.get(t, 0), "", t)
            )
        for local in self.locals:
            graph.out_op.update({(local.rank, t): self.ids[id(op)] for t, op in local.outs.items()})
            graph.in_op.update({(local.rank, t): self.ids[id(op)] for t, op in local.ins.items()})
        graph.set_buckets(
            [
                Bucket(tuple(b.members), sum(graph.tensors[t].nbytes for t in b.members), (self.ids[id(b.run)],))
                for b in first.buckets
                if b.run is not None
            ]
        )
        for bucket in graph.buckets:
            graph.set(bucket.ops[0], "nbytes", bucket.nbytes)
        if any(len(x.outs) != len(first.outs) for x in self.locals):
            graph.warnings.append("ranks differ in the number of gradients")

    def _launch_cost(self) -> float:
        costs = [b.launch.duration for local in self.locals for b in local.buckets]
        return float(np.median(costs)) if costs else 0.0


def _rank(trace: RankTrace, index: int) -> int:
    return trace.meta.rank if trace.meta.rank >= 0 else index


def _unprofiled(traces: list[RankTrace]) -> float | None:
    """Median un-profiled step of the slowest rank, ns; None where nothing was timed."""
    medians = [float(np.median(t.meta.unprofiled_step_ns)) for t in traces if t.meta.unprofiled_step_ns]
    return max(medians) if medians else None


def _skip_ahead(local: Local, ahead_ns: int) -> None:
    """Take the first ``ahead_ns`` of the main thread out of its gaps and durations."""
    before = local.first
    for op in local.chains[local.main]:
        if ahead_ns <= 0 or op.preds != [before]:
            return
        gap = min(ahead_ns, op.gap(local.begin))
        op.skipped += gap
        ahead_ns -= gap
        work = min(ahead_ns, op.duration)
        op.duration -= work
        ahead_ns -= work
        before = op


def _break_cycles(times: list[int], edges: set[tuple[int, int]]) -> int:
    """Remove edges until no cycle is left, the one most against measured time first; how many.

    ``times``: measured start by op.
    """
    removed = 0
    while True:
        waiting = [0] * len(times)
        after: list[list[int]] = [[] for _ in times]
        for src, dst in edges:
            waiting[dst] += 1
            after[src].append(dst)
        ready = [op for op, n in enumerate(waiting) if not n]
        done = 0
        while ready:
            op = ready.pop()
            done += 1
            for dst in after[op]:
                waiting[dst] -= 1
                if not waiting[dst]:
                    ready.append(dst)
        if done == len(times):
            return removed
        stuck = [(src, dst) for src, dst in edges if waiting[src] and waiting[dst]]
        edges.discard(min(stuck, key=lambda edge: (times[edge[1]] - times[edge[0]], edge)))
        removed += 1
