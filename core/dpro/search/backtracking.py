"""DisCo's search for fused ops and fused AllReduces together (TPDS 2022, section 4.5, algorithm 1).

Knows fusions of a step (:mod:`dpro.passes.joint_fusion`) and what the replayer says of them; nothing of graphs that
ran. The queue starts with what frameworks do without a search (:mod:`dpro.search.fusion_defaults`), so that what is
returned is never slower than the best of that. Where the paper leaves it open: each of the n edits of a candidate takes
a random op, and a random legal partner of it; a neighbour of an AllReduce is the one whose gradient comes up next
before or after; ``unchanged`` counts evaluations, as printed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from dpro.graph.cluster import Cluster, Line
from dpro.passes.joint_fusion import Fusion, JointFusion
from dpro.replay.engine import replay
from dpro.search.fusion_defaults import DEFAULTS

#: Draws of a random op before an edit is given up: none may be left that can be fused.
_DRAWS = 8
#: A line goes through what an AllReduce of nothing and one of so much take.
_MUCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Settings:
    """``alpha``: what is this much slower than the best is still looked at. ``beta``: edits of a candidate at most.
    ``patience``: evaluations without a better one, after which it stops. ``queue``: states kept to go on from, at most.
    """

    alpha: float = 1.05
    beta: int = 10
    patience: int = 1000
    queue: int = 1000
    time_budget_s: float = 600.0
    evaluations: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """``defaults_ns``: by name, what the states that it began with take. ``progress``: (evaluations, best ns) at each
    better one. ``stopped``: why.
    """

    state: Fusion
    makespan_ns: int
    defaults_ns: dict[str, int]
    evaluations: int
    seconds: float
    progress: tuple[tuple[int, int], ...]
    stopped: str


class Evaluator:
    """Cost(H) of the paper: the replayed step of one worker, its AllReduces on one channel; remembered by structure."""

    def __init__(self, fusion: JointFusion) -> None:
        self.fusion = fusion
        self.evaluations = 0
        self._known: dict[bytes, int] = {}

    def makespan_ns(self, state: Fusion) -> int:
        self.evaluations += 1
        key = blake2b(state.key(), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = replay(self.fusion.lower(state)).makespan_ns
        return self._known[key]


def all_reduce_line(cluster: Cluster) -> Line:
    """What an AllReduce over all devices takes, as DisCo has it: linear in its bytes (section 4.3)."""
    devices = range(len(cluster))
    nothing_ns = cluster.all_reduce_ns(0, devices)
    return Line(nothing_ns, (cluster.all_reduce_ns(_MUCH_BYTES, devices) - nothing_ns) / _MUCH_BYTES)


def full_overlap_ns(fusion: JointFusion, state: Fusion) -> int:
    """What the step would take if nothing waited: the longer of all kernels and all AllReduces (section 6.2)."""
    graph = fusion.lower(state)
    resource, duration = graph.column("resource"), graph.column("duration")
    return max(int(duration[resource == r].sum()) for r in range(len(graph.resource_names)))


def search(fusion: JointFusion, settings: Settings = Settings()) -> Found:
    """The best fusion found; see the module text. The same for the same seed, but where the time budget ends it.

    Raises:
        ValueError: alpha below 1, beta below 1, or an empty queue.
    """
    if settings.alpha < 1 or settings.beta < 1 or settings.queue < 1:
        raise ValueError("alpha and beta are at least 1, and so is the queue")
    began = time.monotonic()
    rng = np.random.default_rng(settings.seed)
    cost = Evaluator(fusion)
    heap: list[tuple[int, int, Fusion]] = []
    defaults_ns: dict[str, int] = {}
    for number, (name, make) in enumerate(DEFAULTS.items()):
        state = make(fusion)
        defaults_ns[name] = cost.makespan_ns(state)
        heap.append((defaults_ns[name], number, state))
    heapq.heapify(heap)
    best_ns, pushed, best = heap[0]
    pushed = len(heap)
    progress = [(cost.evaluations, best_ns)]
    unchanged = 0
    stopped = "nothing left to try"
    edits = (join_ops, duplicate_op, join_reduces)
    while heap:
        if unchanged >= settings.patience:
            stopped = f"{settings.patience} evaluations without a better one"
            break
        if time.monotonic() - began > settings.time_budget_s:
            stopped = "time budget"
            break
        if settings.evaluations is not None and cost.evaluations >= settings.evaluations:
            stopped = "evaluations"
            break
        _, _, origin = heapq.heappop(heap)
        for edit in edits:
            state = origin.copy()
            for _ in range(int(rng.integers(settings.beta + 1))):
                edit(fusion, state, rng)
            taken = cost.makespan_ns(state)
            if taken < best_ns:
                best, best_ns, unchanged = state, taken, 0
                progress.append((cost.evaluations, best_ns))
            else:
                unchanged += 1
            if taken <= settings.alpha * best_ns:
                pushed += 1
                heapq.heappush(heap, (taken, pushed, state))
        if len(heap) > 2 * settings.queue:
            heap = heapq.nsmallest(settings.queue, heap)
    seconds = time.monotonic() - began
    return Found(best, best_ns, defaults_ns, cost.evaluations, seconds, tuple(progress), stopped)


def join_ops(fusion: JointFusion, state: Fusion, rng: np.random.Generator) -> bool:
    """Fuse a random op with a random predecessor; other readers of that wait (non-duplicate)."""
    return _with_predecessor(fusion, state, rng, lambda before, group: fusion.join(state, before, group))


def duplicate_op(fusion: JointFusion, state: Fusion, rng: np.random.Generator) -> bool:
    """Have a random op compute a random predecessor again; other readers of that do not wait (duplicate)."""
    return _with_predecessor(fusion, state, rng, lambda before, group: fusion.duplicate(state, before, group))


def join_reduces(fusion: JointFusion, state: Fusion, rng: np.random.Generator) -> bool:
    """Merge a random AllReduce with a neighbour."""
    line = fusion.reduces(state)
    if len(line) < 2:
        return False
    for _ in range(_DRAWS):
        first = int(rng.integers(len(line) - 1))
        if fusion.join(state, line[first], line[first + 1]):
            return True
    return False


def _with_predecessor(
    fusion: JointFusion, state: Fusion, rng: np.random.Generator, fuse: Callable[[int, int], bool]
) -> bool:
    for _ in range(_DRAWS):
        group = state.home[int(rng.integers(fusion.step.n))]
        near = [before for before in fusion.predecessors(state, group) if fusion.may_fuse(state, before, group)]
        if near and fuse(near[int(rng.integers(len(near)))], group):
            return True
    return False
