"""DDP's ``gradient_as_bucket_view``: gradients live in their bucket, so none is copied out of it.

Knows the copy by its name in the trace. Copies *into* the bucket stay: with ``zero_grad(set_to_none=True)``,
the default, autograd makes a fresh gradient in every step and DDP moves it into the bucket's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dpro.adapter import Knob
from dpro.graph.graph import Graph
from dpro.graph.threads import COPY_BACK


class BucketView:
    """The only candidate is ``True``: leave the copies out."""

    name = "bucket_view"
    knobs = frozenset({Knob.BUCKET_VIEW})

    def candidates(self, graph: Graph) -> Iterator[bool]:
        if len(_copies(graph)):
            yield True

    def legal(self, graph: Graph, candidate: bool) -> bool:
        """Whether there are copies to leave out (there are none where gradients are views already)."""
        return candidate is True and len(_copies(graph)) > 0

    def apply(self, graph: Graph, candidate: bool) -> int:
        """Returns the mark that undoes it."""
        mark = graph.mark()
        ops = _copies(graph)
        graph.set_many(ops, "duration", np.zeros(len(ops), np.int64))
        return mark

    def cost(self, graph: Graph, candidate: bool) -> float:
        """What it saves on all ranks together, ns, negative."""
        return -float(graph.column("duration")[_copies(graph)].sum())


def _copies(graph: Graph) -> npt.NDArray[np.int64]:
    ops = np.unique(np.fromiter(graph.in_op.values(), np.int64))
    copies: npt.NDArray[np.int64] = ops[graph.column("name")[ops] == graph.name(COPY_BACK)]
    return copies
