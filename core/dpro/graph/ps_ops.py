"""The ops of one step of a parameter server job, with the times that were measured.

Captured settings replay exactly. A push or pull that found its link idle holds it for what its bytes take at the
link's pace, the rest is gap; one that queued holds it from the end of the one before. What a server did is what is left
between the last push of a partition and the first byte of the first pull that had been asked for by then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dpro.graph.draft import DraftOp
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.graph.ps_layout import Layout
from dpro.graph.ps_pace import Pace, pace

#: ``graph.info[INFO]`` is a :class:`Ps`.
INFO = "ps"
#: What took more than so many times its bytes, and this, was not right behind the one before.
_BEHIND, _BEHIND_NS = 2, 1_000_000
#: A copy that took more than so many times its bytes, and this, waited for something.
_HELD, _HELD_NS = 2, 200_000
_NEVER = -(2**62)

Span = tuple[int, int]
#: tensor, partition
Key = tuple[int, int]


class Part(NamedTuple):
    """One partition of a gradient on one worker in one round: its stages, ns. ``nbytes`` -1: unknown.

    A push ends with its acknowledgement; where the server tells, when that had it, and ``acknowledged`` is the former.
    ``sent``: when the server began to send the sum. 0: not told.
    """

    tensor: int
    number: int
    nbytes: int
    out: Span
    push: Span
    pull: Span
    back: Span
    acknowledged: int = 0
    sent: int = 0

    @property
    def key(self) -> Key:
        return self.tensor, self.number

    @property
    def stages(self) -> tuple[Span, Span, Span, Span]:
        return self.out, self.push, self.pull, self.back


class Seen(NamedTuple):
    """How long something took, for a cost model; ``where`` is a resource.

    ``what``: "out", "in": a copy; "push": from the worker's call to the acknowledgement; "pull": of a sum that was
    there when it was asked for; "answer": from the last push to the end of a pull that had been asked for before. Of
    one that ``queued``: from the end of the one before it on the link.
    """

    what: str
    where: str
    nbytes: int
    ns: int
    queued: bool = False


@dataclass
class Ps:
    """What later floors need to know. ``bounds``: bytes of a partition, at most, by tensor; ``paces`` of links.
    ``job_bytes``: the job's own bound where it was recorded under another one, else 0.

    ``lags``: ns until an idle thread takes up what is to be copied "out", pushed ("push"), asked for ("ask"), copied
    "in"; and where the server tells, until a push that it has is acknowledged ("acknowledge").
    """

    layout: Layout
    bounds: dict[int, int]
    paces: dict[str, Pace] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    lags: dict[str, list[int]] = field(default_factory=dict)
    job_bytes: int = 0


@dataclass
class Added:
    """Ops of a step's partitions. By id of a draft: the op that stands for its end, those it starts with, all of them.

    ``times``: measured start by op, in order; ``edges`` among them are still to be added.
    """

    ids: dict[int, int] = field(default_factory=dict)
    entries: dict[int, list[int]] = field(default_factory=dict)
    bodies: dict[int, list[int]] = field(default_factory=dict)
    times: list[int] = field(default_factory=list)
    edges: set[tuple[int, int]] = field(default_factory=set)


def resources(rank: int) -> tuple[str, str]:
    """The threads by which a worker copies out and in."""
    return f"rank{rank}/byteps/copyd2h", f"rank{rank}/byteps/copyh2d"


def engine(server: int) -> str:
    """The thread with which a server adds up."""
    return f"server{server}/engine"


def last_pushes(parts: Sequence[Sequence[Part]]) -> dict[Key, int]:
    """When the last worker's push of each partition was acknowledged, in one step; ``parts`` per worker."""
    out: dict[Key, int] = {}
    for part in (part for mine in parts for part in mine):
        out[part.key] = max(out.get(part.key, _NEVER), part.push[1])
    return out


def add_ops(
    graph: Graph,
    parts: Sequence[Sequence[Part]],
    runs: Mapping[tuple[int, int], DraftOp],
    known: Ps,
    paces: Mapping[str, float],
) -> Added:
    """Add the ops of one step's ``parts`` (per worker), and to ``known`` how long what took.

    Args:
        runs: by (worker, tensor), the draft of all that lies between OUT and IN.
        paces: ns per byte of a link direction or a copying thread, as far as known.
    """
    return _Step(graph, parts, runs, known, paces).build()


