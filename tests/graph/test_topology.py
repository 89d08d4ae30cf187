"""The messages of an all-reduce: enough of them, on the right links, and no more bytes than the textbook's."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.topology import TREE_BYTES, Link, Messages, Network, TopologyError, messages

SLOW, FAST = Link(100, 1.0), Link(10, 0.1)
MIB = 1 << 20


def networks(workers: int) -> list[Network]:
    return [
        Network("ring", workers, SLOW),
        *(Network("two-level", workers, SLOW, FAST, g) for g in range(1, workers + 1) if workers % g == 0),
        Network("tree", workers, SLOW),
        *(Network("ps", workers, SLOW, servers=n) for n in (0, 1, workers, workers + 2)),
    ]


def held_ns(made: Messages) -> dict[str, int]:
    """By link, how long it is held."""
    return {name: int(made.duration[made.link == i].sum()) for i, name in enumerate(made.links)}


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6, 8, 12])
def test_everyone_gets_what_everyone_has(workers: int) -> None:
    for network in networks(workers):
        made = messages(network, 4 * MIB)
        graph = nx.DiGraph(made.edges.tolist())
        graph.add_nodes_from(range(len(made)))
        assert nx.is_directed_acyclic_graph(graph)
        assert set(made.arrivals[:, 0].tolist()) == set(range(workers))
        sinks = {message for message in graph if not graph.out_degree(message)}
        for worker in range(workers):
            first = made.arrivals[made.arrivals[:, 0] == worker, 1].tolist()
            reached = set(first).union(*(nx.descendants(graph, message) for message in first))
            assert sinks <= reached, (network, worker)


@settings(deadline=None, max_examples=60)
@given(workers=st.integers(2, 24), nbytes=st.integers(1, 50 * MIB))
def test_no_more_bytes_than_it_takes(workers: int, nbytes: int) -> None:
    """At 1 ns per byte a link is held as long as it carries bytes, to the rounding of each queue."""
    for network in networks(workers):
        held = held_ns(messages(network, nbytes))
        n = workers
        if network.topology == "ring":
            expected = dict.fromkeys((f"link/{i}>*" for i in range(n)), 2 * (n - 1) / n * nbytes)
        elif network.topology == "two-level":
            gpus, hosts = network.gpus_per_host, n // network.gpus_per_host
            expected = dict.fromkeys((f"link/{i}>*" for i in range(n)), 0.1 * 2 * (gpus - 1) / gpus * nbytes)
            expected.update({f"link/host{h}>*": 2 * (hosts - 1) / hosts * nbytes for h in range(hosts)})
        elif network.topology == "tree":
            assert sum(held.values()) == pytest.approx(2 * (n - 1) * nbytes, rel=1e-6, abs=400 * n)
            # Nobody sends it up more than once and down more than once: half of it each way in each tree, to two.
            assert max(held.values()) <= 2 * nbytes + 400
            continue
        elif not network.servers:
            expected = dict.fromkeys((f"link/{i}>*" for i in range(n)), 2 * (n - 1) / n * nbytes)
        elif network.servers <= n:
            ends = [name for j in range(network.servers) for name in (f"link/*>server{j}", f"link/server{j}>*")]
            expected = dict.fromkeys(ends, n * nbytes / network.servers)
        else:
            expected = dict.fromkeys((name for i in range(n) for name in (f"link/{i}>*", f"link/*>{i}")), float(nbytes))
        assert held == pytest.approx(expected, abs=n + 2)


@pytest.mark.parametrize("workers", [2, 3, 6, 7, 8, 31, 32, 1000])
def test_a_double_binary_tree(workers: int) -> None:
    made = messages(Network("tree", workers, SLOW), 1)
    up, down = (np.s_[at : at + workers - 1] for at in (0, workers - 1))
    other_up = np.s_[2 * (workers - 1) : 3 * (workers - 1)]
    assert made.link[up].tolist() == list(range(1, workers))  # worker 0 is the first one's root
    children = np.bincount(made.link[down], minlength=workers)
    other = np.bincount(made.link[3 * (workers - 1) :], minlength=workers)
    assert max(children.max(), other.max()) <= 2
    assert len(set(made.link[other_up].tolist())) == workers - 1
    assert np.count_nonzero((children > 0) & (other > 0)) <= 2  # who adds up in one tree is a leaf of the other
    # as deep as can be told by the longest chain: up and down each
    graph = nx.DiGraph(made.edges.tolist())
    graph.add_nodes_from(range(len(made)))
    assert nx.dag_longest_path_length(graph) + 1 <= 2 * (int(np.log2(workers)) + 1)


def test_a_tree_is_cut_into_pieces() -> None:
    assert len(messages(Network("tree", 4, SLOW), 10 * TREE_BYTES)) == 5 * 4 * 3
    many = messages(Network("tree", 1024, SLOW), 1 << 33)
    assert len(many) <= 60_000
    assert set(many.priority.tolist()) == set(range(len(many) // (4 * 1023)))


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_one_stands_for_all(workers: int) -> None:
    """What one worker (host) sends is what each of them sends."""
    for network in networks(workers):
        if network.topology == "tree":
            continue
        all_of_them, one = messages(network, 4 * MIB), messages(network, 4 * MIB, whole=False)
        held, share = held_ns(all_of_them), held_ns(one)
        assert set(share) <= set(held)
        assert {name: held[name] for name in share} == share
        assert set(share.values()) == set(held.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"topology": "star"}, "there are ring"),
        ({"workers": 1}, "1 workers"),
        ({"workers": 1 << 20}, "workers"),
        ({"topology": "two-level", "gpus_per_host": 3}, "not all hosts"),
        ({"topology": "two-level", "gpus_per_host": 0}, "not all hosts"),
        ({"servers": -1}, "servers"),
    ],
)
def test_no_such_network(words: dict[str, object], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        Network(**{"topology": "ring", "workers": 8, "link": SLOW, **words})  # type: ignore[arg-type]


@pytest.mark.parametrize("link", [(-1, 1), (1, -1), (float("nan"), 1), (1, float("inf"))])
def test_no_such_link(link: tuple[float, float]) -> None:
    with pytest.raises(TopologyError, match="a link of"):
        Link(*link)
