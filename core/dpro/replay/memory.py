"""Peak memory of a rank in a replayed schedule (dPRO, MLSys 2022, section 4.3).

Knows segments and what they hold (:mod:`dpro.trace.memory`), and the names of the ops that memory passes add; not who
chose them. Live at an instant is what was there as the step began, less what was freed, plus all that was made and is
not freed yet; a segment's rise comes on top. What of a block that runs its forward pass again is saved for the backward
pass is gone at the end of the first one, and made again in the second.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpro.graph.graph import Graph
from dpro.replay.engine import Replay
from dpro.trace.memory import BEFORE, MEMORY, Block, Held, MemoryProfile

#: Before the block's name, in the name of the op that is its second forward pass.
RECOMPUTE = "recompute "
#: Before their number, in the name of the op that is all micro-batches but the last.
MICRO_BATCHES = "micro-batches: all but the last of "


def peak_bytes(graph: Graph, played: Replay) -> dict[int, int]:
    """Rank -> the most bytes allocated at once in the step, of ranks whose memory was measured.

    ``played`` must be of ``graph`` as it is now.
    """
    arrays = graph.arrays()
    row = {op: i for i, op in enumerate(arrays.ids.tolist())}
    names, ranks = graph.column("name"), graph.column("rank")
    again: dict[int, list[tuple[int, str]]] = {}
    parts: dict[int, int] = {}
    added = [i for i, name in enumerate(graph.name_table) if name.startswith((RECOMPUTE, MICRO_BATCHES))]
    for op in np.flatnonzero(np.isin(names, added) & graph.column("alive")).tolist():
        name, rank = graph.name_of(op), int(ranks[op])
        if name.startswith(MICRO_BATCHES):
            parts[rank] = int(name.removeprefix(MICRO_BATCHES))
        else:
            again.setdefault(rank, []).append((int(played.start[row[op]]), name.removeprefix(RECOMPUTE)))
    peaks = {}
    for rank, memory in graph.info.get(MEMORY, {}).items():
        starts = [int(played.start[row[op]]) if (op := ops[0] if ops else -1) >= 0 else -1 for ops in memory.host]
        profile = memory.profile
        if rank in parts:
            profile = of_micro_batch(profile, parts[rank])
        peaks[rank] = _peak(profile, starts, again.get(rank, []))
    return peaks


def of_micro_batch(profile: MemoryProfile, parts: int) -> MemoryProfile:
    """The step with the last of ``parts`` micro-batches: gradients are there already, all else is a share.

    What outlives the step is of the parameters' size, and so is what was there before it and what the optimizer does
    after the backward pass, the last segment; the rest is the batch's.
    """
    end = profile.segments
    first = min((unit.forward for unit in profile.units), default=end)
    grown = sum(held.nbytes for held in profile.held if held.freed == end and held.made >= first)
    held = []
    for one in profile.held:
        if one.made < first or one.freed < end:
            nbytes = one.nbytes if one.made < first else one.nbytes // parts
            held.append(replace(one, nbytes=nbytes))
    # what a gradient was made in is there before it is added to the one that there is already
    rise = [
        total if segment < first or segment == end - 1 else own + (total - own) // parts
        for segment, (total, own) in enumerate(zip(profile.rise, profile.kept, strict=True))
    ]
    held.append(Held(first - 1, end, grown))
    return replace(profile, rise=tuple(rise), held=tuple(held))


def _peak(profile: MemoryProfile, starts: list[int], again: list[tuple[int, str]]) -> int:
    """The peak where segments start at ``starts`` (-1: with the one before) and blocks run again at the times given."""
    blocks: list[tuple[int, Block]] = []
    for at, name in again:
        block = profile.block(name)
        assert block is not None, f"{name} is recomputed and is no block"
        blocks.append((at, block))
    # in order of time; at the same instant a second forward pass comes first, it has its place before what needs it
    order: list[tuple[int, int, int, int]] = []  # time, segment, block or -1, segment of the block's
    at = 0
    for segment, start in enumerate(starts):
        at = max(at, start)
        order.append((at, segment, len(blocks), segment))
    for k, (begin, block) in enumerate(blocks):
        order += [(begin, block.backward, k, s) for s in range(block.forward, block.after)]
    order.sort()
    place = {(k, segment): position for position, (_, _, k, segment) in enumerate(order)}
    plain = len(blocks)
    settled = [place[plain, b.first_backward] if profile.settles else len(order) for _, b in blocks]
    rise = np.array([profile.rise[segment] for _, _, _, segment in order], dtype=np.int64)
    change = np.zeros(len(order) + 2, dtype=np.int64)  # [p + 1]: at the begin of position p
    for held in profile.held:
        for made, freed in _lives(held, [block for _, block in blocks], place, plain, len(order), settled):
            change[made + 1] += held.nbytes if made != BEFORE else 0
            change[freed + 1] -= held.nbytes
    live = profile.base_bytes + np.cumsum(change)[: len(order)]
    return int((live + rise).max())


def _lives(
    held: Held,
    blocks: list[Block],
    place: dict[tuple[int, int], int],
    plain: int,
    end: int,
    settled: list[int],
) -> list[tuple[int, int]]:
    """From which position to which: made in the first, freed in the second (``end``: not in this step). ``settled``:
    where what each block's second pass made is gone."""
    made = BEFORE if held.made == BEFORE else place[plain, held.made]
    freed = place.get((plain, held.freed), end)
    for k, block in enumerate(blocks):
        if held.output == block.first - 1 and held.output >= 0 and freed < end:
            freed = max(freed, place[plain, block.first_backward])  # its input is kept until then
        if not block.forward <= held.made < block.after or not block.backward <= held.freed or freed == end:
            continue
        copy = place[k, held.made], min(freed, settled[k])
        if held.output == block.last:  # whoever takes it holds it until his backward pass is over
            return [(made, place[k, block.forward] - 1), copy]
        return [(made, place[plain, block.after - 1]), copy]
    return [(made, freed)]
