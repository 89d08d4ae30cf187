"""Dependencies that contradict each other: of every cycle the edge most against measured time is dropped."""

from __future__ import annotations


def break_cycles(times: list[int], edges: set[tuple[int, int]]) -> int:
    """Remove edges until no cycle is left, of each cycle the one most against measured time; how many.

    Ops are taken away in topological order (Kahn). What stays waits for something that stays, so following
    that back from any op ends in a cycle; once it is open, the taking away and then the walk go on from
    there. Every edge is looked at once, and every cycle that is found.

    ``times``: measured start by op.
    """
    before: list[set[int]] = [set() for _ in times]  # what an op still waits for
    after: list[list[int]] = [[] for _ in times]
    for src, dst in edges:
        before[dst].add(src)
        after[src].append(dst)

    def take(ready: list[int]) -> None:
        while ready:
            op = ready.pop()
            for dst in after[op]:
                if op in before[dst]:
                    before[dst].remove(op)
                    if not before[dst]:
                        ready.append(dst)

    removed = 0
    take([op for op, waits in enumerate(before) if not waits])
    for start in (op for op, waits in enumerate(before) if waits):
        path, place = [start], {start: 0}
        while path:
            op = next(iter(before[path[-1]]))
            if op not in place:
                place[op] = len(path)
                path.append(op)
                continue
            cycle = path[place[op] :]
            src, dst = min(
                zip([*cycle[1:], op], cycle, strict=True), key=lambda edge: (times[edge[1]] - times[edge[0]], edge)
            )
            edges.remove((src, dst))
            before[dst].remove(src)
            removed += 1
            if not before[dst]:
                take([dst])
            keep = place[dst] + 1
            while path and (len(path) > keep or not before[path[-1]]):
                del place[path.pop()]
    return removed
