"""What tests of real jobs say about a replay."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dpro.graph.graph import Graph
from dpro.replay.engine import replay


def typical_error(steps: Sequence[Graph]) -> float:
    """Median over captured steps of |replayed / measured - 1|: one step that a busy machine held up tells nothing."""
    return statistics.median(abs(replay(step).makespan_ns / step.info["measured_ns"] - 1) for step in steps)
