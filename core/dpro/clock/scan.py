"""dPRO's own term for two clocks: the difference at which like messages took like times, found exactly.

For a family of messages (same direction, kind and size) dPRO (MLSys 2022, section 4.2) minimises the variance
of ``recv_end + d - max(recv_start + d, send_start)`` over the difference d of the clocks. The whole problem is
not convex, but that of one pair depends on d alone and is piecewise quadratic between the breakpoints
``send_start - recv_start``, so every piece is looked at. Knows no traces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Receives:
    """One row per receive; ``turn`` is the d at which its SEND and its own start coincide, float64 ns."""

    family: npt.NDArray[np.int64]
    #: +1: received on the second clock (it waits for its SEND while d < turn); -1: on the first (while d > turn)
    sign: npt.NDArray[np.int64]
    turn: Floats
    took: Floats  # end - start


def total_variance(receives: Receives, d: float) -> float:
    """Σ over families of the variance of what their messages took, ns², were ``d`` the difference."""
    took = receives.took - np.maximum(0.0, receives.sign * (receives.turn - d))
    return float(sum(took[receives.family == f].var() for f in np.unique(receives.family)))


def scan(receives: Receives, low: float, high: float) -> float:
    """The d in [low, high] of the least :func:`total_variance`; where it is flat or has equals, their middle."""
    if not len(receives.turn) or not low < high:
        return (low + high) / 2
    # On [low, high] a receive whose turn is outside waits always or never: moving the turn to the border changes
    # nothing there, if what it took goes along, and keeps the sums below small.
    turn = np.clip(receives.turn, low, high)
    took = receives.took + np.where(
        receives.sign > 0, np.minimum(0.0, high - receives.turn), np.minimum(0.0, receives.turn - low)
    )
    order = np.lexsort((turn, receives.family))
    family, sign = receives.family[order], receives.sign[order].astype(np.float64)
    turn, took = turn[order] - low, took[order]
    _, first, size = np.unique(family, return_index=True, return_counts=True)
    own = np.repeat(np.arange(len(first)), size)
    took -= (np.add.reduceat(took, first) / size)[own]
    n = size.astype(np.float64)[own]
    # Sums over the members that wait, right after each turn: for sign +1 those with a later turn, else an earlier.
    terms = np.stack([np.ones_like(turn), took, took * turn, turn, turn * turn])
    before = np.cumsum(terms, axis=1)
    before -= np.repeat(before[:, first] - terms[:, first], size, axis=1)
    whole = np.add.reduceat(terms, first, axis=1)[:, own]
    after = np.where(sign > 0, whole - before, before)
    at = np.where(sign > 0, whole - before + terms, before - terms)  # right before each turn
    change = _quadratic(after, n, sign) - _quadratic(at, n, sign)
    starts = _quadratic(at[:, first], n[first], sign[first]).sum(axis=1)
    squares = (np.add.reduceat(took * took, first) / size).sum()
    by_turn = np.argsort(turn, kind="stable")
    pieces = np.concatenate([starts[:, None], change[:, by_turn]], axis=1).cumsum(axis=1)
    edges = np.concatenate([[0.0], turn[by_turn], [high - low]])
    a, b, c = pieces
    with np.errstate(divide="ignore", invalid="ignore"):
        vertex = np.where(a > 1e-12, -b / (2 * a), edges[:-1])
    where = np.stack([edges[:-1], np.clip(vertex, edges[:-1], edges[1:]), edges[1:]])
    value = (a * where + b) * where + c + squares
    least = where[value <= value.min() + 1e-9 * max(squares, value.max()) + 1e-3]
    return low + float(least.min() + least.max()) / 2


def _quadratic(sums: Floats, n: Floats, sign: Floats) -> Floats:
    """Variance, less what does not depend on d, as coefficients of d², d and 1; ``sums`` as in :func:`scan`."""
    m, p, q, b, bb = sums
    return np.stack(
        [m / n - (m / n) ** 2, 2 * (sign * p - b) / n + 2 * m * b / n**2, (bb - 2 * sign * q) / n - (b / n) ** 2]
    )
