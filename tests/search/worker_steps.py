"""Small steps of one data-parallel worker, by hand and at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from dpro.cost.fused import Kernel, SumOfOps
from dpro.graph.graph import OpKind
from dpro.passes.worker_step import Step


class Halved(SumOfOps):
    """A fused op takes half of what its ops take; nothing is a launch."""

    name = "half"

    def time_ns(self, kernel: Kernel) -> float:
        return float(kernel.time_ns.sum()) / 2


def step_of(
    time_ns: Sequence[int],
    reads: Sequence[Sequence[int]],
    reduces: Sequence[tuple[int, int, Sequence[int]]] = (),
    types: Sequence[str] | None = None,
    nbytes: int = 100,
) -> Step:
    """``reads``: by op, the ops before it that it reads. ``reduces``: (op that makes the gradient, bytes, readers)."""
    n = len(time_ns)
    edges = [(a, b, a) for b, before in enumerate(reads) for a in before]
    sizes = [nbytes] * n
    for k, (op, size, readers) in enumerate(reduces):
        edges.append((op, n + k, len(sizes)))
        edges += [(n + k, reader, len(sizes) + 1) for reader in readers]
        sizes += [size, size]
    table = np.array(sorted(edges, key=lambda e: (e[1], e[0])), dtype=np.int64).reshape(-1, 3)
    m = len(reduces)
    return Step(
        [f"op{i}" for i in range(n)] + [f"reduce{k}" for k in range(m)],
        [*(types or ["Add"] * n), *["AllReduce"] * m],
        np.array([int(OpKind.BACKWARD)] * n + [int(OpKind.COLLECTIVE)] * m),
        np.array([*time_ns, *[0] * m], dtype=np.float64),
        np.array([0] * n + [size for _, size, _ in reduces], dtype=np.int64),
        [True] * (n + m), table[:, 0], table[:, 1], table[:, 2], np.array(sizes), np.zeros(n, np.int64), n,
    )  # fmt: skip


@st.composite
def steps(draw: st.DrawFn, most: int = 9) -> Step:
    """Any small step: gradients of any ops, updates that wait for one, and what reads those again."""
    n = draw(st.integers(2, most))
    reads = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(n)]
    times = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    reduces = []
    for op in sorted(draw(st.sets(st.integers(0, n - 1), max_size=4))):
        later = list(range(op + 1, n))
        readers = sorted(draw(st.sets(st.sampled_from(later), max_size=2))) if later else []
        reduces.append((op, draw(st.integers(1, 60)), readers))
    types = [draw(st.sampled_from(["Add", "Mul", "Conv2d"])) for _ in range(n)]
    return step_of(times, reads, reduces, types)
