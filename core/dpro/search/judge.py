"""The replay as judge of DDP settings, with a memory and a deadline.

Knows how a setting (caps in bytes, as DDP takes them) becomes buckets and what the replay says of them;
not which settings are worth asking about. The graph is edited and restored for every question, never
copied. Caps are the search variable, not groupings: whatever they give, DDP can do, mixed dtypes included.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpro.graph.graph import Graph
from dpro.passes.ddp_buckets import assigned, running_totals
from dpro.passes.tensor_fusion import Grouping, TensorFusion, ready_order
from dpro.replay.delta import DeltaReplay
from dpro.replay.engine import CycleError, replay
from dpro.search.defaults import uniform_limits
from dpro.search.team import Team
from dpro.search.tensor_fusion import Cuts, Timeline
from dpro.search.view import ALL, Speedups

#: Of the candidates of a question each rank has as many as it replays in about so long, s; the least and the most.
_QUESTION_S, _LEAST_AT_ONCE, _MOST_AT_ONCE = 0.3, 4, 64
#: The step of buckets that close a circle, ns.
NEVER = 1 << 62


@dataclass(frozen=True)
class Verdict:
    """One setting, what DDP makes of it, and the step it gives. One cap is uniform, more are a list."""

    caps_bytes: tuple[int, ...]
    grouping: Grouping
    step_ns: int

    @property
    def uniform(self) -> bool:
        return len(set(self.caps_bytes)) == 1


class Judge:
    """See the module text. ``main`` are the positions of the dtype with most bytes, in ready order: cuts,
    as :mod:`dpro.search.tensor_fusion` writes them, count these; other dtypes follow the caps that result.
    """

    def __init__(self, graph: Graph, deadline_s: float, speedups: Speedups = ALL, team: Team | None = None) -> None:
        self.graph = graph
        self._team = team
        self._at_once = _LEAST_AT_ONCE
        self.speedups = speedups
        self.evaluations = 0
        self.verdicts: dict[tuple[int, ...], Verdict] = {}
        self._deadline_s = deadline_s
        self._mark = graph.mark()
        self._base: DeltaReplay | None = None
        self._fusion = TensorFusion()
        self._times: dict[Grouping, int] = {}
        self._groupings: dict[tuple[int, ...], Grouping] = {}
        self._ready_ns: dict[int, int] | None = None
        self._order = order = ready_order(graph)
        self._totals = running_totals([graph.tensors[t].nbytes for t in order], [graph.tensors[t].dtype for t in order])
        places, until = max(self._totals, key=lambda dtype: dtype[1][-1])
        self.main = [order[i] for i in places]
        self.cum_bytes = np.array([0, *until], dtype=np.int64)

    def elsewhere(self) -> Judge:
        """A judge of the graph as it is edited now, with the same deadline, that remembers nothing of before."""
        return Judge(self.graph, self._deadline_s, self.speedups)

    def with_half_the_time(self) -> Judge:
        """A judge of the same graph whose deadline is half as far."""
        now = time.monotonic()
        return Judge(self.graph, now + (self._deadline_s - now) / 2, self.speedups)

    def rebase(self, caps: tuple[int, ...] = ()) -> None:
        """Let the graph have the buckets of these caps, so that what differs little costs little; () for its own."""
        self.graph.undo(self._mark)
        self._base = None
        if self._team is not None:
            self._team.rebase(caps)
        if caps:
            self._fusion.apply(self.graph, self.together(self.grouping(caps)))
            # contention takes turns by priority everywhere: there only whole replays know
            if self.speedups.delta and not self.graph.info["sync"].steal_ns_per_byte:
                self._base = DeltaReplay(self.graph)

    def grouping(self, caps: tuple[int, ...]) -> Grouping:
        """The buckets that DDP makes under these caps (bytes): one is uniform, more are a list."""
        if caps not in self._groupings:
            limits = uniform_limits(self.graph, caps[0]) if len(caps) == 1 else caps
            groups = assigned(self._totals, limits)
            self._groupings[caps] = tuple(tuple(self._order[i] for i in group) for group in groups)
        return self._groupings[caps]

    def out_of_time(self) -> bool:
        """Whether the time is up. Nothing enforces it but the search."""
        return time.monotonic() >= self._deadline_s

    def step_ns(self, grouping: Grouping) -> int:
        """Replayed length of the step with these buckets; asked once, remembered."""
        if grouping not in self._times:
            self._times[grouping] = self._judged_ns(grouping)
        return self._times[grouping]

    def _judged_ns(self, grouping: Grouping) -> int:
        """:data:`NEVER` where a bucket would wait for what waits for it (a dataflow graph has no order of its own)."""
        try:
            return self.replayed_ns(self.together(grouping))
        except CycleError:
            return NEVER

    def together(self, groups: Grouping) -> Grouping:
        """What goes together of ``groups``, in the order in which it goes: they themselves, but for Horovod.

        Horovod takes all groups that are complete when the channel is free, of one dtype and up to
        ``graph.info["fusion_bytes"]`` (``FuseResponses`` in ``common/controller.cc``), and not before
        ``graph.info["cycle_ns"]`` after it did so last (``RunLoopOnce``). Told from the step without synchronisation,
        so without what transfers cost the host.
        """
        limit = int(self.graph.info.get("fusion_bytes", 0))
        if not limit:
            return groups
        cycle_ns = int(self.graph.info.get("cycle_ns", 0))
        model, tensors = self.graph.info["sync"], self.graph.tensors
        if self._ready_ns is None:
            self._ready_ns = self._ready()
        complete = [(max(self._ready_ns[t] for t in group), group) for group in groups]
        pending = sorted(complete, key=lambda item: item[0])
        out: list[tuple[int, ...]] = []
        free = again = 0.0
        while pending:
            start = max(free, again, pending[0][0] + model.delay_ns)
            again = start + cycle_ns
            turn = [group for at, group in pending if at <= start]
            pending, went = pending[len(turn) :], len(out)
            for dtype in dict.fromkeys(tensors[group[0]].dtype for group in turn):
                fused: list[int] = []
                for group in (group for group in turn if tensors[group[0]].dtype == dtype):
                    if fused and sum(tensors[t].nbytes for t in (*fused, *group)) > limit:
                        out.append(tuple(fused))
                        fused = []
                    fused += group
                out.append(tuple(fused))
            free = start + sum(model.time_ns(sum(tensors[t].nbytes for t in bucket)) for bucket in out[went:])
        return tuple(out)

    def first(self, grouping: Grouping) -> int:
        """:meth:`replayed_ns` of what the search begins with; the other ranks are told of it, if that is worth it."""
        if self._team is not None:
            began = time.monotonic()
            replay(self.graph)
            self._team.join(self.graph, time.monotonic() - began)
        return self.replayed_ns(grouping)

    def replayed_ns(self, grouping: Grouping) -> int:
        """The same for the graph as it is now, whatever else has been edited; not remembered."""
        mark = self._fusion.apply(self.graph, grouping)
        try:
            self.evaluations += 1
            return self._base.makespan_ns() if self._base is not None else replay(self.graph).makespan_ns
        finally:
            self.graph.undo(mark)

    def uniform(self, caps_bytes: Iterable[int]) -> list[Verdict]:
        """DDP with each of these as ``bucket_cap_mb``; without those there was no time for."""
        return self._judge([(cap,) for cap in dict.fromkeys(caps_bytes)])

    def cut(self, cuts: Iterable[Cuts]) -> list[Verdict]:
        """DDP with the lists of caps that end buckets at these cuts, less those with an empty bucket, as above."""
        lists = [tuple(np.diff(self.cum_bytes[[0, *one]]).tolist()) for one in dict.fromkeys(cuts)]
        return self._judge([caps for caps in lists if min(caps) > 0])

    def cuts_of(self, grouping: Grouping) -> Cuts:
        """The cuts of a grouping, by its buckets of the main dtype."""
        main = set(self.main)
        sizes = [len(group) for group in grouping if group[0] in main]
        return tuple(np.cumsum(sizes).tolist())

    def _ready(self) -> dict[int, int]:
        """When each gradient is there on the last rank in the step without synchronisation, ns: one replay."""
        mark = self._fusion.apply(self.graph, ())
        try:
            played, arrays = replay(self.graph), self.graph.arrays()
        finally:
            self.graph.undo(mark)
        row = {op: i for i, op in enumerate(arrays.ids.tolist())}
        found: dict[int, int] = {}
        for (_, tensor), op in self.graph.out_op.items():
            found[tensor] = max(found.get(tensor, 0), int(played.end[row[op]]))
        return found

    def timeline(self) -> Timeline:
        """The step without synchronisation, for estimates: one replay."""
        graph = self.graph
        mark = self._fusion.apply(graph, ())
        try:
            played, arrays = replay(graph), graph.arrays()
        finally:
            graph.undo(mark)
        row = {op: i for i, op in enumerate(arrays.ids.tolist())}
        ranks = sorted({rank for rank, _ in graph.out_op})

        def latest(table: dict[tuple[int, int], int], times: object, tensor: int, otherwise: int) -> int:
            found = [int(times[row[table[r, tensor]]]) for r in ranks if (r, tensor) in table]  # type: ignore[index]
            return max(found, default=otherwise)

        ready = np.maximum.accumulate([latest(graph.out_op, played.end, t, 0) for t in self.main])
        begin = [latest(graph.in_op, played.start, t, played.makespan_ns) for t in self.main]
        handed = np.maximum.accumulate([latest(graph.in_op, played.end, t, played.makespan_ns) for t in self.main])
        host = max(begin[0], int(ready[-1]))
        copies = np.concatenate([[0], np.maximum(handed - host, 0)])
        return Timeline(
            ready_ns=ready + round(graph.info["sync"].delay_ns),
            cum_bytes=self.cum_bytes,
            cum_copy_ns=copies,
            host_ns=float(host),
            rest_ns=float(max(0, played.makespan_ns - int(handed[-1]))),
            launch_ns=float(graph.info.get("launch_ns", 0)),
            model=graph.info["sync"],
            in_flight=int(graph.info.get("in_flight", 1)),
        )

    def _judge(self, asked: list[tuple[int, ...]]) -> list[Verdict]:
        buckets = {caps: self.grouping(caps) for caps in asked}
        fresh: dict[Grouping, tuple[int, ...]] = {}
        for caps, grouping in buckets.items():
            if grouping not in self._times:
                fresh.setdefault(grouping, caps)
        left = list(fresh.values())
        # The first one of all is judged even without time, so that there is something to compare.
        while left and not (self._times and self.out_of_time()):
            size = self._team.size() if self._team is not None else 1
            turn = size * self._at_once if self._team is not None else 1
            now, left = left[:turn], left[turn:]
            began = time.monotonic()
            steps_ns = self._ask(now)
            if size > 1:
                each_s = max(time.monotonic() - began, 1e-6) * size / len(now)
                self._at_once = min(max(int(_QUESTION_S / each_s), _LEAST_AT_ONCE), _MOST_AT_ONCE)
            self._times.update(zip((buckets[caps] for caps in now), steps_ns, strict=True))
        told = [caps for caps in asked if buckets[caps] in self._times]
        for caps in told:
            self.verdicts.setdefault(caps, Verdict(caps, buckets[caps], self._times[buckets[caps]]))
        return [self.verdicts[caps] for caps in told]

    def _ask(self, asked: list[tuple[int, ...]]) -> list[int]:
        def here(caps: tuple[int, ...]) -> int:
            return self._judged_ns(self.grouping(caps))

        if self._team is None:
            return [here(caps) for caps in asked]
        return self._team.steps_ns(asked, here)
