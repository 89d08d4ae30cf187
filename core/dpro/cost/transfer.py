"""What a transfer takes between two devices, from transfers that were measured.

Knows bytes and times of one ordered pair of devices at a time. Source: FastT (Middleware 2020, section 4): a straight
line for each pair, which holds its bandwidth and how busy it is. Its released code sorts bytes and times apart from
each other before it fits them; here a pair stays a pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro.graph.cluster import Line


def fit_line(samples: Sequence[tuple[int, int]]) -> Line:
    """The line through (bytes, ns) by least squares, neither of its numbers below 0.

    Samples of one size say nothing of latency: it is 0 then.

    Raises:
        ValueError: no sample.
    """
    if not samples:
        raise ValueError("no transfer was measured")
    nbytes, ns = np.array(samples, dtype=np.float64).T
    if np.ptp(nbytes) > 0:
        (slope, constant), *_ = np.linalg.lstsq(np.stack([nbytes, np.ones_like(nbytes)], axis=1), ns, rcond=None)
        if slope >= 0 and constant >= 0:
            return Line(float(constant), float(slope))
        if slope < 0:  # larger ones were no slower: all of it is latency
            return Line(float(ns.mean()), 0.0)
    if not nbytes.any():
        return Line(float(ns.mean()), 0.0)
    return Line(0.0, float(nbytes @ ns / (nbytes @ nbytes)))
