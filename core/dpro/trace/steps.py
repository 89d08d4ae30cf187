"""Where the steps of a trace begin and end, and which of them are fit to be averaged.

Works on a :class:`RankTrace` of any source. Step marks of the profiler are taken as they are; this
module is for traces without them, and for first steps whose kernels the profiler lost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro.trace.model import DEVICE_KINDS, EventKind, RankTrace

#: A first step with fewer kernels than this share of the others' fewest lost some of them.
_WHOLE_STEP_SHARE = 0.95


def infer_steps(trace: RankTrace) -> tuple[npt.NDArray[np.int64], str]:
    """Step bounds, int64 [steps, 2] ns, for a trace without step marks, and a line on how.

    In this order: ends of ``Optimizer.step`` ranges; the period of the collectives; the whole
    trace as one step. Always at least one step.
    """
    first, last = int(trace.start.min()), int(trace.end.max())
    ends = _optimizer_ends(trace)
    if len(ends) >= 2:
        edges = [_host_start(trace), *ends]
        return _pairs(edges), f"{len(ends)} steps told by the ends of Optimizer.step"
    starts = _period_starts(trace)
    if len(starts) >= 2:
        return _pairs([*starts, last]), f"{len(starts)} steps told by repeating collectives"
    return _pairs([first, last]), "the whole trace taken as one step"


def used_steps(trace: RankTrace) -> tuple[list[int], str]:
    """Steps to average over, and a note where the first one is left out ("" otherwise).

    CUPTI may drop the kernels of the first moments of a session: a first step with fewer device
    events than every later one is not a whole step.
    """
    steps = list(range(trace.steps))
    if len(steps) < 2:
        return steps, ""
    counts = kernels_per_step(trace)
    others = int(counts[1:].min())
    if counts[0] < _WHOLE_STEP_SHARE * others:
        return steps[1:], f"first step has {counts[0]} kernels, the others at least {others}: not averaged"
    return steps, ""


def kernels_per_step(trace: RankTrace) -> npt.NDArray[np.int64]:
    """Device events by the step of the call that launched them (their own where that is unknown)."""
    rows = device_rows(trace)
    step = trace.step_at(launch_times(trace, rows))
    return np.bincount(step[step >= 0], minlength=trace.steps).astype(np.int64)


def step_finish_ns(trace: RankTrace) -> npt.NDArray[np.int64]:
    """When each step's last work ended, int64 [steps]: the host's, or that of device work it launched.

    A host that runs ahead ends its step long before the device does; counted like this, the step
    time of a busy device is the time from one finish to the next.
    """
    finish = trace.step_bounds[:, 1].copy()
    rows = device_rows(trace)
    step = trace.step_at(launch_times(trace, rows))
    np.maximum.at(finish, step[step >= 0], trace.end[rows][step >= 0])
    return np.maximum.accumulate(finish)


def device_rows(trace: RankTrace) -> npt.NDArray[np.int64]:
    """Rows of kernels, copies and collectives that ran on a device stream."""
    return np.flatnonzero(np.isin(trace.kind, DEVICE_KINDS) & np.isin(trace.resource, trace.streams))


def launch_times(trace: RankTrace, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Start of the call that launched each device row; its own start where no call is known."""
    calls = np.flatnonzero(np.isin(trace.kind, (EventKind.RUNTIME, EventKind.SYNC)) & (trace.flow >= 0))
    if not len(calls):
        return trace.start[rows]
    order = calls[np.argsort(trace.flow[calls], kind="stable")]
    flows = trace.flow[order]
    at = np.minimum(np.searchsorted(flows, trace.flow[rows]), len(flows) - 1)
    found = flows[at] == trace.flow[rows]
    return np.where(found, trace.start[order[at]], trace.start[rows])


def _pairs(edges: list[int]) -> npt.NDArray[np.int64]:
    return np.stack([np.asarray(edges[:-1], np.int64), np.asarray(edges[1:], np.int64)], axis=1)


def _host_start(trace: RankTrace) -> int:
    host = np.isin(trace.kind, (EventKind.CPU_OP, EventKind.RUNTIME, EventKind.ANNOTATION))
    return int(trace.start[host].min())


def _optimizer_ends(trace: RankTrace) -> list[int]:
    """Ends of outermost ``Optimizer.step`` ranges; with several optimizers, of the last in a step."""
    marks: list[tuple[int, int, str]] = []
    for i in np.flatnonzero(trace.kind == EventKind.ANNOTATION).tolist():
        name = trace.names[trace.name[i]]
        if name.startswith("Optimizer.step"):
            start, end = int(trace.start[i]), int(trace.end[i])
            if not marks or start >= marks[-1][1]:  # else nested in the one before
                marks.append((start, end, name))
    if not marks:
        return []
    names = [name for _, _, name in marks]
    period = next(p for p in range(1, len(names) + 1) if all(names[i] == names[i - p] for i in range(p, len(names))))
    return [end for i, (_, end, _) in enumerate(marks) if i % period == period - 1]


def _period_starts(trace: RankTrace) -> list[int]:
    """Start of the first collective of every whole repetition of the shortest repeating sequence."""
    rows = np.flatnonzero(trace.kind == EventKind.COLLECTIVE).tolist()
    keys = [(trace.collectives[i].name, trace.collectives[i].group, int(trace.nbytes[i])) for i in rows]
    if len(set(keys)) < 2:  # equal collectives: one or many a step, nobody can tell
        return []
    for period in range(1, len(keys) // 2 + 1):
        if len(keys) % period == 0 and all(keys[i] == keys[i - period] for i in range(period, len(keys))):
            return [int(trace.start[rows[i]]) for i in range(0, len(rows), period)]
    return []
