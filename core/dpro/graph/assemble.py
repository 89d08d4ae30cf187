"""From the ranks' traces to one global graph.

Collectives are joined across ranks (:mod:`dpro.clock.match`): every rank arrives, the transfer runs
once, every rank goes on. The transfer is the common end minus the *latest* arrival: the waiting of
early ranks belongs to the ranks they wait for. What only one rank has stays its own op, and what
ranks of a group do not have in common is listed in ``graph.warnings``; nothing here raises for a
strange trace.

A gap is what the known dependencies leave of the measured time. Replaying the very steps a graph was
read from therefore agrees with their measurement almost by construction, even if a dependency is
missing: it checks consistency, not prediction. ``info["unexplained_ns"]``, one step against the mean
of the others, and what happens after an edit say more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dpro.clock.match import match_collectives
from dpro.errors import TraceError
from dpro.graph.comm import Run, add_messages
from dpro.graph.cycles import break_cycles
from dpro.graph.dataflow import is_dataflow, skip_ahead
from dpro.graph.ddp import CHANNEL, IN_FLIGHT
from dpro.graph.draft import DraftOp, Local
from dpro.graph.graph import NO_RESOURCE, Bucket, Graph, OpKind, TensorInfo
from dpro.graph.horovod import is_horovod, with_responses
from dpro.graph.local import build_local
from dpro.graph.memory import place
from dpro.graph.ps import Partitions, apart, is_ps
from dpro.graph.spans import common_steps, one_clock, span_ns, unprofiled_ns
from dpro.graph.threads import costly_names
from dpro.graph.wire import Exchange, read_wire
from dpro.trace.memory import MEMORY
from dpro.trace.model import RankTrace

#: No launch takes longer to reach an idle device; a longer gap before a kernel has another cause.
LAUNCH_LATENCY_NS = 50_000
_UNEXPLAINED_SHARE = 0.01


def assemble_steps(traces: list[RankTrace], *, align: bool = True, messages: bool = False) -> list[Graph]:
    """One graph per used step; the rest as :func:`assemble`."""
    traces, servers = apart(traces)
    steps, notes = common_steps(traces)
    capture = _Capture(traces, servers, align, messages)
    graphs = [capture.graph(step) for step in steps]
    for graph in graphs:
        graph.warnings[:0] = notes
    return graphs


def assemble(traces: list[RankTrace], step: int | None = None, *, align: bool = True, messages: bool = False) -> Graph:
    """The graph of one iteration.

    ``step`` picks a captured one; without it the median of the used steps is taken. (dPRO gives every op
    its mean over 10 iterations. On a noisy machine that is too fast: the mean of the latest arrivals is
    later than the latest of the mean arrivals.) ``align=False`` compares the ranks' clocks as they are,
    which may be nonsense: it is there to see what alignment is worth. ``messages`` makes a collective whose
    messages are all known a SEND and a RECV for each (:mod:`dpro.graph.comm`) instead of one op.

    ``info["measured_ns"]`` is the mean over the used steps, or that of ``step``; ``info["clock"]`` what is
    known of each rank's clock.

    Traces of parameter servers, where there are any, tell of messages and clocks; they have no steps.

    Raises:
        TraceError: no traces, or no such step.
    """
    traces, servers = apart(traces)
    steps, notes = common_steps(traces)
    capture = _Capture(traces, servers, align, messages)
    if step is not None:
        if not 0 <= step < min(t.steps for t in traces):
            raise TraceError(traces[0].meta.source or "traces", f"no step {step}")
        graph = capture.graph(step)
    else:
        by_length = sorted(steps, key=lambda s: span_ns(capture.clock, [s]))
        graph = capture.graph(by_length[(len(by_length) - 1) // 2])
        graph.info["measured_ns"] = span_ns(capture.clock, steps) / len(steps)
    graph.info["captured_steps"] = len(steps)
    graph.warnings[:0] = notes
    return graph


class _Capture:
    """What the graphs of all steps are made from."""

    def __init__(self, traces: list[RankTrace], servers: list[RankTrace], align: bool, messages: bool) -> None:
        pushed = any(map(is_ps, traces))
        if not pushed:
            traces = with_responses(traces)
        self.clock = one_clock([*traces, *servers], align)
        servers = self.clock.traces[len(traces) :]
        if servers:
            self.clock = replace(self.clock, traces=self.clock.traces[: len(traces)])
        #: what a parameter server's workers pushed and pulled, None in a job of collectives
        self.partitions = Partitions(self.clock.traces, servers) if pushed else None
        #: names that are ops of their own, the same on all ranks so that their graphs are alike
        self.names: set[str] = set().union(*map(costly_names, traces))
        self.shared = match_collectives(self.clock.traces)
        self.span_ns = span_ns(self.clock, list(range(min(t.steps for t in traces))))
        self.wire = None if pushed else read_wire(self.clock.traces, self.shared)
        #: (trace, row of a collective) -> its messages, where they are to be ops
        self.exchanges: dict[tuple[int, int], Exchange] = {}
        for c, exchange in self.wire.exchanges.items() if self.wire and messages else ():
            self.exchanges.update({(i, row): exchange for i, row in enumerate(self.shared[c].tolist()) if row >= 0})

    def graph(self, step: int) -> Graph:
        graph = _Assembly(self, step).graph
        graph.info["clock"] = self.clock.facts
        if self.wire:
            graph.info["messages"] = self.wire.facts(
                [_rank(t, i) for i, t in enumerate(self.clock.traces)], self.span_ns
            )
        graph.warnings[:0] = self.clock.warnings
        return graph


class _Assembly:
    """Builds the graph of one step."""

    def __init__(self, capture: _Capture, step: int) -> None:
        self.traces = traces = capture.clock.traces
        self.exchanges = capture.exchanges
        self.partitions, self.step = capture.partitions, step
        self.negotiated = any(map(is_horovod, traces)) and self.partitions is None
        self.graph = Graph()
        self.world_size = max(len(traces), *(trace.meta.world_size for trace in traces))
        windows = [(int(t.step_bounds[step, 0]), int(t.step_bounds[step, 1])) for t in traces]
        self.locals = [build_local(t, *windows[i], _rank(t, i), capture.names) for i, t in enumerate(traces)]
        begins = [local.begin for local in self.locals]
        # From the second step on, what a rank did before the last one began belongs to the time of the
        # step before: the graph begins with the last rank. The first step begins with the first.
        origin = max(begins) if step > 0 else min(begins)
        #: how much later than the graph each rank begins, ns; without one clock nobody knows
        self.late = [begin - origin if capture.clock.aligned else 0 for begin in begins]
        for trace, local, late in zip(traces, self.locals, self.late, strict=True):
            (skip_ahead if is_dataflow(trace) else _skip_ahead)(local, -late)
        #: id(draft) of all that lies between a gradient's OUT and IN, where a server is between them
        self.pushed = self.partitions.add_drafts(self.locals, step) if self.partitions else set[int]()
        self.ids: dict[int, int] = {}  # id(draft) -> op, what successors of the draft depend on
        self.bodies: dict[int, list[int]] = {}  # id(draft) -> all ops of a collective that is more than one
        graph = self.graph
        graph.ranks = len(traces)
        for trace in traces:
            graph.warnings += [f"rank {trace.meta.rank}: {line}" for line in trace.warnings]
        for local in self.locals:
            graph.warnings += [f"rank {local.rank}: {line}" for line in local.warnings]
        if self.partitions:
            graph.warnings += self.partitions.warnings
        joined = self._match(capture.shared)
        shared = {id(op) for group in joined for op in group}
        single: list[list[DraftOp | None]] = [
            [op if i == j else None for j in range(len(self.locals))]
            for i, local in enumerate(self.locals)
            for op in local.collectives
            if op.resource == CHANNEL and id(op) not in shared
        ]
        self._add_ops(joined, sorted([*joined, *single], key=self._launched))
        span = span_ns(capture.clock, [step])
        unexplained = self._unexplained()
        if unexplained > _UNEXPLAINED_SHARE * span * len(traces):
            graph.warnings.append(
                f"device work waited {unexplained / 1e6:.1f} ms for something the traces do not show (kept as gaps)"
            )
        graph.info.update(
            unexplained_ns=unexplained,
            world_size=self.world_size,
            measured_ns=span,
            unprofiled_ns=unprofiled_ns(traces),
            launch_ns=self._launch_cost(),
            main_resource={x.rank: graph.resource(x.main) for x in self.locals},
            channel=CHANNEL,
            negotiated=self.negotiated,
            in_flight=1 if self.negotiated else IN_FLIGHT,
        )
        self._add_tensors()
        placed = [(local.rank, place(t, local, self.ids)) for t, local in zip(traces, self.locals, strict=True)]
        graph.info[MEMORY] = {rank: memory for rank, memory in placed if memory is not None}

    # -- collectives -----------------------------------------------------------------------------

    def _match(self, shared: npt.NDArray[np.int64]) -> list[list[DraftOp | None]]:
        """Groups of one op per rank (None where a rank has no part in it) that are one collective."""
        mine = [{op.collective: op for op in local.collectives} for local in self.locals]
        groups = [[ops.get(row) for ops, row in zip(mine, rows, strict=True)] for rows in shared.tolist()]
        joined = [group for group in groups if sum(op is not None for op in group) > 1]
        self._list_differences(joined)
        return joined

    def _list_differences(self, joined: list[list[DraftOp | None]]) -> None:
        """Say which ranks lack collectives that others of their group have."""
        count: dict[str, Counter[int]] = {}
        for i, local in enumerate(self.locals):
            for op in local.collectives:
                count.setdefault(self.traces[i].collectives[op.collective].group, Counter())[i] += 1
        common: Counter[tuple[str, int, int]] = Counter()
        for group in joined:
            present = [(i, op) for i, op in enumerate(group) if op is not None]
            name = self.traces[present[0][0]].collectives[present[0][1].collective].group
            common.update((name, i, j) for i, _ in present for j, _ in present)
        for name, counts in count.items():
            first = max(counts, key=lambda i: counts[i])
            for i, n in counts.items():
                both = common[name, first, i]
                if i != first and both < max(n, counts[first]):
                    of = f" of group {name}" if name else ""
                    self.graph.warnings.append(
                        f"rank {self.locals[i].rank} has {n} collectives{of}, rank {self.locals[first].rank} "
                        f"{counts[first]}: {both} in common"
                    )

    # -- ops -------------------------------------------------------------------------------------

    def _add_ops(self, joined: list[list[DraftOp | None]], groups: list[list[DraftOp | None]]) -> None:
        """All ops and edges. ``groups`` are what becomes one op for all members, in launch order."""
        graph = self.graph
        shared = {id(op) for group in joined for op in group}
        grouped = {id(op) for group in groups for op in group} | self.pushed
        runs = [run for group in groups if (run := self._run(group)) is not None]
        seen = {id(op) for run in runs for op in run.drafts.values()}
        groups = [group for group in groups if not seen.intersection(map(id, group))]
        self._common_ends(groups)
        drafts = [(i, op) for i, local in enumerate(self.locals) for op in local.ops]
        times: list[int] = []  # measured start by op id
        entries: dict[int, list[int]] = {}  # id(draft) -> ops that start when it does, if not the op it ends with
        alone = 0
        for i, op in drafts:
            local = self.locals[i]
            alone += op.collective >= 0 and id(op) not in shared
            if id(op) not in grouped:
                self.ids[id(op)] = self._plain(i, op)
            elif op.resource != CHANNEL:
                entries[id(op)] = [graph.add_op(
                    f"arrive {op.name}", OpKind.LOCAL, resource=graph.resource(op.resource),
                    gap=op.gap(local.begin), rank=local.rank,
                )]  # fmt: skip
            else:
                continue
            times.append(op.start)
        previous_end = -(2**62)
        edges: set[tuple[int, int]] = set()
        through: list[int] = []  # on the channel
        for group in groups:
            previous_end = self._transfer(group, previous_end)
            times.append(self._launched(group))
            if self.negotiated and _members(group)[0].resource == CHANNEL:
                through.append(self.ids[id(_members(group)[0])])
        # what is agreed on later is reduced later, also where an earlier one was long in coming
        edges.update(pairwise(through))
        for run, added in zip(runs, add_messages(graph, runs, [x.rank for x in self.locals]), strict=True):
            times += added.times
            edges |= added.edges
            for i, op in run.drafts.items():
                self.ids[id(op)], self.bodies[id(op)], entries[id(op)] = added.leave[i], added.ops, added.entries[i]
        if self.partitions:
            parts = self.partitions.add(graph, self.locals, self.step)
            times += parts.times
            edges |= parts.edges
            self.ids.update(parts.ids)
            self.bodies.update(parts.bodies)
            entries.update(parts.entries)
        if alone and self.world_size > 1:
            graph.warnings.append(f"{alone} collective(s) seen by one rank only: waiting for its peers is inside")
        for _, op in drafts:
            last = self.ids[id(op)]
            for me in entries.get(id(op), [last]):
                edges.update((self.ids[id(p)], me) for p in op.preds if id(p) in self.ids)
                if op.resource != CHANNEL and me != last:
                    edges.add((me, last))
        broken = break_cycles(times, edges)
        if broken:
            graph.warnings.append(f"{broken} dependencies that closed a cycle were dropped")
        graph.add_edges(np.array(sorted(edges), dtype=np.int64).reshape(-1, 2))

    def _run(self, group: list[DraftOp | None]) -> Run | None:
        """The messages of a collective on the host, where all are known."""
        members = {i: op for i, op in enumerate(group) if op is not None}
        found = {id(e): e for i, op in members.items() if (e := self.exchanges.get((i, op.collective)))}
        if len(found) != 1 or any(op.resource != CHANNEL for op in members.values()):
            return None
        [exchange] = found.values()
        if members.keys() != {piece.sender for piece in exchange.pieces}:
            return None  # a member has it in another step
        run = Run(exchange, members, {i: _arrived(op) for i, op in members.items()})
        run.settle()
        return run

    def _plain(self, index: int, op: DraftOp) -> int:
        local = self.locals[index]
        gap = op.gap(local.begin)
        if not op.preds:  # a source starts when its rank does
            gap = max(0, gap + self.late[index])
        return self.graph.add_op(
            op.name, op.kind, resource=self.graph.resource(op.resource) if op.resource else NO_RESOURCE,
            duration=op.duration, gap=gap, priority=op.priority, tensor=op.tensor, rank=local.rank, nbytes=op.nbytes,
        )  # fmt: skip

    def _launched(self, group: list[DraftOp | None]) -> int:
        """Latest arrival: on a stream the kernel's start, on the host the end of the enqueueing call."""
        return max(_arrived(op) for op in _members(group))

    def _common_ends(self, groups: list[list[DraftOp | None]]) -> None:
        """Give the members of each group one end; that a rank goes on later is then its own gap.

        It is the end on the first rank to leave. On the host channel, where two may be in flight,
        ends are put in launch order: whoever waits for one has waited for those before it.
        """
        before = -(2**62)
        for group in groups:
            members = _members(group)
            end = max(min(op.end for op in members), self._launched(group))
            if members[0].resource == CHANNEL:
                end = before = max(end, before)
            for op in members:
                op.end = end

    def _transfer(self, group: list[DraftOp | None], previous_end: int) -> int:
        """The one op that stands for a joined collective. Returns the end of the host channel's last.

        The channel is a queue of one (dPRO: a link is a device), so a transfer on it is charged from
        the moment that the one before it was through. Where ranks negotiate first what to transfer (Horovod),
        that is a gap, which counts only while nothing else is under way.
        """
        members = _members(group)
        end, arrival, gap = members[0].end, self._launched(group), 0
        serial = members[0].resource == CHANNEL
        if serial and self.negotiated and arrival > previous_end:
            gap = max(0, min(min(op.start for op in members), end) - arrival)
            arrival += gap
        elif serial:
            arrival = max(arrival, previous_end)
        made = self.graph.add_op(
            members[0].name, OpKind.COLLECTIVE, resource=self.graph.resource(CHANNEL) if serial else NO_RESOURCE,
            duration=max(0, end - arrival), gap=gap, nbytes=max(op.nbytes for op in members),
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
        if not first.outs:
            return
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
                Bucket(
                    tuple(b.members),
                    sum(graph.tensors[t].nbytes for t in b.members),
                    tuple(self.bodies.get(id(b.run), [self.ids[id(b.run)]])),
                )
                for b in first.buckets
                if b.run is not None
            ]
        )
        for bucket in graph.buckets:
            graph.set(bucket.ops[-1], "nbytes", bucket.nbytes)  # the op at its end stands for all of it
        if any(len(x.outs) != len(first.outs) for x in self.locals):
            graph.warnings.append("ranks differ in the number of gradients")

    def _launch_cost(self) -> float:
        costs = [b.launch.duration for local in self.locals for b in local.buckets]
        return float(np.median(costs)) if costs else 0.0


def _rank(trace: RankTrace, index: int) -> int:
    return trace.meta.rank if trace.meta.rank >= 0 else index


def _members(group: list[DraftOp | None]) -> list[DraftOp]:
    return [op for op in group if op is not None]


def _arrived(op: DraftOp) -> int:
    return max(p.end for p in op.preds) if op.resource == CHANNEL else op.start


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
