"""Re-computation: a block keeps only its input, and runs its forward pass again before its backward pass.

Knows the blocks that were measured (``graph.info["memory"]``) and their ops; what it is worth in bytes is for
:mod:`dpro.replay.memory`. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); dPRO, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpro.adapter import Knob
from dpro.graph.graph import Graph, OpKind
from dpro.graph.memory import RankMemory
from dpro.replay.memory import MICRO_BATCHES, RECOMPUTE
from dpro.trace.memory import MEMORY, Block, Held, MemoryProfile, block_name

#: Names of blocks, as in ``plan.recompute``.
Blocks = tuple[str, ...]
#: Into how many runs a chain of units is cut, at most.
_MOST_RUNS = 12


class Recompute:
    """A candidate is the :data:`Blocks` that run twice."""

    name = "recompute"
    knobs = frozenset({Knob.RECOMPUTE})

    def candidates(self, graph: Graph) -> Iterator[Blocks]:
        """Single blocks, of which any may go together as long as they have no unit in common; most bytes first."""
        memory = next(iter(graph.info.get(MEMORY, {}).values()), None)
        if memory is None:
            return
        names = dict.fromkeys(name for family in families(memory.profile) for name in family)
        found = [(name,) for name in names if self.legal(graph, (name,))]
        saved = {one: saved_bytes(memory.profile, one[0]) for one in found}
        yield from sorted(found, key=lambda one: (-saved[one], one))

    def legal(self, graph: Graph, candidate: Blocks) -> bool:
        """Whether every rank has these blocks, with a forward and a backward pass, and no unit is in two of them."""
        memories: dict[int, RankMemory] = graph.info.get(MEMORY, {})
        if not candidate or not memories:
            return False
        for memory in memories.values():
            taken: set[int] = set()
            for name in candidate:
                block = memory.profile.block(name)
                if block is None or memory.first(block.backward) < 0:
                    return False
                units = set(range(block.first, block.last + 1))
                if units & taken:
                    return False
                taken |= units
        return True

    def apply(self, graph: Graph, candidate: Blocks) -> int:
        """Put the second forward passes in; returns the mark that undoes it."""
        mark = graph.mark()
        for rank, memory in graph.info[MEMORY].items():
            for name in candidate:
                block = memory.profile.block(name)
                assert block is not None
                self._run_again(graph, rank, memory, block)
        return mark

    def cost(self, graph: Graph, candidate: Blocks) -> float:
        """What it adds to the work of all ranks, ns."""
        total = 0
        for memory in graph.info[MEMORY].values():
            for name in candidate:
                block = memory.profile.block(name)
                ops = _forward(memory.device, block) or _forward(memory.host, block)
                total += _work_ns(graph, ops)
        return float(total)

    def _run_again(self, graph: Graph, rank: int, memory: RankMemory, block: Block) -> None:
        """On the thread that runs the block's backward pass, and on each stream."""
        pairs = graph.edges()
        then = memory.first(block.backward)
        before = pairs[pairs[:, 1] == then, 0].tolist()
        host = graph.add_op(
            RECOMPUTE + block.name, OpKind.FORWARD, resource=int(graph.column("resource")[then]),
            duration=_work_ns(graph, _forward(memory.host, block)), rank=rank, after=before,
        )  # fmt: skip
        graph.add_edge(host, then)
        if (others := _micro_batches(graph, rank)) is not None:  # each of those before runs it again as well
            op, count = others
            again_ns = (count - 1) * int(graph.column("duration")[host])
            graph.set(op, "duration", int(graph.column("duration")[op]) + again_ns)
        streams: dict[int, list[int]] = {}
        for op in _forward(memory.device, block):
            streams.setdefault(int(graph.column("resource")[op]), []).append(op)
        for stream, ops in streams.items():
            later = [op for part in memory.device[block.backward :] for op in part]
            follows = next((op for op in later if graph.column("resource")[op] == stream), -1)
            if follows < 0:
                continue
            ahead = [p for p in pairs[pairs[:, 1] == follows, 0].tolist() if graph.column("resource")[p] == stream]
            duration, gap = int(graph.column("duration")[ops].sum()), int(graph.column("gap")[ops[0]])
            kernels = graph.add_op(
                f"kernels of {block.name} again", OpKind.FORWARD, resource=stream, duration=duration, gap=gap,
                rank=rank, after=[*before, *ahead],
            )  # fmt: skip
            graph.add_edge(kernels, follows)


def _micro_batches(graph: Graph, rank: int) -> tuple[int, int] | None:
    """The op that stands for a rank's other micro-batches, and how many there are with the last one."""
    named = [k for k, name in enumerate(graph.name_table) if name.startswith(MICRO_BATCHES)]
    there = graph.column("alive") & (graph.column("rank") == rank) & np.isin(graph.column("name"), named)
    found = np.flatnonzero(there).tolist()
    return (found[0], int(graph.name_of(found[0]).removeprefix(MICRO_BATCHES))) if found else None


def families(profile: MemoryProfile) -> list[list[str]]:
    """Ways to cut the model into blocks: unit by unit, and each chain of units into 1, 2, … runs of equal bytes.

    Blocks of one way have no unit in common, so that any of them go together.
    """
    units = profile.units
    found = [[unit.name for unit in units]]
    for runs in range(1, _MOST_RUNS + 1):
        names = []
        for chain in _chains(profile):
            held = np.array([_made_bytes(profile, k) for k in chain], dtype=np.float64)
            share = np.minimum((np.cumsum(held) - held / 2) * runs / max(1.0, held.sum()), runs - 1).astype(int)
            for run in range(runs):
                inside = [k for k, at in zip(chain, share, strict=True) if at == run]
                if inside:
                    names.append(block_name(units, inside[0], inside[-1]))
        found.append(names)
    useful = [[name for name in names if saved_bytes(profile, name) > 0] for names in found]
    return [names for k, names in enumerate(useful) if names and names not in useful[:k]]


def saved_bytes(profile: MemoryProfile, name: str) -> int:
    """What the block would not hold between its two passes: an estimate, to rank blocks."""
    block = profile.block(name)
    if block is None:
        return 0
    return sum(held.nbytes for held in profile.held if _is_saved(held, block, profile.segments))


def _is_saved(held: Held, block: Block, end: int) -> bool:
    inside = block.forward <= held.made < block.after and block.backward <= held.freed < end
    return inside and held.output != block.last


def _chains(profile: MemoryProfile) -> list[list[int]]:
    """Units that follow each other and may run twice."""
    chains: list[list[int]] = []
    for k, unit in enumerate(profile.units):
        if unit.refused:
            chains.append([])
        elif unit.follows and chains and chains[-1]:
            chains[-1].append(k)
        else:
            chains.append([k])
    return [chain for chain in chains if chain]


def _made_bytes(profile: MemoryProfile, unit: int) -> int:
    one = profile.units[unit]
    return sum(h.nbytes for h in profile.held if one.forward <= h.made < one.after and h.freed >= one.backward)


def _forward(parts: tuple[tuple[int, ...], ...], block: Block | None) -> list[int]:
    return [op for ops in parts[block.forward : block.after] for op in ops] if block is not None else []


def _work_ns(graph: Graph, ops: list[int]) -> int:
    return int(graph.column("duration")[ops].sum() + graph.column("gap")[ops].sum()) if ops else 0
