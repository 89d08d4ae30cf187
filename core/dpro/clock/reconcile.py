"""From pairs of clocks to every clock read on the first.

Each clock is read on the first over the pairs known best. Where pairs close a circle, that may break the cause and
effect of a pair not on the way; only then is there anything to solve. The lines are then those that are least away
from what the pairs say (weighted least absolute deviation, of which the best ways are a solution too where they
break nothing worse) and break no cause and effect of any pair: a small linear program. (dPRO, MLSys 2022, section
4.2, has a term in its place that is not convex.) CVXPY takes seconds to import, and is imported for this alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.clock.line import IDENTITY, Line
from dpro.clock.pairs import Pair, Window

Floats = npt.NDArray[np.float64]

#: what giving way costs, against as large a deviation from the pair known best
_SLACK_COST = 1e3
#: clocks are read, and corners rounded, no better than this
_TOLERANCE_NS = 1_000
#: a pair known better than this counts no more
_LEAST_UNCERTAINTY_NS = 100.0


@dataclass(frozen=True)
class Clocks:
    """Per clock, read on clock 0."""

    lines: list[Line]
    #: wrong by no more than this in the clock's window; inf: no way to clock 0, or none that is bounded
    uncertainty_ns: list[float]
    warnings: list[str]


def reconcile(pairs: Sequence[Pair], windows: Sequence[Window]) -> Clocks:
    """``windows``: first and last time of each clock. Clocks that no pair leads to keep their times."""
    lines, uncertainty = _along_best_paths(pairs, windows)
    warnings: list[str] = []
    bounded = [p for p in pairs if np.isfinite(p.uncertainty_ns) and np.isfinite(uncertainty[p.first])]
    if any(_broken_ns(pair, lines) > _TOLERANCE_NS for pair in bounded):
        try:
            better, slack = _solve(bounded, lines, windows)
        except Exception as error:  # no solver, or none that gets through: the best paths are good lines too
            return Clocks(
                lines, uncertainty, [f"clocks not reconciled over all pairs ({type(error).__name__}: {error})"]
            )
        if slack > _TOLERANCE_NS:
            warnings.append(f"clocks of hosts contradict each other around a circle: {slack / 1e3:.1f} us given way")
        for k, (line, window) in enumerate(zip(better, windows, strict=True)):
            # what the best path promised, about another line
            uncertainty[k] += max(abs(line(t) - lines[k](t)) for t in window)
        lines = better
    return Clocks(lines, uncertainty, warnings)


def _along_best_paths(pairs: Sequence[Pair], windows: Sequence[Window]) -> tuple[list[Line], list[float]]:
    """Each clock over the pairs whose uncertainties have the least sum (Dijkstra)."""
    near: list[list[tuple[int, Line, float]]] = [[] for _ in windows]
    for pair in pairs:
        near[pair.first].append((pair.second, pair.line, pair.uncertainty_ns))
        near[pair.second].append((pair.first, pair.line.inverse(), pair.uncertainty_ns))
    lines = [IDENTITY.about((a + b) // 2) for a, b in windows]
    uncertainty = [np.inf] * len(windows)
    queue: list[tuple[float, int, int, Line]] = [(0.0, 0, 0, lines[0])]
    done: set[int] = set()
    while queue:
        wrong, _, k, line = heapq.heappop(queue)
        if k in done:
            continue
        done.add(k)
        a, b = windows[k]
        lines[k], uncertainty[k] = line.about((a + b) // 2), wrong
        for other, step, more in near[k]:
            if other not in done:
                heapq.heappush(queue, (wrong + more, len(done), other, line.after(step)))
    return lines, uncertainty


def _broken_ns(pair: Pair, lines: Sequence[Line]) -> float:
    """By how much the lines break a cause and effect of a pair, beyond what the pair itself does."""
    first, second = lines[pair.first], lines[pair.second]
    early = [first(t + difference) - second(t) for t, difference in pair.low.tolist()]
    late = [second(t) - first(t + difference) for t, difference in pair.high.tolist()]
    return max([*early, *late], default=0) - pair.slack_ns


def _solve(pairs: Sequence[Pair], lines: Sequence[Line], windows: Sequence[Window]) -> tuple[list[Line], float]:
    """Corrected lines, and by how much the bounds had to give way, ns.

    Unknown are, per clock, corrections at its reference and what is added at the end of its window; in us, of the
    size of the weights and bounds, or the solver is inaccurate.
    """
    import cvxpy

    n = len(lines)
    half = [max(1.0, (b - a) / 2) for a, b in windows]

    def ahead_us(pair: Pair, t: int, difference: int) -> Floats:
        """How far the second clock at ``t`` is ahead of the first ``difference`` later: coefficients, constant last."""
        out = np.zeros(2 * n + 1)
        for k, at, sign in ((pair.second, t, 1), (pair.first, t + difference, -1)):
            out[2 * k] += sign
            out[2 * k + 1] += sign * (at - lines[k].reference_ns) / half[k]
            out[-1] += sign * (lines[k](at) - t) / 1e3  # less t: floats don't hold ns since the epoch
        return out

    said = np.stack([ahead_us(p, t, p.line(t) - t) for p in pairs for t in windows[p.second]])
    sure = np.array([max(p.uncertainty_ns, _LEAST_UNCERTAINTY_NS) / 1e3 for p in pairs for _ in range(2)])
    weights = sure.min() / sure
    given = [np.append(np.zeros(2 * n), pair.slack_ns / 1e3) for pair in pairs]
    bounds = np.stack(
        [ahead_us(p, t, d) + free for p, free in zip(pairs, given, strict=True) for t, d in p.low.tolist()]
        + [free - ahead_us(p, t, d) for p, free in zip(pairs, given, strict=True) for t, d in p.high.tolist()]
    )
    unknown, slack = cvxpy.Variable(2 * n), cvxpy.Variable(nonneg=True)
    deviation = said[:, :-1] @ unknown + said[:, -1]
    problem = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.norm1(cvxpy.multiply(weights, deviation)) + _SLACK_COST * slack),
        [unknown[:2] == 0, bounds[:, :-1] @ unknown + bounds[:, -1] + slack >= 0],
    )
    problem.solve()
    if unknown.value is None:
        raise ArithmeticError(problem.status)
    corrections = np.asarray(unknown.value).reshape(n, 2) * 1e3
    better = [
        Line(line.offset_ns + round(c[0]), line.drift + c[1] / h, line.reference_ns)
        for line, c, h in zip(lines, corrections.tolist(), half, strict=True)
    ]
    return [lines[0], *better[1:]], float(slack.value) * 1e3
