"""The other ranks of a job replay candidates while rank 0 searches: they would only wait for its plan.

Knows the job's exchange and the judge. Rank 0 alone decides what is asked and what comes of it, so the plan is the same
for any number of ranks; a rank that does not answer in time is not asked again, and its share is replayed here.

What rank 0 says is agreed on under a number (a graph, the buckets that it has, a question, the end), and so is each
answer: that the graph was taken in, or how long it took, s, and the steps that lists of caps give.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from dpro.adapter import Exchange, RankLeft
from dpro.cost.sync import SyncModel
from dpro.errors import DproError
from dpro.graph.graph import Graph
from dpro.graph.packed import pack, unpack

Caps = tuple[int, ...]
#: Where a replay takes less, s, all of a search are over before it is worth telling anybody of them.
WORTHWHILE_S = 0.0007
#: More ranks than this are not asked: the store that they talk through is one.
MOST_HELPERS = 15
#: A larger graph is not sent, bytes of text.
MOST_BYTES = 3 << 20
#: A helper that takes so many times as long as this rank for its own share, and this long, s, is not waited for.
_PATIENCE, _LEAST_PATIENCE_S = 4.0, 5.0
#: Of what a helper took for its last share, so much is believed; and so many times slower or faster at most.
_BELIEVED, _MOST_SLOWER = 0.5, 8.0


class Team:
    """Rank 0's side.

    Args:
        exchange: of the job.
        key: begins the keys used; the same on all ranks.
    """

    def __init__(self, exchange: Exchange, key: str) -> None:
        self._exchange, self._key = exchange, key
        self._helpers = list(range(1, min(exchange.world_size, MOST_HELPERS + 1)))
        self._asked = 0
        self._ready: list[int] = []
        #: how many times as long as this rank a helper takes for a replay
        self._slower: dict[int, float] = {}
        self._joined = ""
        self._over = False
        #: candidates that helpers have replayed so far
        self.evaluations = 0

    def size(self) -> int:
        """Ranks that can replay by now, this one too: others have the graph to take in first."""
        for helper in self._helpers if self._joined else ():
            if helper not in self._ready:
                with contextlib.suppress(TimeoutError, RankLeft):
                    self._exchange.wait(f"{self._joined}/{helper}", 0.0)
                    self._ready.append(helper)
        return len(self._ready) + 1

    def forget(self) -> None:
        """Another graph, or another cost of synchronisation, is searched from now on."""
        self._joined, self._ready = "", []

    def join(self, graph: Graph, replay_s: float) -> None:
        """Send what is searched, if that is worth it: once for each."""
        if self._joined or self._over or not self._helpers or replay_s < WORTHWHILE_S:
            return
        text = base64.b64encode(pack(graph)).decode()
        told = json.dumps({"graph": text, "sync": asdict(graph.info["sync"])})
        if len(told) > MOST_BYTES:
            self._helpers = []
            return
        self._joined = f"{self._key}/{self._asked}"
        self._say(told)

    def rebase(self, caps: Caps) -> None:
        """The graph has the buckets of these caps from now on; () for the captured ones."""
        if self._joined and self._helpers:
            self._say(json.dumps({"base": caps}))

    def steps_ns(self, asked: Sequence[Caps], here: Callable[[Caps], int]) -> list[int]:
        """The replayed step of every one of ``asked``; ``here`` replays on this rank."""
        if not self._ready or len(asked) <= len(self._ready):
            return [here(caps) for caps in asked]
        number = self._asked
        shares = self._dealt(asked)
        mine = shares.pop(0)
        self._say(json.dumps({"shares": shares}))
        began = time.monotonic()
        told = dict(zip(mine, map(here, mine), strict=True))
        took_s = time.monotonic() - began
        deadline = time.monotonic() + max(_LEAST_PATIENCE_S, _PATIENCE * took_s)
        for helper, share in shares.items():  # one deadline for all: many that are gone cost no more than one
            left_s = max(0.0, deadline - time.monotonic())
            try:
                seconds, *answer = json.loads(self._exchange.wait(f"{self._key}/{number}/{helper}", left_s))
                steps = dict(zip(share, map(int, answer), strict=True))
                self._learn(helper, float(seconds) / len(share), took_s / len(mine))
                told |= steps
                self.evaluations += len(share)
            except (TimeoutError, RankLeft, ValueError, TypeError):
                self._helpers.remove(helper)
                self._ready.remove(helper)
                told |= {caps: here(caps) for caps in share}
        return [told[caps] for caps in asked]

    def _dealt(self, asked: Sequence[Caps]) -> dict[int, list[Caps]]:
        """By rank, of those that are ready and this one: each in turn to whom it is over with first. None has none."""
        pace = {0: 1.0} | {helper: self._slower.get(helper, 1.0) for helper in self._ready}
        shares: dict[int, list[Caps]] = {rank: [] for rank in pace}
        for caps, rank in zip(asked, pace, strict=False):
            shares[rank].append(caps)
        for caps in asked[len(pace) :]:
            shares[min(pace, key=lambda rank: (len(shares[rank]) + 1) * pace[rank])].append(caps)
        return shares

    def _learn(self, helper: int, theirs_s: float, mine_s: float) -> None:
        slower = min(max(theirs_s / max(mine_s, 1e-9), 1 / _MOST_SLOWER), _MOST_SLOWER)
        self._slower[helper] = (1 - _BELIEVED) * self._slower.get(helper, 1.0) + _BELIEVED * slower

    def end(self) -> None:
        """Let the helpers go; may be called again."""
        if self._over:
            return
        self._over = True
        self._say(json.dumps({"end": True}))

    def _say(self, told: str) -> None:
        self._exchange.agree(f"{self._key}/{self._asked}", told)
        self._asked += 1


def assist(exchange: Exchange, key: str, timeout_s: float) -> int:
    """A helper's side: replay what rank 0 asks for until it says that it is over; how many that were.

    Args:
        timeout_s: nothing is waited for after so long.

    Raises:
        TimeoutError, RankLeft: rank 0 is silent; it goes on by itself then.
        DproError: this is not what rank 0 sends.
    """
    from dpro.passes.tensor_fusion import captured
    from dpro.search.judge import Judge

    if exchange.rank > MOST_HELPERS:
        return 0
    deadline = time.monotonic() + timeout_s
    judge: Judge | None = None
    number = answered = 0
    while True:
        told = json.loads(exchange.wait(f"{key}/{number}", max(0.0, deadline - time.monotonic())))
        if not isinstance(told, dict):
            raise DproError("not a question of a search")
        if "end" in told:
            return answered
        if "graph" in told:
            graph = unpack(base64.b64decode(str(told["graph"])))
            graph.info["sync"] = SyncModel(**told["sync"])
            judge = Judge(graph, float("inf"))
            judge.replayed_ns(captured(graph))  # it learns what hangs on which gradient
            exchange.agree(f"{key}/{number}/{exchange.rank}", "ready")
        elif judge is not None and "base" in told:
            judge.rebase(tuple(told["base"]))
        elif judge is not None:
            began = time.monotonic()
            share = told["shares"].get(str(exchange.rank), [])
            steps_ns = [judge.step_ns(judge.grouping(tuple(caps))) for caps in share]
            answer = [time.monotonic() - began, *steps_ns]
            exchange.agree(f"{key}/{number}/{exchange.rank}", json.dumps(answer))
            answered += len(share)
        number += 1
