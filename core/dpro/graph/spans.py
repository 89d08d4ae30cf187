"""Which steps of the traces a graph is made of, how long they took, and on whose clock.

Everything behind :func:`one_clock` reads times of different ranks as times of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro.clock.align import align
from dpro.errors import TraceError
from dpro.trace.model import RankTrace
from dpro.trace.steps import step_finish_ns, used_steps


@dataclass(frozen=True)
class Measured:
    """What the traces say a step takes: ``mean_ns`` over ``steps``, joined over all ranks."""

    mean_ns: float
    steps: list[int]


@dataclass(frozen=True)
class OneClock:
    """Traces whose times can be compared. ``aligned`` is False where each rank's times stay its own.

    ``facts`` has per trace what a report says of its clock, ``warnings`` what it must say.
    """

    traces: list[RankTrace]
    aligned: bool
    facts: list[dict[str, Any]]
    warnings: list[str]


def one_clock(traces: list[RankTrace], aligned: bool = True) -> OneClock:
    """The traces on the clock of the first; with ``aligned=False`` as they are, to see what alignment is worth."""
    if not aligned:
        return OneClock(traces, False, [], [])
    found = align(traces)
    facts = [
        {
            "rank": trace.meta.rank,
            "offset_ns": found.offset_ns[i],
            "drift_ppm": found.drift_ppm[i],
            "uncertainty_ns": found.uncertainty_ns[i],
            "residual_ns": found.residual_ns[i],
            "source": found.source[i],
        }
        for i, trace in enumerate(traces)
    ]
    return OneClock(found.apply(traces), True, facts, found.warnings)


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
    return Measured(span_ns(one_clock(traces), steps) / len(steps), steps)


def span_ns(clock: OneClock, steps: list[int]) -> int:
    """From the begin to the end of consecutive steps, see :func:`measure`; without one clock, of the slowest rank."""
    if not clock.aligned:
        return max(_span_ns([trace], steps) for trace in clock.traces)
    return _span_ns(clock.traces, steps)


def _span_ns(traces: list[RankTrace], steps: list[int]) -> int:
    finish = [step_finish_ns(trace) for trace in traces]
    begin = min(int(trace.step_bounds[steps[0], 0]) for trace in traces)
    if steps[0] > 0:
        begin = max([begin, *(int(f[steps[0] - 1]) for f in finish if f[steps[0] - 1] < f[steps[0]])])
    return max(int(f[steps[-1]]) for f in finish) - begin


def unprofiled_ns(traces: list[RankTrace]) -> float | None:
    """Median un-profiled step of the slowest rank, ns; None where nothing was timed."""
    medians = [float(np.median(t.meta.unprofiled_step_ns)) for t in traces if t.meta.unprofiled_step_ns]
    return max(medians) if medians else None
