"""Two ranks, a chain of layers, forward and back again: every byte and every millisecond by hand."""

from __future__ import annotations

from dpro.graph.graph import Graph, OpKind
from dpro.graph.memory import RankMemory
from dpro.trace.memory import MEMORY, MICRO, Held, MemoryProfile, Unit

MS = 1_000_000
BASE = 1000


def chain_profile(
    saved: list[int], outputs: list[int], refused: dict[int, str] | None = None, gradient: int = 0
) -> MemoryProfile:
    """Layers ``net.0``, ``net.1``, …: layer k saves ``saved[k]`` bytes, and hands on ``outputs[k]``, which the layer
    after it saves. In its forward and backward pass it takes 1 byte more, which it gives back. Each backward pass
    leaves ``gradient`` bytes.

    Segments: 0, then one per forward pass and one after it, then one per backward pass (the last layer's first), then
    what comes after.
    """
    n = len(saved)
    end = 3 * n + 2
    held, rise, units = [], [0] * end, []
    kept = [0] * end
    for k in range(n):
        forward, backward = 1 + 2 * k, 2 * n + (n - k)
        units.append(Unit(f"net.{k}", forward, forward + 1, backward, k > 0, (refused or {}).get(k, "")))
        held += [Held(forward, backward, saved[k]), Held(backward, end, gradient)]
        # the consumer lets it go: the layer after it, or the loss' backward pass, which is the segment before this one
        held.append(Held(forward, backward - 1, outputs[k], k))
        rise[forward] = saved[k] + outputs[k] + 1
        rise[backward], kept[backward] = gradient + 1, gradient
    return MemoryProfile(BASE, tuple(rise), tuple(kept), tuple(h for h in held if h.nbytes), tuple(units))


def chain_graph(
    profile: MemoryProfile,
    forward_ms: list[float],
    backward_ms: list[float],
    ranks: int = 1,
    micro: dict[int, int] | None = None,
) -> Graph:
    """A host op for each pass of each layer, and 1 ms of update."""
    graph = Graph()
    graph.ranks = ranks
    graph.info.update({MEMORY: {}, MICRO: {}})
    for rank in range(ranks):
        host = graph.resource(f"rank{rank}/cpu/main")
        ops: list[list[int]] = [[] for _ in range(profile.segments)]
        last: list[int] = []

        def add(name: str, kind: OpKind, ms: float, segment: int) -> None:
            nonlocal last
            last = [graph.add_op(name, kind, resource=host, duration=round(ms * MS), rank=rank, after=last)]  # noqa: B023
            ops[segment] += last  # noqa: B023

        for unit, ms in zip(profile.units, forward_ms, strict=True):
            add(unit.name, OpKind.FORWARD, ms, unit.forward)
        for unit, ms in reversed([*zip(profile.units, backward_ms, strict=True)]):
            add(f"{unit.name} back", OpKind.BACKWARD, ms, unit.backward)
        add("update", OpKind.UPDATE, 1, profile.segments - 1)
        graph.info[MEMORY][rank] = RankMemory(profile, tuple(map(tuple, ops)), tuple(() for _ in ops))
        if micro:
            graph.info[MICRO][rank] = micro
    return graph
