"""What it costs to take a partition to its server and the sum back, learnt from captured partitions.

Knows sizes, times and resources (:class:`dpro.graph.ps_ops.Seen`). A message of s bytes holds its link direction for
``a + b·s``, a copy its thread, an addition the server's; what passes while nothing is held (a thread's nap before it
looks for work, the way of an acknowledgement) is a lag, the median of those seen.

A link's pace is that of messages that queued (:mod:`dpro.graph.ps_pace`). Where too few did, and for copies, a line is
fitted to single ones (:func:`dpro.cost.sync.fit`: least absolute relative deviation, so that a stalled one says nothing
of the others).

What a message holds its link for beyond its bytes decides how small parts may be, and a capture does not tell. First a
share of a typical message is believed to be that; :meth:`PsModel.beliefs` has a second model in which nothing but bytes
holds a link. Both cost what was captured alike, and lead to larger and to smaller parts.
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
#: Share of a typical message's time that it is first believed to hold its link for beyond its bytes.
HELD_SHARE = 0.01
#: A lag is that of the quicker ones: others wait for something else as well.
_QUICK = 0.25
#: A part as small as anybody would cut, and the share of its time from which on what is no bytes of it matters.
_SMALL_BYTES = 1 << 18
_MATTERS = 0.02
_NOTHING = SyncModel(0.0, 0.0)


@dataclass(frozen=True)
class PsModel:
    """How long a partition's stages hold their resources (by name), and what passes between them.

    ``lags``, ns: before a copy out ("out") and a push ("push") are taken up, until a push is acknowledged
    ("acknowledge"), before the sum is asked for ("ask"), until it is there ("sum") and sent ("pull"), before a copy in
    ("in").
    ``other``: the model under the second belief, None where it makes no difference.
    """

    links: Mapping[str, SyncModel]
    copies: Mapping[str, SyncModel] = field(default_factory=dict)
    sums: SyncModel = _NOTHING
    lags: Mapping[str, float] = field(default_factory=dict)
    other: PsModel | None = None

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
        """This one; and, where it matters, the one in which nothing but its bytes holds a link for a message."""
        return [self] if self.other is None else [self, self.other]


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
    for what, share in (("out", 0.5), ("push", 0.5), ("ask", 0.5), ("in", 0.5), ("acknowledge", _QUICK)):
        found = [ns for ps in known for ns in ps.lags.get(what, [])]
        lags[what] = max(0.0, float(np.quantile(found, share))) if found else 0.0
    copies = _lines(one for one in seen if one.what in ("out", "in"))
    # an addition reads and writes memory as a copy does: that much it is believed to take, what is beyond is a lag
    pace = float(np.median([line.ns_per_byte for line in copies.values()])) if copies else 0.0

    messages = [one for one in seen if one.what in ("push", "pull", "answer")]
    held: dict[str, SyncModel] = {}
    free: dict[str, SyncModel] = {}
    for name in dict.fromkeys(one.where for one in messages):
        mine = [one for one in messages if one.where == name]
        told = [ps.paces[name] for ps in known if name in ps.paces]
        if told:  # the same in all graphs of a capture
            line = SyncModel(
                0.0, told[0].ns_per_byte, spread=told[0].spread, observations=told[0].stretches,
                distinct_sizes=told[0].sizes,
            )  # fmt: skip
            beyond = HELD_SHARE * line.ns_per_byte * float(np.mean([one.nbytes for one in mine]))
            free[name] = line
            held[name] = replace(line, latency_ns=beyond, ns_per_byte=(1 - HELD_SHARE) * line.ns_per_byte)
            continue
        # an answer holds an addition as well
        alone = _line(name, [(one.nbytes, one.ns - pace * one.nbytes * (one.what == "answer")) for one in mine])
        held.update(alone)
        free.update({link: replace(line, latency_ns=0.0) for link, line in alone.items()})
    model = _model(messages, held, copies, pace, lags)
    if all(line.latency_ns < _MATTERS * line.time_ns(_SMALL_BYTES) for line in held.values()):
        return model
    return replace(model, other=_model(messages, free, copies, pace, lags))


def _model(
    messages: Sequence[Seen],
    links: Mapping[str, SyncModel],
    copies: Mapping[str, SyncModel],
    pace: float,
    lags: Mapping[str, float],
) -> PsModel:
    """What messages took beyond what they hold their links for is lags."""
    sums = SyncModel(0.0, pace)
    pull = _beyond((one for one in messages if one.what == "pull"), links)
    answers = (one._replace(ns=one.ns - sums.time_ns(one.nbytes)) for one in messages if one.what == "answer")
    more = {
        "acknowledge": lags["acknowledge"] + _beyond((one for one in messages if one.what == "push"), links),
        "pull": pull,
        "sum": max(0.0, _beyond(answers, links) - pull),
    }
    return PsModel(links, copies, sums, {**lags, **more})


def _line(name: str, points: Sequence[tuple[float, float]]) -> dict[str, SyncModel]:
    """The line through ``points`` (bytes, ns) under a name; nothing where none took any time."""
    try:
        return {name: fit([n for n, _ in points], [ns for _, ns in points])}
    except ValueError:
        return {}


def _lines(seen: Iterable[Seen]) -> dict[str, SyncModel]:
    """A line for each resource that shows one."""
    places: dict[str, list[tuple[float, float]]] = {}
    for one in seen:
        places.setdefault(one.where, []).append((one.nbytes, one.ns))
    return {name: line for place, points in places.items() for name, line in _line(place, points).items()}


def _beyond(seen: Iterable[Seen], links: Mapping[str, SyncModel]) -> float:
    """What the quicker messages that did not queue take beyond what they hold their link for."""
    left = [one.ns - links[one.where].time_ns(one.nbytes) for one in seen if not one.queued and one.where in links]
    return max(0.0, float(np.quantile(left, _QUICK))) if left else 0.0
