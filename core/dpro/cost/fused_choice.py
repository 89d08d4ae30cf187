"""Which estimator of a fused op's time is used when nobody says.

Knows the estimators and how they did (``docs/disco.md``): :data:`DEFAULT` is the one that was nearest on kernels of
models that it was not fitted to. Without its library, or without enough timed kernels, it is the one that needs
neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpro.cost.fused import Estimator, Sample, SavedTraffic, SumOfOps
from dpro.errors import DproError

#: The name of the best one on held-out models of the benchmark.
DEFAULT = "boosted trees"
#: Of a launch, where none was timed.
LAUNCH_NS = 10_000.0


def estimator(samples: Sequence[Sample] = (), launch_ns: float = LAUNCH_NS) -> Estimator:
    """Fitted to ``samples``: :data:`DEFAULT`, else :class:`SavedTraffic`; of none the sum of the ops, launched once."""
    from dpro.cost.fused_trees import Trees

    if not samples:
        return SumOfOps(launch_ns)
    try:
        return Trees.fit(samples, launch_ns)
    except DproError:
        return SavedTraffic.fit(samples, launch_ns)