@dataclass(slots=True)
class _Queue:
    """A resource that serves in the order in which it is asked; when its ops were eligible, and when they ended."""

    free: int = _NEVER
    eligible: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def place(self, ready: int, end: int, most: float) -> tuple[int, int]:
        """Gap and duration of an op that could begin at ``ready`` and ended at ``end``.

        ``most``: ns that it holds the resource where it had not queued right behind another.
        """
        begin = max(ready, self.free)
        duration = max(0, end - begin)
        queued = self.free > ready and duration <= _BEHIND * most + _BEHIND_NS
        if not queued:
            duration = min(duration, max(0, round(most)))
        start = max(begin, end - duration)
        since = max([ready if queued else start, *self.eligible[-1:]])  # what is served later came later
        self.free = start + duration
        self.eligible.append(since)
        self.ends.append(self.free)
        return since - ready, duration

    def through(self, instant: int) -> int:
        """When all that was eligible by then is over."""
        at = bisect_right(self.eligible, instant) - 1
        return max(instant, self.ends[at]) if at >= 0 else instant


class _Step:
    """Goes through the stages in the order in which they ended: what an op waits for is there when its turn comes."""

    def __init__(
        self,
        graph: Graph,
        parts: Sequence[Sequence[Part]],
        runs: Mapping[tuple[int, int], DraftOp],
        known: Ps,
        paces: Mapping[str, float],
    ) -> None:
        self.graph, self.parts, self.runs, self.known, self.paces = graph, parts, runs, known, paces
        self.layout = known.layout
        self.added = Added()
        self.queues: dict[str, _Queue] = {}
        self.of_tensor: dict[int, list[int]] = {}  # all ops
        self.latest: dict[tuple[int, Key], int] = {}  # (worker, partition) -> its op before this stage
        self.sums: dict[Key, list[int]] = {}
        self.summed: dict[Key, tuple[int, int]] = {}  # op, when
        self.copied_in: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (worker, tensor) -> ops, when
        self.lasts = last_pushes(parts)
        self.members: dict[Key, list[tuple[int, Part]]] = {}  # workers
        receipts: dict[int, list[int]] = {}
        links: dict[str, list[Span]] = {}
        for worker, mine in enumerate(parts):
            for part in mine:
                self.members.setdefault(part.key, []).append((worker, part))
                server = self.layout.server(*part.key)
                there, back = self.layout.links[worker, server]
                receipts.setdefault(server, []).append(part.push[1])
                links.setdefault(there, []).append((part.out[1], part.push[1]))
                links.setdefault(back, []).append((max(part.pull[0], self.lasts[part.key]), part.pull[1]))
        self.receipts = {server: sorted(times) for server, times in receipts.items()}
        self.limits = {key: min(part.pull[1] for _, part in mine) for key, mine in self.members.items()}
        self.deadlines = self._deadlines()
        #: by link, what could go: since when, and when all of what could go until then was over
        self.busy: dict[str, tuple[list[int], list[int]]] = {}
        for link, spans in links.items():
            spans.sort()
            self.busy[link] = [s[0] for s in spans], np.maximum.accumulate([s[1] for s in spans]).tolist()
        self.sum_pace = self._sum_pace()

    def build(self) -> Added:
        turns = [
            (span[1], stage, worker, part)
            for worker, mine in enumerate(self.parts)
            for part in mine
            for stage, span in enumerate(part.stages)
        ]
        turns.sort(key=lambda turn: (*turn[:3], turn[3].key))
        stages = self._copy_out, self._push, self._pull, self._copy_in
        for _, stage, worker, part in turns:
            stages[stage](worker, part)
        pulled: dict[int, list[tuple[int, int]]] = {}
        for (worker, tensor), run in self.runs.items():
            copies = self.copied_in.get((worker, tensor), [])
            at = max((time for _, time in copies), default=run.end)
            op = self._add("pulled", OpKind.RECV, tensor, at, [op for op, _ in copies], rank=self.layout.ranks[worker])
            self.added.ids[id(run)] = op
            pulled.setdefault(tensor, []).append((op, at))
        for tensor, ops in pulled.items():  # the op whose end is the end of all comes last, for whoever asks for it
            self._add("push_pull", OpKind.LOCAL, tensor, max(at for _, at in ops), [op for op, _ in ops])
        self.added.bodies = {id(run): self.of_tensor[tensor] for (_, tensor), run in self.runs.items()}
        return self.added

    # -- stages ------------------------------------------------------------------------------------

    def _copy_out(self, worker: int, part: Part) -> None:
        run, thread = self.runs[worker, part.tensor], resources(self.layout.ranks[worker])[0]
        op = self._copy("out", thread, worker, part, part.out, run.start, [])
        self.added.entries.setdefault(id(run), []).append(op)

    def _push(self, worker: int, part: Part) -> None:
        server, (start, end) = self.layout.server(*part.key), part.push
        there = self.layout.there(worker, server)
        free = self._queue(there).free
        before = self.latest[worker, part.key]
        gap, duration = self._queue(there).place(part.out[1], end, self._most(there, part))
        op = self._add("push", OpKind.SEND, part.tensor, end - duration, [before], part, worker, there, duration, gap)
        self._saw("push", there, part, end - max(free, start), free > part.out[1])
        self.known.lags.setdefault("push", []).append(start - part.out[1])
        self.latest[worker, part.key] = op
        self._sum(server, part, op)

    def _sum(self, server: int, part: Part, push: int) -> None:
        """Adding up begins when a push is there; how long it took shows where a pull waited for the last one."""
        receipt, key = part.push[1], part.key
        thread: str | None = engine(server)
        begin = max(receipt, self._queue(engine(server)).free)
        sums = self.sums.setdefault(key, [])
        last = len(sums) + 1 == len(self.members[key])
        limit, deadline = self.limits[key], self.deadlines[server].pop()
        took = round(self.sum_pace * max(0, part.nbytes))
        first_byte = self._first_byte(key) if last else None
        if first_byte is not None:
            took = max(0, first_byte - begin)
        elif not last:  # the thread was free when the next push came
            following = self.receipts[server]
            at = bisect_right(following, receipt)
            took = max(0, min(took, following[at] - begin)) if at < len(following) else took
        took = max(0, min(took, limit - begin, deadline - begin))
        gap = 0
        if begin > limit:  # another one's end was told too late
            thread, begin, took = None, receipt, 0
        else:
            gap, took = self._queue(engine(server)).place(receipt, begin + took, took)
        sums.append(self._add("sum", OpKind.LOCAL, part.tensor, begin, [push], part, None, thread, took, gap))
        if last:
            self._join(key, begin + took, sums)

    def _join(self, key: Key, at: int, sums: Sequence[int]) -> None:
        self.summed[key] = self._add("summed", OpKind.LOCAL, key[0], at, sums), at

    def _pull(self, worker: int, part: Part) -> None:
        server, (asked, end) = self.layout.server(*part.key), part.pull
        there, back = self.layout.links[worker, server]
        ready = part.push[1]
        # what is in the pipe goes first, unless this pull was over before that was
        orderly = self.layout.orderly and self._held_up(there, asked) <= end
        arrived = self._queue(there).through(max(asked, ready)) if orderly else max(asked, ready)
        ask = self._add(
            "ask", OpKind.LOCAL, part.tensor, arrived, [self.latest[worker, part.key]], None, worker,
            there if orderly else None, 0, max(0, asked - ready),
        )  # fmt: skip
        if part.key not in self.summed:  # the pull was over before the last push was known to be
            self._join(part.key, ready, [])
        summed, at = self.summed[part.key]
        free, last = self._queue(back).free, self.lasts[part.key]
        gap, duration = self._queue(back).place(max(arrived, at), end, self._most(back, part))
        op = self._add(
            "pull", OpKind.RECV, part.tensor, end - duration, [ask, summed], part, worker, back, duration, gap
        )
        queued = free > max(arrived, at)
        what = "answer" if arrived < last and not queued else "pull"
        self._saw(what, back, part, end - max(free, arrived, last), queued)
        self.known.lags.setdefault("ask", []).append(asked - (part.acknowledged or ready))
        if part.acknowledged:
            self.known.lags.setdefault("acknowledge", []).append(part.acknowledged - ready)
        self.latest[worker, part.key] = op

    def _copy_in(self, worker: int, part: Part) -> None:
        thread = resources(self.layout.ranks[worker])[1]
        op = self._copy("in", thread, worker, part, part.back, part.pull[1], [self.latest[worker, part.key]])
        self.copied_in.setdefault((worker, part.tensor), []).append((op, part.back[1]))

    def _copy(
        self, way: str, thread: str, worker: int, part: Part, span: Span, ready: int, before: Sequence[int]
    ) -> int:
        start, end = span
        if self._queue(thread).free <= ready:
            self.known.lags.setdefault(way, []).append(max(0, start - ready))
        took, bytes_ns = end - start, self._most(thread, part)
        if took <= _HELD * bytes_ns + _HELD_NS:
            self._saw(way, thread, part, took)
        else:  # it waited for something
            took = round(bytes_ns)
        gap, duration = self._queue(thread).place(ready, end, took)
        begun = end - duration
        op = self._add(f"copy {way}", OpKind.LOCAL, part.tensor, begun, before, part, worker, thread, duration, gap)
        self.latest[worker, part.key] = op
        return op

    # -- what they need ----------------------------------------------------------------------------

    def _add(
        self,
        name: str,
        kind: OpKind,
        tensor: int,
        time: int,
        after: Sequence[int],
        part: Part | None = None,
        worker: int | None = None,
        resource: str | None = None,
        duration: int = 0,
        gap: int = 0,
        rank: int = -1,
    ) -> int:
        op = self.graph.add_op(
            name, kind, resource=NO_RESOURCE if resource is None else self.graph.resource(resource),
            duration=duration, gap=gap, tensor=tensor,
            rank=rank if worker is None else self.layout.ranks[worker], nbytes=-1 if part is None else part.nbytes,
        )  # fmt: skip
        self.added.times.append(time)
        self.added.edges.update((before, op) for before in after)
        self.of_tensor.setdefault(tensor, []).append(op)
        return op

    def _queue(self, resource: str) -> _Queue:
        return self.queues.setdefault(resource, _Queue())

    def _saw(self, what: str, where: str, part: Part, ns: int, queued: bool = False) -> None:
        if part.nbytes > 0:
            self.known.seen.append(Seen(what, where, part.nbytes, max(0, ns), queued))

    def _most(self, resource: str, part: Part) -> float:
        """ns that the bytes take on a link or a thread; more than anything where that is not known."""
        return self.paces[resource] * part.nbytes if resource in self.paces and part.nbytes > 0 else 2.0**60

    def _held_up(self, link: str, instant: int) -> int:
        """When the last of what could go over the link by then was over."""
        since, over = self.busy.get(link, ([], []))
        at = bisect_right(since, instant) - 1
        return over[at] if at >= 0 else instant

    def _first_byte(self, key: Key) -> int | None:
        """When the first pull began that had been asked for before the last push was there; None without one."""
        last, found = self.lasts[key], []
        for worker, part in self.members[key]:
            there, back = self.layout.links[worker, self.layout.server(*key)]
            asked = max(part.pull[0], self._held_up(there, part.pull[0])) if self.layout.orderly else part.pull[0]
            if asked < last and part.sent:
                found.append(part.sent)
            elif asked < last and back in self.paces and part.nbytes > 0:
                found.append(part.pull[1] - round(self._most(back, part)))
        return min(found, default=None)

    def _deadlines(self) -> dict[int, list[int]]:
        """By server, last push first: when it and those that come after it were added up at the latest.

        What was pulled before its push was known to be there says nothing of the others.
        """
        out: dict[int, list[int]] = {}
        pushes = [(part.push[1], worker, part.key) for worker, mine in enumerate(self.parts) for part in mine]
        for receipt, _, key in sorted(pushes, reverse=True):
            found = out.setdefault(self.layout.server(*key), [])
            latest = found[-1] if found else -_NEVER
            found.append(min(latest, self.limits[key]) if receipt <= self.limits[key] else latest)
        return out

    def _sum_pace(self) -> float:
        """ns per byte for a server to add a push, where pulls show it; 0 where none does."""
        left = [
            (self.members[key][0][1].nbytes, max(0, first - self.lasts[key]))
            for key in self.members
            if (first := self._first_byte(key)) is not None
        ]
        if not left:
            return 0.0
        return pace(left)
