"""Horovod's responses told by what its background thread moved, where no timeline says it.

The thread goes round in cycles. Each begins with an all-reduce of a few words, the bits of the tensors that
every rank has handed in (``response_cache.cc``); then all of those go as one response, as far as they
fit. Between two such exchanges lies one response, and its bytes say how many of the gradients in the order of
hand-in it took. What is too small to be told from the bits is counted to the response after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.trace.horovod import GROUP, SUBMIT, WAIT, collective_row, spans
from dpro.trace.model import Collective, EventKind, RankTrace, TraceBuilder

_HEADER_BYTES = 48  # of a gloo frame
#: Bits of status in front of those of the tensors (``response_cache.h``).
_STATUS_BITS = 3
#: A run whose bytes differ by more than this from what was handed in holds something else.
_TOLERANCE = 0.01
_CYCLE_NS = 1_000_000


@dataclass
class _Run:
    """Payload between two exchanges of bits: when the bits were there, when they were asked for again; ns."""

    begun: int
    start: int
    end: int
    again: int
    nbytes: int


def with_responses(trace: RankTrace, members: int) -> RankTrace:
    """:func:`together` of one rank: what another had not handed in is told from the bytes as far as it can be."""
    return together([trace], members)[0]


def together(traces: list[RankTrace], members: int) -> list[RankTrace]:
    """``traces`` with a COLLECTIVE row for every response that their wire rows show; as they are where there are none.

    What all ranks have handed in goes, and the n-th response of a step is the same everywhere: what each rank handed in
    before its own n-th says, without a common clock, in which order gradients were there on all of them.

    Args:
        traces: with rows for gradients that were handed in and waited for, and for payload sent and received.
        members: ranks of the ring.
    """
    found = [_runs(trace) for trace in traces]
    if len(traces) > 1 and not all(found):
        return [with_responses(trace, members) for trace in traces]
    if not traces or not all(found):
        return traces
    ranks = [_Rank(trace, runs) for trace, runs in zip(traces, found, strict=True)]
    for step in range(max(trace.steps for trace in traces)):
        views = [(rank, rank.step(step)) for rank in ranks if step < rank.trace.steps]
        alike = len({len(view.runs) for _, view in views}) == 1
        for group in [views] if alike else [[view] for view in views]:
            _tell(group, members)
    return [rank.told() for rank in ranks]


@dataclass
class _Step:
    """Of one rank: its runs, and when each gradient was handed in and had (ns by name)."""

    runs: list[_Run]
    handed: dict[str, int]
    had: dict[str, int]


class _Rank:
    def __init__(self, trace: RankTrace, runs: list[_Run]) -> None:
        self.trace, self._runs = trace, runs
        self._submitted, self._waited = _in_order(trace, SUBMIT), _in_order(trace, WAIT)
        self._number = {tensor.name: t for t, tensor in enumerate(trace.tensors)}
        self._sizes = np.array([tensor.nbytes for tensor in trace.tensors], dtype=np.int64)
        told = trace.meta.library()
        self._cycle_ns, self._alone = told.get("cycle_ns", _CYCLE_NS), told.get("fusion_bytes") == 0
        self._builder = TraceBuilder(trace.meta)
        self._sequence = self.missed = 0

    def step(self, number: int) -> _Step:
        begin, end = self.trace.step_bounds[number].tolist()
        handed, had = (
            {self.trace.tensors[t].name: at for at, t in times if begin <= at < end}
            for times in (self._submitted, self._waited)
        )
        return _Step([run for run in self._runs if begin <= run.start < end], handed, had)

    def nbytes(self, names: list[str]) -> npt.NDArray[np.float64]:
        return self._sizes[[self._number[name] for name in names]].astype(np.float64)

    def add(self, names: list[str], run: _Run, step: _Step) -> None:
        """The gradients ``names`` went with ``run``."""
        # after copying out, the thread asks for bits again, at once where the cycle's time is over
        over = run.again if run.again - run.begun > self._cycle_ns else run.end
        over = max(run.end, min([over, *(step.had[name] for name in names if name in step.had)]))
        numbers = {self._number[name]: step.handed[name] for name in names}
        kinds = {t: (self.trace.tensors[t].dtype, at if self._alone else 0) for t, at in numbers.items()}
        span = min(max(run.begun, *numbers.values()), run.start), over
        self._sequence = _add(self._builder, kinds, self._sizes, span, self._sequence)

    def told(self) -> RankTrace:
        out = self.trace.joined(self._builder.freeze([]))
        if self.missed:
            out.warnings.append(untold(self.missed))
        return out


def _tell(ranks: list[tuple[_Rank, _Step]], members: int) -> None:
    """Which gradients went with which of a step's runs, of which all ``ranks`` have as many."""
    share = 2 * (members - 1) / members  # round a ring of n, each rank receives 2 (n - 1) / n of the bytes
    lead, of_lead = ranks[0]
    left = [name for name in of_lead.handed if all(name in step.handed for _, step in ranks)]
    carried: list[_Run] | None = None  # what fits nothing may be a part of what follows
    for runs in zip(*(step.runs for _, step in ranks), strict=True):
        now = list(runs)
        if carried is not None:
            now = [
                _Run(was.begun, was.start, run.end, run.again, was.nbytes + run.nbytes)
                for was, run in zip(carried, now, strict=True)
            ]
        late = {
            name: max(step.handed[name] - run.begun for (_, step), run in zip(ranks, now, strict=True))
            for name in left
            if all(step.handed[name] <= run.start for (_, step), run in zip(ranks, now, strict=True))
        }
        ready = sorted(late, key=late.__getitem__)
        took = _taken(share * lead.nbytes(ready), now[0].nbytes)
        if took is None:
            carried = now
            continue
        carried = None
        for (rank, step), run in zip(ranks, now, strict=True):
            rank.add(ready[took], run, step)
        gone = set(ready[took])
        left = [name for name in left if name not in gone]
    for rank, _ in ranks:
        rank.missed += bool(left)


