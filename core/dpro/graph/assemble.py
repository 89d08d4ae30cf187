"""From the ranks' traces to one global graph.

Collectives are joined across ranks by group, name and order: every rank arrives, the transfer runs
once, every rank goes on. The transfer is the common end minus the *latest* arrival: the waiting of
early ranks belongs to the ranks they wait for. What the ranks do not have in common is left as
each rank's own op and listed in ``graph.warnings``; nothing here raises for a strange trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from dpro.clock.ends import align_on_ends
from dpro.errors import TraceError
from dpro.graph.ddp import CHANNEL
from dpro.graph.draft import DraftOp, Local
from dpro.graph.graph import NO_RESOURCE, Bucket, Graph, OpKind, TensorInfo
from dpro.graph.local import build_local
from dpro.trace.model import RankTrace
from dpro.trace.steps import step_finish_ns, used_steps


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
    graph = _Assembly(traces, steps).graph
    graph.warnings[:0] = notes
    return graph


def assemble_steps(traces: list[RankTrace]) -> list[Graph]:
    """One graph per used step."""
    steps, notes = common_steps(traces)
    graphs = [_Assembly(traces, [step]).graph for step in steps]
    for graph in graphs:
        graph.warnings[:0] = notes
    return graphs


def assemble(traces: list[RankTrace], step: int | None = None) -> Graph:
    """The graph of one iteration.

    ``step`` picks a captured one. Without it: the median step, with every op's duration and gap
    averaged over all used steps of the same structure (dPRO, section 4.3, averages 10 iterations).

    Raises:
        TraceError: no traces, or no such step.
    """
    steps, notes = common_steps(traces)
    if step is not None:
        if not 0 <= step < min(t.steps for t in traces):
            raise TraceError(traces[0].meta.source or "traces", f"no step {step}")
        graph = _Assembly(traces, [step]).graph
    else:
        graphs = [_Assembly(traces, [s]).graph for s in steps]
        graphs.sort(key=lambda g: g.info["measured_ns"])
        graph = graphs[(len(graphs) - 1) // 2]
        _average(graph, graphs)
    graph.info["measured_ns"] = measure(traces).mean_ns if step is None else graph.info["measured_ns"]
    graph.warnings[:0] = notes
    return graph


def _average(graph: Graph, graphs: list[Graph]) -> None:
    """Mean durations and gaps of the graphs with the same ops in the same order, into ``graph``."""
    alike = [g for g in graphs if _structure(g) == _structure(graph)]
    graph.info["averaged_steps"] = len(alike)
    if len(alike) < 2:
        return
    for key in ("duration", "gap"):
        mean = np.rint(np.mean([g.column(key) for g in alike], axis=0)).astype(np.int64)
        for op, value in enumerate(mean.tolist()):
            graph.set(op, key, value)
    for i, facts in enumerate(graph.info["collectives"]):
        facts["duration_ns"] = int(graph.column("duration")[facts["op"]])
        graph.info["collectives"][i] = facts


def _structure(graph: Graph) -> tuple[Any, ...]:
    names = [graph.name_of(op) for op in range(len(graph.column("name")))]
    return names, graph.column("resource").tolist(), graph.edges().tolist()


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

    def __init__(self, traces: list[RankTrace], steps: list[int]) -> None:
        self.traces = traces
        self.graph = Graph()
        alignment = align_on_ends(traces)
        self.offsets = alignment.offsets_ns
        self.locals = [build_local(t, *_window(t, steps), rank=_rank(t, i)) for i, t in enumerate(traces)]
        self.origin = min(x.begin + o for x, o in zip(self.locals, self.offsets, strict=True))
        self.ids: dict[int, int] = {}  # id(draft) -> op, what successors of the draft depend on
        self.collectives: list[dict[str, Any]] = []
        graph = self.graph
        graph.ranks = len(traces)
        for trace in traces:
            graph.warnings += [f"rank {trace.meta.rank}: {line}" for line in trace.warnings]
        for local in self.locals:
            graph.warnings += [f"rank {local.rank}: {line}" for line in local.warnings]
        joined = self._match()
        for group in joined:
            self._common_end(group)
        self._add_ops(joined)
        graph.info.update(
            steps=_step_count(steps),
            measured_ns=_span_ns(traces, steps, self.offsets) / _step_count(steps),
            unprofiled_ns=_unprofiled(traces),
            launch_ns=self._launch_cost(),
            main_resource={x.rank: graph.resource(x.main) for x in self.locals},
            channel=CHANNEL,
            collectives=self.collectives,
            clock_spread_ns=alignment.spread_ns,
            contention={x.rank: t.meta.contention for x, t in zip(self.locals, traces, strict=True)},
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
        unmatched = 0
        for i in range(1, ranks):
            matcher = SequenceMatcher(None, keys[0], keys[i], autojunk=False)
            size = 0
            for a, b, n in matcher.get_matching_blocks():
                for k in range(n):
                    rows[a + k][i] = b + k
                size += n
            if size < max(len(keys[0]), len(keys[i])):
                unmatched += 1
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

    def _add_ops(self, joined: list[list[DraftOp | None]]) -> None:
        graph = self.graph
        shared = {id(op): group for group in joined for op in group if op is not None}
        alone = 0
        drafts: list[tuple[int, int, int, DraftOp]] = []
        for i, local in enumerate(self.locals):
            drafts += [(op.start + self.offsets[i], i, n, op) for n, op in enumerate(local.ops)]
        drafts.sort(key=lambda x: x[:3])
        arrivals: dict[int, int] = {}
        for _, i, _, op in drafts:
            rank, local = self.locals[i].rank, self.locals[i]
            if op.collective < 0:
                self.ids[id(op)] = self._plain(op, rank, local)
            elif id(op) not in shared:
                alone += 1
                self.ids[id(op)] = self._plain(op, rank, local)
                self._note(op, self.ids[id(op)], op.duration)
            elif op.resource != CHANNEL:
                arrivals[id(op)] = graph.add_op(
                    f"arrive {op.name}", OpKind.LOCAL, resource=graph.resource(op.resource),
                    gap=op.gap(local.begin), rank=rank,
                )  # fmt: skip
        previous_end = -(2**62)
        for group in sorted(joined, key=self._end):
            previous_end = self._transfer(group, previous_end)
        if alone and (len(self.locals) > 1 or any(t.meta.world_size > 1 for t in self.traces)):
            graph.warnings.append(f"{alone} collective(s) seen by one rank only: waiting for its peers is inside")
        edges: set[tuple[int, int]] = set()
        for _, _, _, op in drafts:
            me = arrivals.get(id(op), self.ids[id(op)])
            edges.update((self.ids[id(p)], me) for p in op.preds if id(p) in self.ids)
            if id(op) in arrivals:
                edges.add((me, self.ids[id(op)]))
        broken = _break_cycles(len(graph.column("kind")), edges)
        if broken:
            graph.warnings.append(f"{broken} dependencies that closed a cycle were dropped")
        for src, dst in sorted(edges):
            graph.add_edge(src, dst)

    def _plain(self, op: DraftOp, rank: int, local: Local) -> int:
        gap = op.gap(local.begin)
        if op is local.first:
            gap = local.begin + self.offsets[self.locals.index(local)] - self.origin
        elif not op.preds:  # a source starts when its rank does
            gap += local.begin + self.offsets[self.locals.index(local)] - self.origin
        return self.graph.add_op(
            op.name, op.kind, resource=self.graph.resource(op.resource), duration=op.duration, gap=gap,
            tensor=op.tensor, rank=rank, nbytes=op.nbytes,
        )  # fmt: skip

    def _common_end(self, group: list[DraftOp | None]) -> None:
        """Give the members one end, the first rank's to leave: that a rank goes on later is its own gap."""
        members = [(op, o) for op, o in zip(group, self.offsets, strict=True) if op is not None]
        end = max(min(op.end + o for op, o in members), max(op.start + o for op, o in members))
        for op, offset in members:
            op.end = end - offset

    def _end(self, group: list[DraftOp | None]) -> int:
        return next(op.end + o for op, o in zip(group, self.offsets, strict=True) if op is not None)

    def _transfer(self, group: list[DraftOp | None], previous_end: int) -> int:
        """The one op that stands for a joined collective. Returns its end, for a serial channel."""
        members = [op for op in group if op is not None]
        arrival = max(op.start + o for op, o in zip(group, self.offsets, strict=True) if op is not None)
        end = self._end(group)
        serial = members[0].resource == CHANNEL
        if serial:
            # Two may be in flight; the channel is a queue of one (dPRO: a link is a device), so an
            # all-reduce is charged only from the moment the one before it was through.
            arrival = max(previous_end, max(
                p.end + o for op, o in zip(group, self.offsets, strict=True) if op is not None for p in op.preds
            ))  # fmt: skip
        duration = max(0, end - arrival)
        nbytes = max(op.nbytes for op in members)
        made = self.graph.add_op(
            members[0].name, OpKind.COLLECTIVE, resource=self.graph.resource(CHANNEL) if serial else NO_RESOURCE,
            duration=duration, nbytes=nbytes,
        )  # fmt: skip
        for op in members:
            self.ids[id(op)] = made
        self._note(members[0], made, duration)
        return max(end, previous_end) if serial else previous_end

    def _note(self, op: DraftOp, made: int, duration: int) -> None:
        bucket = next((i for i, b in enumerate(self.locals[0].buckets) if b.run is op), -1)
        self.collectives.append(
            {"nbytes": op.nbytes, "duration_ns": duration, "op": made, "ops": (made,), "name": op.name, "bucket": bucket}
        )

    # -- tensors ---------------------------------------------------------------------------------

    def _add_tensors(self) -> None:
        graph, first = self.graph, self.locals[0]
        if not first.outs or self.graph.info.get("steps") != 1:
            return  # a graph of several steps has a gradient several times
        known = self.traces[0].tensors
        sizes = {t: 0 for t in first.outs}
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
        for i, bucket in enumerate(graph.buckets):
            facts = next((c for c in self.collectives if c["bucket"] == i), None)
            if facts is not None and facts["nbytes"] < 0:
                facts["nbytes"] = bucket.nbytes
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


def _break_cycles(ops: int, edges: set[tuple[int, int]]) -> int:
    """Remove edges until no cycle is left, those against the order of ops (time) first; how many."""
    removed = 0
    while True:
        waiting = [0] * ops
        after: list[list[int]] = [[] for _ in range(ops)]
        for src, dst in edges:
            waiting[dst] += 1
            after[src].append(dst)
        ready = [op for op in range(ops) if not waiting[op]]
        done = 0
        while ready:
            op = ready.pop()
            done += 1
            for dst in after[op]:
                waiting[dst] -= 1
                if not waiting[dst]:
                    ready.append(dst)
        if done == ops:
            return removed
        stuck = [(src, dst) for src, dst in edges if waiting[src] and waiting[dst]]
        backward = [(src, dst) for src, dst in stuck if src >= dst]
        victim = min(backward or stuck, key=lambda edge: (edge[1] - edge[0], edge))
        edges.discard(victim)
        removed += 1
