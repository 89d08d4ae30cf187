"""What it costs to take a partition to its server and the sum back, learnt from captured partitions.

Knows sizes, times and resources (:class:`dpro.graph.ps_ops.Seen`). A message of s bytes holds its link direction for
``a + b·s``, a copy its thread, an addition the server's; fitted as collectives are (:func:`dpro.cost.sync.fit`: least
absolute relative deviation, so that a stalled one says nothing of the others). What passes while nothing is held (a
thread's nap before it looks for work, the way of an acknowledgement) is a lag, the median of those seen.

Only messages that queued show what a message holds its link for. Where too few did, what one takes beyond its bytes
may hold the link or be a lag. The first is believed; :meth:`PsModel.beliefs` has the second as well. The two cost what
was captured about alike, and lead to larger and to smaller partitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dpro.cost.sync import SyncModel, fit
from dpro.graph.graph import Graph
from dpro.graph.ps_ops import INFO, Ps, Seen

#: ``graph.info[MODEL]`` is a :class:`PsModel`.
MODEL = "ps_model"
#: So many messages that queued, of two sizes at least, tell what a message holds its link for.
ENOUGH_QUEUED = 8
#: From this share of a message's time on it matters whether that holds the link.
_MATTERS = 0.02
_NOTHING = SyncModel(0.0, 0.0)


@dataclass(frozen=True)
class PsModel:
    """How long a partition's stages hold their resources (by name), and what passes between them.

    ``lags``, ns: before a copy out ("out") and a push ("push") are taken up, until a push is acknowledged
    ("acknowledge"), before the sum is asked for ("ask"), before it is sent ("pull"), before a copy in ("in").
    ``unsure``: links of which it is not known whether what a message takes beyond its bytes holds them.
    """

    links: Mapping[str, SyncModel]
    copies: Mapping[str, SyncModel] = field(default_factory=dict)
    sums: SyncModel = _NOTHING
    lags: Mapping[str, float] = field(default_factory=dict)
    unsure: frozenset[str] = frozenset()

    def link(self, name: str) -> SyncModel:
        """Of a link direction that was not seen: as the slowest of those that were."""
        return self.links.get(name) or max(self.links.values(), key=lambda line: line.ns_per_byte, default=_NOTHING)

    def copy(self, thread: str) -> SyncModel:
        return self.copies.get(thread, _NOTHING)

    def lag(self, what: str) -> int:
        return round(self.lags.get(what, 0.0))

    @property
    def trust(self) -> str:
        """The least of the links' (:attr:`~dpro.cost.sync.SyncModel.trust`)."""
        known = {line.trust for line in self.links.values()}
        return next((word for word in ("assumed", "weak") if word in known), "good" if known else "assumed")

    def beliefs(self) -> list[PsModel]:
        """This one; and, where that is not known and matters, that nothing but its bytes holds a link for a message."""
        doubted = {name: self.links[name] for name in self.unsure if self.links[name].latency_ns}
        if not any(line.latency_ns >= _MATTERS * line.time_ns(_PART_BYTES) for line in doubted.values()):
            return [self]
        freed = {name: replace(line, latency_ns=0.0) for name, line in doubted.items()}
        typical = float(np.median([line.latency_ns for line in doubted.values()]))
        lags = {**self.lags, **{what: self.lags.get(what, 0.0) + typical for what in ("acknowledge", "pull")}}
        return [self, replace(self, links={**self.links, **freed}, lags=lags, unsure=frozenset())]


#: A partition as BytePS makes them when nobody says otherwise.
_PART_BYTES = 4_096_000


def best_parts(nbytes: int, send: SyncModel, add: SyncModel, receive: SyncModel) -> int:
    """Into how many parts to cut what is pushed, added and pulled as a pipeline, whose parts wait for nothing else.

    ``k (a + b·s/k)`` on the slower of the two links, and one part on the other and at the server: the least of that is
    at ``sqrt(s (b_other + b_add) / a_slow)`` (dPRO section 4.2, solved for k). No more than a part per byte.
    """
    slow, other = sorted((send, receive), key=lambda line: line.time_ns(nbytes), reverse=True)
    gain = nbytes * (other.ns_per_byte + add.ns_per_byte)
    if slow.latency_ns <= 0:
        return max(1, nbytes) if gain > 0 else 1
    return min(max(1, round(math.sqrt(gain / slow.latency_ns))), max(1, nbytes))


def fit_ps(graphs: Iterable[Graph]) -> PsModel:
    """Fit to the partitions of captured graphs, one per step.

    Raises:
        ValueError: none whose size is known.
    """
    known = [graph.info[INFO] for graph in graphs if isinstance(graph.info.get(INFO), Ps)]
    seen = [one for ps in known for one in ps.seen if one.nbytes > 0]
    if not any(one.what in ("push", "pull", "answer") for one in seen):
        raise ValueError("no partition of known size was pushed: what partitions cost is unknown")
    lags: dict[str, float] = {}
    for what in ("out", "push", "ask", "in"):
        found = [ns for ps in known for ns in ps.lags.get(what, [])]
        lags[what] = max(0.0, float(np.median(found))) if found else 0.0
    copies = _lines(one for one in seen if one.what in ("out", "in"))
    # memory is read and written by an addition as by a copy: what it is taken for where pulls do not show it
    pace = float(np.median([line.ns_per_byte for line in copies.values()])) if copies else 0.0

    messages = [one for one in seen if one.what in ("push", "pull", "answer")]
    links: dict[str, SyncModel] = {}
    unsure: set[str] = set()
    for name in dict.fromkeys(one.where for one in messages):
        mine = [one for one in messages if one.where == name]
        queued = [one for one in mine if one.queued]
        if len(queued) >= ENOUGH_QUEUED and len({one.nbytes for one in queued}) > 1:
            links.update(_lines(queued))
            continue
        # an answer holds an addition as well
        alone = [one._replace(ns=max(1, one.ns - round(pace * one.nbytes * (one.what == "answer")))) for one in mine]
        links.update(_lines(alone))
        unsure.add(name)
    lags["acknowledge"] = _beyond((one for one in messages if one.what == "push"), links)
    lags["pull"] = _beyond((one for one in messages if one.what == "pull"), links)
    sums = _sums([one for one in messages if one.what == "answer" and not one.queued], links, lags["pull"], pace)
    return PsModel(links, copies, sums, lags, frozenset(unsure & links.keys()))


def _lines(seen: Iterable[Seen]) -> dict[str, SyncModel]:
    """A line for each resource that shows one."""
    by_place: dict[str, list[Seen]] = {}
    for one in seen:
        by_place.setdefault(one.where, []).append(one)
    out = {}
    for where, some in by_place.items():
        try:
            out[where] = fit([one.nbytes for one in some], [one.ns for one in some])
        except ValueError:  # none took any time
            continue
    return out


def _beyond(seen: Iterable[Seen], links: Mapping[str, SyncModel]) -> float:
    """What messages that did not queue take, in the median, beyond what they hold their link for."""
    left = [one.ns - links[one.where].time_ns(one.nbytes) for one in seen if not one.queued and one.where in links]
    return max(0.0, float(np.median(left))) if left else 0.0


def _sums(answers: Sequence[Seen], links: Mapping[str, SyncModel], lag: float, pace: float) -> SyncModel:
    """An addition, by what answers take beyond a pull of a sum that is there; without any, like a copy."""
    left = [(one.nbytes, one.ns - links[one.where].time_ns(one.nbytes) - lag) for one in answers if one.where in links]
    try:
        return fit([n for n, _ in left], [ns for _, ns in left])
    except ValueError:
        return SyncModel(0.0, pace)