def untold(steps: int) -> str:
    """The warning where the bytes of so many steps do not say when all gradients went."""
    return f"{steps} step(s) with gradients whose way over the wire could not be told"


def _add(
    builder: TraceBuilder,
    kinds: dict[int, tuple[str, int]],
    sizes: npt.NDArray[np.int64],
    span: tuple[int, int],
    sequence: int,
) -> int:
    """Rows for what ran in ``span``: a response for each kind (dtype, group), one after another.

    ``kinds``: by gradient. Returns the next number.
    """
    by_kind: dict[tuple[str, int], list[int]] = {}
    for t, kind in kinds.items():
        by_kind.setdefault(kind, []).append(t)
    total, at, start = int(sizes[list(kinds)].sum()), 0, span[0]
    for (dtype, _), some in by_kind.items():
        nbytes = int(sizes[some].sum())
        at += nbytes
        end = span[0] + round((span[1] - span[0]) * at / total)
        facts = Collective("allreduce", GROUP, sequence, dtype=dtype, tensors=tuple(some))
        collective_row(builder, facts, start, end, nbytes)
        start, sequence = end, sequence + 1
    return sequence


def _taken(nbytes: npt.NDArray[np.float64], moved: int) -> slice | None:
    """Which of the gradients that were ready (bytes each, by hand-in) add up to what was moved: a run of them.

    All ranks must have handed in; where ranks differ in their order, the first ready may have to stay behind.
    """
    until = np.concatenate([[0.0], np.cumsum(nbytes)])
    for first in range(len(nbytes)):
        last = int(np.argmin(np.abs(until - until[first] - moved)))
        if last > first and abs(until[last] - until[first] - moved) <= _TOLERANCE * moved + _HEADER_BYTES:
            return slice(first, last)
    return None


def _in_order(trace: RankTrace, name: str) -> list[tuple[int, int]]:
    """(end, gradient) of the rows called ``name``, by time."""
    return sorted((end, t) for t, (_, ends) in spans(trace, name).items() for end in ends.tolist())


def _most_of_an_exchange(trace: RankTrace, sent: npt.NDArray[np.int64]) -> int:
    """Bytes of payload that no message of an exchange of bits exceeds, and hardly a response stays below.

    There is a bit for everything in Horovod's cache: these gradients at least, but metrics and former groups as well.
    So what is sent in a step before its first gradient is handed in is looked at: exchanges, and little else.
    """
    # words for the bits, and as many again where Horovod keeps a timeline
    least = 2 * 8 * -(-(len(trace.tensors) + _STATUS_BITS) // 64)
    handed = np.sort(
        np.concatenate([np.empty(0, dtype=np.int64), *(starts for starts, _ in spans(trace, SUBMIT).values())])
    )
    inside = sent[trace.step[sent] >= 0]
    begin = trace.step_bounds[trace.step[inside], 0]
    before = np.searchsorted(handed, trace.start[inside]) == np.searchsorted(handed, begin)
    quiet = trace.nbytes[inside[before]] - _HEADER_BYTES
    # a ring cuts the words into pieces, of which the last is smaller
    return max(least, round(2 * float(np.quantile(quiet, 0.25)))) if len(quiet) else least


def _runs(trace: RankTrace) -> list[_Run]:
    if "payload" not in trace.names:
        return []
    payload = trace.name == trace.names.index("payload")
    sent = np.flatnonzero(payload & (trace.kind == EventKind.SEND))
    small = _most_of_an_exchange(trace, sent)
    received = np.flatnonzero(payload & (trace.kind == EventKind.RECV))
    bits = trace.nbytes[sent] <= _HEADER_BYTES + small
    asked = trace.start[sent[bits]]
    bulk = sent[~bits]
    answers = received[trace.nbytes[received] <= small]
    turns = np.concatenate([asked, [np.iinfo(np.int64).max]])
    of_send = np.searchsorted(turns, trace.start[bulk], side="right")
    of_recv = np.searchsorted(turns, trace.end[received], side="right")
    runs = []
    for turn in np.unique(of_send).tolist():
        sends, recvs = bulk[of_send == turn], received[of_recv == turn]
        start = int(trace.start[sends].min())
        before = trace.end[answers][trace.end[answers] <= start]
        begun = int(before.max()) if len(before) else start
        end = int(max(trace.end[sends].max(), trace.end[recvs].max(initial=0)))
        again = int(turns[turn]) if turn < len(asked) else end
        runs.append(_Run(begun, start, end, max(again, end), int(trace.nbytes[recvs].sum())))
    return runs
