"""A step of two ranks small enough to replay on paper; whole ms, so that answers are round numbers.

    rank 0:  gap 1, linear 10, LinearBackward 20 ┐
    rank 1:  gap 1, linear 14, LinearBackward 20 ┴ all_reduce 8, then Adam 2 on each

Rank 0 arrives at 31, rank 1 at 35; the transfer runs 35..43, Adam 43..45.
"""

from __future__ import annotations

from dpro.graph.graph import Graph, OpKind

MS = 1_000_000
MAKESPAN_MS = 45


def two_ranks() -> Graph:
    graph = Graph()
    graph.ranks = 2
    arrived = []
    for rank, forward_ms in enumerate((10, 14)):
        thread = graph.resource(f"rank{rank}/cpu/1")
        forward = graph.add_op(
            "linear", OpKind.FORWARD, resource=thread, duration=forward_ms * MS, gap=MS, priority=rank, rank=rank
        )
        arrived.append(
            graph.add_op(
                "LinearBackward", OpKind.BACKWARD, resource=thread, duration=20 * MS, rank=rank, after=[forward]
            )
        )
    reduce = graph.add_op(
        "all_reduce",
        OpKind.COLLECTIVE,
        resource=graph.resource("group/default"),
        duration=8 * MS,
        nbytes=1_000_000,
        after=arrived,
    )
    for rank in range(2):
        graph.add_op(
            "Adam",
            OpKind.UPDATE,
            resource=graph.resource(f"rank{rank}/cpu/1"),
            duration=2 * MS,
            rank=rank,
            after=[reduce],
        )
    return graph
