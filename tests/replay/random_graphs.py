"""Random graphs that provoke ties: small numbers, zeros, few resources, few priorities."""

from __future__ import annotations

import random
from itertools import pairwise

from dpro.graph.graph import NO_RESOURCE, Graph, OpKind


def random_graph(random: random.Random) -> Graph:
    """A DAG of at most 60 ops. Edges follow a random order that is not the order of the rows."""
    graph = Graph()
    ops = random.choice([random.randint(1, 12), random.randint(13, 60)])
    resources = random.randint(1, 5)
    longest = random.choice([1, 1, 2, 3, 1000])
    zero_share = random.choice([0.0, 0.2, 0.4, 0.8])
    gap_share = random.choice([0.0, 0.2, 0.6])
    priorities = random.choice([1, 1, 2, 4])
    free_share = random.choice([0.0, 0.1, 0.4])

    def duration() -> int:
        return 0 if random.random() < zero_share else random.randint(1, longest)

    for r in range(resources):
        graph.resource(f"r{r}")
    for op in range(ops):
        graph.add_op(
            f"op{op}",
            random.choice(list(OpKind)),
            resource=NO_RESOURCE if random.random() < free_share else random.randrange(resources),
            duration=duration(),
            gap=duration() if random.random() < gap_share else 0,
            priority=random.randrange(priorities),
        )
    order = list(range(ops))
    if random.random() < 0.5:
        random.shuffle(order)
    density = random.choice([0.5, 1.0, 2.5])
    for _ in range(int(density * ops)):
        a, b = sorted(random.sample(range(ops), 2)) if ops > 1 else (0, 0)
        if a != b:
            graph.add_edge(order[a], order[b])
    for thread in random.sample(range(resources), resources // 2):  # host threads: their ops in a chain
        chained = graph.column("resource") == thread
        chain = [op for op in order if chained[op]]
        for before, after in pairwise(chain):
            graph.add_edge(before, after)
    if random.random() < 0.3:
        graph.remove_ops(random.sample(range(ops), ops // 4))
    return graph
