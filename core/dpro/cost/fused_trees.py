"""What a fused op takes, by gradient-boosted trees on a summary of it: no graph, a few dozen numbers.

Knows kernels that were timed (:mod:`dpro.cost.fused`) and scikit-learn, which is imported when it is used. The trees
learn the logarithm of what a kernel takes relative to the sum of its ops, so that they correct a guess instead of
making one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpro.cost.fused import Floats, Kernel, Sample, SumOfOps, Trust, loops
from dpro.errors import DproError

#: Types with features of their own: so many, the most frequent.
_TYPES = 28
#: Kinds of types, each known by its first match; the last is all others. What an op of a kind takes alone for each byte
#: tells how its shapes suit the machine (a sum over rows or over columns, a transposition of long or of short rows).
_KINDS = tuple(
    re.compile(pattern, re.I)
    for pattern in (
        "^(reduce|arg|cum|sum|mean)", "dot_|matmul|gemm|linear", "broadcast|expand", "transpose|permute",
        "reshape|view", "concat|split|slice|pad|rev|stack", "exp|log|tanh|sqrt|sin|cos|erf|div", "",
    )
)  # fmt: skip
#: Bytes below which an op's time says nothing of them.
_LARGE = 20e3
#: Trees are averaged over so many random halves of samples and features: a forest of forests, less noise.
_MODELS = 6


class Trees:
    """See the module text."""

    name = "boosted trees"
    trust: Trust | None = None

    def __init__(self, base: SumOfOps, types: Sequence[str], models: Sequence[Any], threads: Any) -> None:
        self._base, self._types, self._models, self._threads = base, tuple(types), models, threads

    def time_ns(self, kernel: Kernel) -> float:
        row = features(kernel, self._base, self._types)[None]
        with self._threads.limit(limits=1):
            said = float(np.mean([model.predict(row)[0] for model in self._models]))
        return self._base.time_ns(kernel) * float(np.exp(said))

    @classmethod
    def fit(cls, samples: Sequence[Sample], launch_ns: float, seed: int = 0) -> Trees:
        """
        Raises:
            DproError: scikit-learn is not installed, or there are fewer than 50 samples.
        """
        if len(samples) < 50:
            raise DproError(f"trees need at least 50 timed kernels, not {len(samples)}")
        try:
            from sklearn.ensemble import HistGradientBoostingRegressor
            from threadpoolctl import ThreadpoolController
        except ImportError as error:
            raise DproError("boosted trees need scikit-learn: pip install dpro[trees]") from error
        base = SumOfOps(launch_ns)
        counted = Counter(kind for s in samples for kind in s.kernel.types)
        types = [kind for kind, _ in counted.most_common(_TYPES)]
        rows = np.array([features(s.kernel, base, types) for s in samples])
        wanted = np.log([s.time_ns / base.time_ns(s.kernel) for s in samples])
        models = []
        threads = ThreadpoolController()  # so few rows: threads would only wait for each other
        for k in range(_MODELS):
            model = HistGradientBoostingRegressor(
                loss="absolute_error" if k % 2 else "squared_error", max_iter=400, learning_rate=0.05,
                max_leaf_nodes=48, min_samples_leaf=8, l2_regularization=1.0, max_features=0.3, random_state=seed + k,
            )  # fmt: skip
            with threads.limit(limits=1):
                models.append(model.fit(rows, wanted))
        return cls(base, types, models, threads)


def features(kernel: Kernel, base: SumOfOps, types: Sequence[str]) -> Floats:
    """[37 + 3 · types]: sizes and times in logarithms; of each kind (:data:`_KINDS`) the most ns for a byte and the
    longest op's share; of each type its ops, its share of the ops' time, and the share of what it would save if nothing
    that stays inside cost anything.
    """
    work = np.maximum(kernel.time_ns - base.launch_ns, 0.0)
    whole = max(float(work.sum()), 1.0)
    inside = work * kernel.kept_share()
    heavy = kernel.heavy()
    depth = _depth(kernel)
    inside_of = loops(kernel)
    again = sum(float(work[ops].sum()) for ops in inside_of.values())
    looped_bytes = sum(_moved(kernel, root, ops) for root, ops in inside_of.items())
    at = {kind: i for i, kind in enumerate(types)}
    of_type = np.array([at.get(kind, len(types)) for kind in kernel.types])
    by_type = np.stack([
        np.bincount(of_type, None, len(types) + 1),
        np.bincount(of_type, work / whole, len(types) + 1),
        np.bincount(of_type, inside / whole, len(types) + 1),
    ])[:, : len(types)]  # fmt: skip
    moved = kernel.read_bytes + kernel.written_bytes
    whole_row = [
        np.log(base.time_ns(kernel)), np.log(whole), np.log(work.max() + 1.0), float(work.max()) / whole,
        float(inside[~heavy].sum()) / whole, float(inside[heavy].sum()) / whole,
        np.log1p(kernel.read_bytes), np.log1p(kernel.written_bytes), np.log1p(kernel.flops.sum()),
        np.log1p(kernel.edge_bytes.sum()) - np.log1p(moved), np.log((moved + 1.0) / whole),
        len(kernel), kernel.inputs, kernel.outputs, depth,
        len(inside_of), again / whole, np.log1p(looped_bytes), np.log((looped_bytes + 1.0) / whole),
        float(work[kernel.in_bytes + kernel.out_bytes < _LARGE].sum()) / whole,
        int((kernel.out_bytes[kernel.exported] > _LARGE).sum()),
    ]  # fmt: skip
    by_kind = _by_kind(kernel, work / whole)
    row: Floats = np.concatenate([np.array(whole_row, dtype=np.float64), *by_kind, by_type.ravel()])
    return row


def _by_kind(kernel: Kernel, share: Floats) -> tuple[Floats, Floats]:
    """[kinds] and [kinds]; ``share`` [n]: of the ops' time."""
    kind = [next(i for i, pattern in enumerate(_KINDS) if pattern.search(name)) for name in kernel.types]
    moved = kernel.in_bytes + kernel.out_bytes
    pace, longest = np.zeros(len(_KINDS)), np.zeros(len(_KINDS))
    np.maximum.at(pace, kind, np.where(moved > _LARGE, kernel.time_ns / (moved + 1.0), 0.0))
    np.maximum.at(longest, kind, share)
    return pace, longest


def _moved(kernel: Kernel, root: int, ops: list[int]) -> float:
    """Bytes that a loop reads and writes."""
    inside = np.isin(kernel.target, ops)
    between = float(kernel.edge_bytes[inside & np.isin(kernel.source, ops)].sum())
    return max(float(kernel.in_bytes[ops].sum()) - between, 0.0) + float(kernel.out_bytes[root])


def _depth(kernel: Kernel) -> int:
    """Ops on the longest way through the kernel."""
    depth = [1] * len(kernel)
    for a, b in sorted(zip(kernel.source.tolist(), kernel.target.tolist(), strict=True), key=lambda edge: edge[1]):
        depth[b] = max(depth[b], depth[a] + 1)
    return max(depth)
