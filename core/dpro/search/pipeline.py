"""Gradients on their way to a parameter server and back as a line of stages: copy out, push, sum, pull, copy in.

Knows one worker's way, each stage a queue that is served in the order of the parts; not several servers, nor what
workers that differ, or questions behind pushes, do to each other: what it says of a job that has them is approximate.

As nothing overtakes, each time is a maximum of sums of those before it: who finds every stage free no earlier ends no
earlier, whatever comes. On that the filter rests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpro.cost.sync import SyncModel

#: When each of the five stages is free, ns.
State = tuple[int, int, int, int, int]
IDLE: State = (0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Line:
    """What a part of s bytes holds each stage for, and what passes in between (ns), as in
    :class:`~dpro.cost.ps.PsModel`. The server adds up what ``workers`` send, one after another."""

    copy_out: SyncModel
    push: SyncModel
    add: SyncModel
    pull: SyncModel
    copy_in: SyncModel
    workers: int = 1
    out_lag: int = 0
    push_lag: int = 0
    ask_lag: int = 0
    sum_lag: int = 0
    pull_lag: int = 0
    in_lag: int = 0

    def run(self, state: State, ready_ns: int, sizes: Sequence[int]) -> State:
        """The stages after parts of these bytes, all there at ``ready_ns``; the last is when all of it is back."""
        out, push, add, pull, copied = state
        last, times = -1, (0, 0, 0, 0, 0)
        for size in sizes:
            if size != last:
                stages = (self.copy_out, self.push, self.add, self.pull, self.copy_in)
                a, b, c, d, e = (stage.time_ns(size) for stage in stages)
                last, times = size, (a, b, c * self.workers, d, e)
            out = max(ready_ns + self.out_lag, out) + times[0]
            push = max(out + self.push_lag, push) + times[1]
            add = max(push, add) + times[2]
            pull = max(max(push + self.ask_lag, add + self.sum_lag) + self.pull_lag, pull) + times[3]
            copied = max(pull + self.in_lag, copied) + times[4]
        return out, push, add, pull, copied


@dataclass(frozen=True)
class Pair:
    """Two groups that follow each other: the stages after them as one, and after one and the other."""

    as_one: State
    as_two: State

    @property
    def pays(self) -> bool:
        """dPRO's Theorem 2 on a line of stages: whether to fuse them, by when the second ends.

        Of a line with one stage that takes time it is the general form, :func:`dpro.search.tensor_fusion.fusion_pays`.
        """
        return self.as_one[-1] < self.as_two[-1]

    @property
    def may_pay(self) -> bool:
        """Whether fusing them can make anything earlier: if no stage is free earlier then nothing that follows is."""
        return any(one < two for one, two in zip(self.as_one, self.as_two, strict=True))


def pair(
    line: Line,
    state: State,
    ready_ns: tuple[int, int],
    apart: tuple[Sequence[int], Sequence[int]],
    fused: Sequence[int],
) -> Pair:
    """Two groups that find the stages in ``state``.

    Args:
        ready_ns: when each is ready.
        apart: bytes of each one's parts.
        fused: bytes of the parts of both as one.
    """
    between = line.run(state, ready_ns[0], apart[0])
    return Pair(line.run(state, max(ready_ns), fused), line.run(between, ready_ns[1], apart[1]))
