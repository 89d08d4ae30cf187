"""Which estimator of a fused op's time is used when nobody says.

Knows the estimators and how they did (``docs/disco.md``): :data:`DEFAULT` was nearest on kernels of models that it was
not fitted to. Without its library, or with too few timed kernels, it is the one that needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpro.cost.fused import Estimator, Sample, SavedTraffic, SumOfOps, errors, trust_of
from dpro.errors import DproError

#: The best one on held-out models.
DEFAULT = "boosted trees"
#: Of a launch, where none was timed.
LAUNCH_NS = 10_000.0
#: One in so many models, at least one, is held out to see how far the estimator can be trusted.
_HELD_OUT = 4


def estimator(samples: Sequence[Sample] = (), launch_ns: float = LAUNCH_NS) -> Estimator:
    """Fitted to ``samples``: :data:`DEFAULT`, else :class:`SavedTraffic`; of none the sum of the ops, launched once.

    ``trust`` is what one fitted to three fourths of the models was worth on the others.
    """
    if not samples:
        return SumOfOps(launch_ns)
    fitted = _fitted(samples, launch_ns)
    apart = set(sorted({s.model for s in samples})[::_HELD_OUT])
    known = [s for s in samples if s.model not in apart]
    if known:
        held_out = [s for s in samples if s.model in apart]
        other = _fitted(known, launch_ns)
        if type(other) is type(fitted):  # of too few kernels comes another kind
            fitted.trust = trust_of(errors(other, held_out))
    return fitted


def _fitted(samples: Sequence[Sample], launch_ns: float) -> Estimator:
    from dpro.cost.fused_trees import Trees

    try:
        return Trees.fit(samples, launch_ns)
    except DproError:
        return SavedTraffic.fit(samples, launch_ns)
