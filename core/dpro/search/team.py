"""The other ranks of a job replay candidates while rank 0 searches: they would only wait for its plan.

Knows the job's exchange and the judge. Rank 0 alone decides what is asked and what comes of it, so the plan is the same
for any number of ranks; a rank that does not answer in time is not asked again, and its share is replayed here.

A question is agreed on under a key of its own, and so is each answer: lists of caps, and the steps they give.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from dpro.adapter import Exchange, RankLeft
from dpro.cost.sync import SyncModel
from dpro.errors import DproError
from dpro.graph.graph import Graph
from dpro.graph.packed import pack, unpack

Caps = tuple[int, ...]
#: Where a replay takes less, s, all of a search are over before it is worth telling anybody of them.
WORTHWHILE_S = 0.005
#: More ranks than this are not asked: the store that they talk through is one.
MOST_HELPERS = 15
#: A larger graph is not sent, bytes of text.
MOST_BYTES = 3 << 20
#: A helper that takes so many times as long as this rank for its own share, and this long, s, is not waited for.
_PATIENCE, _LEAST_PATIENCE_S = 4.0, 5.0


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
        self._begun = self._over = False
        #: candidates that helpers have replayed
        self.evaluations = 0

    @property
    def size(self) -> int:
        """Ranks that replay, this one too."""
        return len(self._helpers) + 1 if self._begun else 1

    def join(self, graph: Graph, replay_s: float) -> None:
        """Send what is searched, if that is worth it: once."""
        if self._begun or self._over or not self._helpers or replay_s < WORTHWHILE_S:
            return
        text = base64.b64encode(pack(graph)).decode()
        told = json.dumps({"graph": text, "sync": asdict(graph.info["sync"])})
        if len(told) > MOST_BYTES:
            self._helpers = []
            return
        self._begun = True
        self._exchange.agree(f"{self._key}/graph", told)

    def steps_ns(self, base: Caps, asked: Sequence[Caps], here: Callable[[Caps], int]) -> list[int]:
        """The replayed step of every one of ``asked``; ``here`` replays on this rank.

        Args:
            base: what the graph has, which they differ little from; () for the captured buckets.
        """
        size = self.size
        if size == 1 or len(asked) < size:
            return [here(caps) for caps in asked]
        number, self._asked = self._asked, self._asked + 1
        shares = {helper: asked[i + 1 :: size] for i, helper in enumerate(self._helpers)}
        self._exchange.agree(f"{self._key}/{number}", json.dumps({"base": base, "shares": shares}))
        began = time.monotonic()
        told = dict(zip(asked[::size], map(here, asked[::size]), strict=True))
        deadline = time.monotonic() + max(_LEAST_PATIENCE_S, _PATIENCE * (time.monotonic() - began))
        for helper, share in shares.items():  # one deadline for all: many that are gone cost no more than one
            left_s = max(0.0, deadline - time.monotonic())
            try:
                answer = json.loads(self._exchange.wait(f"{self._key}/{number}/{helper}", left_s))
                told |= dict(zip(share, map(int, answer), strict=True))
                self.evaluations += len(share)
            except (TimeoutError, RankLeft, ValueError, TypeError):
                self._helpers.remove(helper)
                told |= {caps: here(caps) for caps in share}
        return [told[caps] for caps in asked]

    def end(self) -> None:
        """Let the helpers go; may be called again."""
        if self._over:
            return
        self._over = True
        key = f"{self._key}/{self._asked}" if self._begun else f"{self._key}/graph"
        self._exchange.agree(key, json.dumps({"end": True}))


def assist(exchange: Exchange, key: str, timeout_s: float) -> int:
    """A helper's side: replay what rank 0 asks for until it says that it is over; how many that were.

    Args:
        timeout_s: no question is waited for after so long.

    Raises:
        TimeoutError, RankLeft: rank 0 is silent; it goes on by itself then.
        DproError: this is not what rank 0 sends.
    """
    from dpro.search.judge import Judge

    deadline = time.monotonic() + timeout_s

    def heard(what: str) -> dict[str, Any]:
        told = json.loads(exchange.wait(f"{key}/{what}", max(0.0, deadline - time.monotonic())))
        if not isinstance(told, dict):
            raise DproError("not a question of a search")
        return told

    told = heard("graph")
    if "end" in told:
        return 0
    graph = unpack(base64.b64decode(str(told["graph"])))
    graph.info["sync"] = SyncModel(**told["sync"])
    judge, answered = Judge(graph, float("inf")), 0
    base: Caps = ()
    while "end" not in (told := heard(str(answered))):
        wanted = tuple(told["base"])
        if wanted != base:
            judge.rebase(wanted)
            base = wanted
        share = told["shares"].get(str(exchange.rank), [])
        steps_ns = [judge.step_ns(judge.grouping(tuple(caps))) for caps in share]
        exchange.agree(f"{key}/{answered}/{exchange.rank}", json.dumps(steps_ns))
        answered += 1
    return answered
