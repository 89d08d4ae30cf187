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

#: what giving way by 1 ns costs, in units of the weighted deviation of a pair known to 1 ns
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

    Unknown are, for every clock but the first, corrections in ns at its reference and at the end of its window.
    """
    import cvxpy

    n = len(lines)
    half = [max(1.0, (b - a) / 2) for a, b in windows]

    def row(pair: Pair, t: int, difference: int) -> tuple[Floats, float]:
        """What the second clock says at ``t`` less what the first does ``difference`` later: linear and constant."""
        out = np.zeros(2 * n)
        constant = 0
        for k, at, sign in ((pair.second, t, 1), (pair.first, t + difference, -1)):
            out[2 * k] += sign
            out[2 * k + 1] += sign * (at - lines[k].reference_ns) / half[k]
            constant += sign * lines[k](at)
        return out, float(constant)

    said = [
        (row(p, t, p.line(t) - t), 1 / max(p.uncertainty_ns, _LEAST_UNCERTAINTY_NS))
        for p in pairs
        for t in windows[p.second]
    ]
    bounds = []  # sign · (what the second says less the first) >= 0, give way by slack
    for pair in pairs:
        for side, sign in ((pair.low, 1.0), (pair.high, -1.0)):
            for t, difference in side.tolist():
                linear, constant = row(pair, t, difference)
                bounds.append((sign * linear, sign * constant + pair.slack_ns + 1.0))
    unknown = cvxpy.Variable(2 * n)
    slack = cvxpy.Variable(nonneg=True)
    weights = np.array([weight for _, weight in said])
    deviation = np.array([r[0] for r, _ in said]) @ unknown + np.array([r[1] for r, _ in said])
    constraints = [unknown[:2] == 0]
    if bounds:
        constraints.append(np.array([b[0] for b in bounds]) @ unknown + np.array([b[1] for b in bounds]) + slack >= 0)
    problem = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.norm1(cvxpy.multiply(weights, deviation)) + _SLACK_COST * weights.max() * slack),
        constraints,
    )
    problem.solve()
    if unknown.value is None:
        raise ArithmeticError(problem.status)
    corrections = np.asarray(unknown.value).reshape(n, 2)
    better = [
        Line(line.offset_ns + round(c[0]), line.drift + c[1] / h, line.reference_ns)
        for line, c, h in zip(lines, corrections.tolist(), half, strict=True)
    ]
    better[0] = lines[0]
    return better, float(slack.value)
