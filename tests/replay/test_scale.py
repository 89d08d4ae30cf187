"""One worker for all: equal to the replay of every worker's ops and every message."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.sync import fit_network
from dpro.graph.comm import expand_rings
from dpro.graph.graph import Bucket, Graph, OpKind
from dpro.graph.topology import Link, Network, TopologyError
from dpro.passes.tensor_fusion import TensorFusion
from dpro.replay import oracle, whatif
from dpro.replay.engine import replay
from dpro.replay.scale import Point, at_size, collective_ns, compute_only_ns, curve, whole_job
from dpro.replay.whatif import WhatIfError
from tests.search.graphs import ddp_graph

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
#: 1 ns per byte, 100 ns of latency; inside a host 10 times as fast
LINK, INNER = Link(100, 1.0), Link(10, 0.1)


def job(sizes: list[int], backward_ns: list[int], ranks: int = 2, gap_ns: int = 0, name: str = "all_reduce") -> Graph:
    """Forward of 1,000 ns; by bucket a backward and its all-reduce, on a channel; at last updates of 7 ns each."""
    graph = Graph()
    graph.ranks = ranks
    hosts = [graph.resource(f"rank{r}/cpu") for r in range(ranks)]
    graph.info.update(main_resource=dict(enumerate(hosts)), channel="group/default")
    last = [
        graph.add_op("forward", OpKind.FORWARD, resource=host, duration=1_000, rank=r) for r, host in enumerate(hosts)
    ]
    ends, buckets = [], []
    for t, (size, ns) in enumerate(zip(sizes, backward_ns, strict=True)):
        for r, host in enumerate(hosts):
            last[r] = graph.add_op(
                "backward", OpKind.OUT, resource=host, duration=ns, rank=r, tensor=t, after=[last[r]]
            )
            graph.out_op[r, t] = last[r]
        ends.append(
            graph.add_op(
                name, OpKind.COLLECTIVE, resource=graph.resource("group/default"), duration=5, nbytes=size, gap=gap_ns,
                after=last,
            )
        )  # fmt: skip
        buckets.append(Bucket((t,), size, (ends[-1],)))
    for t, end in enumerate(ends):
        for r, host in enumerate(hosts):
            last[r] = graph.add_op("update", OpKind.IN, resource=host, duration=7, rank=r, after=[last[r], end])
            graph.in_op[r, t] = last[r]
    graph.set_buckets(buckets)
    return graph


def network_of(workers: int, pick: int, servers: int, link: Link = LINK) -> Network:
    gpus = [g for g in range(1, workers + 1) if workers % g == 0]
    return [
        Network("ring", workers, link),
        Network("two-level", workers, link, INNER, gpus[servers % len(gpus)]),
        Network("tree", workers, link),
        Network("ps", workers, link, servers=servers),
    ][pick]


@settings(deadline=None, max_examples=120)
@given(
    sizes=st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=4),
    backward=st.lists(st.integers(0, 3_000_000), min_size=4, max_size=4),
    workers=st.integers(2, 9),
    pick=st.integers(0, 3),
    servers=st.integers(0, 12),
    link=st.builds(Link, st.floats(0, 1e5), st.floats(0.01, 10)),
    gap=st.sampled_from([0, 5_000]),
    ranks=st.integers(1, 2),
)
def test_one_worker_stands_for_all(
    sizes: list[int], backward: list[int], workers: int, pick: int, servers: int, link: Link, gap: int, ranks: int
) -> None:
    graph, network = job(sizes, backward[: len(sizes)], ranks, gap), network_of(workers, pick, servers, link)
    full, small = whole_job(graph, network), at_size(graph, network)
    played = replay(full)
    assert played.makespan_ns == replay(small).makespan_ns
    if workers <= 4:
        assert oracle.replay_arrays(full.arrays()).makespan_ns == played.makespan_ns
    assert (full.ranks, small.ranks) == (workers, 1)
    for made in (full, small):
        kind = made.column("kind")
        for bucket in made.buckets:
            assert kind[bucket.ops[-1]] == OpKind.COLLECTIVE
        sends = np.flatnonzero(made.column("alive") & (kind == OpKind.SEND)).tolist()
        assert set(sends) <= {op for bucket in made.buckets for op in bucket.ops}
    assert small.info["world_size"] == full.info["world_size"] == workers


@pytest.mark.parametrize("workers", [8, 16, 32])
@pytest.mark.parametrize("pick", range(4))
@pytest.mark.parametrize("servers", [0, 4])
def test_at_sizes_that_are_built_whole(workers: int, pick: int, servers: int) -> None:
    graph = job([4 * MIB, 25 * MIB, 25 * MIB, MIB], [9 * MIB, 20 * MIB, 30 * MIB, 2 * MIB])
    network = network_of(workers, pick, servers)
    assert replay(at_size(graph, network)).makespan_ns == replay(whole_job(graph, network)).makespan_ns


@pytest.mark.parametrize(
    ("network", "expected_ns"),
    [
        # 6 steps of 100 + 1,000
        (Network("ring", 4, LINK), 6_600),
        # in the host 10 + 200; 2 steps between hosts, two messages of 1,000 each on one link: 100 + 2,000, then, the
        # other ring's message having hidden the latency, 2,000; in the host again 210
        (Network("two-level", 4, LINK, INNER, 2), 210 + 4_100 + 210),
        # the whole ring lies in one host: 3 + 3 steps of 10 + 100
        (Network("two-level", 4, LINK, INNER, 4), 660),
        # workers' shares of 2,000 queue at each of 2 servers: 100 + 8,000, and back
        (Network("ps", 4, LINK, servers=2), 2 * 8_100),
        # to 8 servers shares of 500 queue at the worker; the last is pushed at 100 + 4,000 and pulled 100 + 500 later
        (Network("ps", 4, LINK, servers=8), 4_100 + 600),
        # 3 shares of 1,000 to the others' servers, and 3 sums to the others, over one link
        (Network("ps", 4, LINK), 2 * 3_100),
    ],
)  # fmt: skip
def test_an_all_reduce_by_hand(network: Network, expected_ns: int) -> None:
    assert collective_ns(network, 4_000) == expected_ns


def test_a_tree_by_hand() -> None:
    # Two workers, 4,000 bytes: halves of 2,000. In each tree the leaf sends up, the root down: 2 hops of 100 + 2,000,
    # and a worker's way out carries the one tree's up, then the other's down.
    assert collective_ns(Network("tree", 2, LINK), 4_000) == 2 * 2_100
    # Three: 1 goes by 2 to 0 and back, in the other tree 2 by 0 to 1: 4 hops each, never on one link at a time.
    assert collective_ns(Network("tree", 3, LINK), 4_000) == 4 * 2_100


def test_the_ring_is_the_one_that_is_known() -> None:
    """Of captured ranks ``expand_rings``, and the closed form that a plain what-if scales by."""
    sizes, backward = [3 * MIB, 5 * MIB], [200_000, 4_000_000]
    for workers in (2, 5, 8):
        small = replay(at_size(job(sizes, backward), Network("ring", workers, LINK))).makespan_ns
        steps = job(sizes, backward)
        expand_rings(steps, 1e9, 100, workers=workers)
        assert replay(steps).makespan_ns == pytest.approx(small, abs=4)
        one = job(sizes, backward)
        for bucket in one.buckets:
            one.set(bucket.ops[0], "duration", round(2 * (100 + bucket.nbytes / 2)))
        whatif.set_workers(one, workers, latency_ns=200)
        assert replay(one).makespan_ns == pytest.approx(small, abs=4)


def test_stragglers_are_waited_for() -> None:
    graph = job([1_000], [5_000], ranks=3)
    graph.set(graph.out_op[2, 0], "duration", 9_000)
    small = at_size(graph, Network("ring", 8, LINK))
    assert small.ranks == 2
    assert replay(small).makespan_ns == 1_000 + 9_000 + 14 * 100 + 1_750 + 7
    assert replay(whole_job(graph, Network("ring", 8, LINK))).makespan_ns == replay(small).makespan_ns


def test_broadcasts_stay_as_measured() -> None:
    graph = job([1_000], [5_000])
    graph.add_op("broadcast", OpKind.COLLECTIVE, duration=300, nbytes=9, after=graph.buckets[0].ops)
    network = Network("ring", 4, LINK)
    assert replay(at_size(graph, network)).makespan_ns == 6_000 + 6 * 350 + 300
    assert replay(whole_job(graph, network)).makespan_ns == 6_000 + 6 * 350 + 300


def test_a_curve() -> None:
    graph = job([8_000], [9_000])
    assert compute_only_ns(graph) == 1_000 + 9_000 + 7
    assert replay(graph).makespan_ns == 1_000 + 9_000 + 5 + 7
    found = curve(graph, [Network("ring", n, LINK) for n in (2, 4)])
    steps = [10_007 + 2 * 4_100, 10_007 + 6 * 2_100]
    assert found == [Point(n, ns, 10_007 / ns) for n, ns in zip((2, 4), steps, strict=True)]


@pytest.mark.parametrize("network", [Network("ring", 64, LINK), Network("two-level", 64, LINK, INNER, 8)])
def test_buckets_are_searched_at_that_size(network: Network) -> None:
    """A pass on the job of 64 workers, and the job of 64 workers of what the pass made: the same step."""
    graph = ddp_graph([MIB, 3 * MIB, 2 * MIB], 5 * MIB, [MIB, 2 * MIB, MIB], groups=((0,), (1,), (2,)))
    small = at_size(graph, network)
    assert "sync" not in small.info  # that of the captured network
    small.info["sync"] = fit_network(network, [tensor.nbytes for tensor in graph.tensors], graph.info["sync"])
    for grouping in (((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2))):
        there, here = TensorFusion().apply(small, grouping), TensorFusion().apply(graph, grouping)
        expected = replay(at_size(graph, network)).makespan_ns
        assert replay(small).makespan_ns == pytest.approx(expected, rel=1e-6)
        small.undo(there)
        graph.undo(here)
    assert replay(small).makespan_ns == replay(at_size(graph, network)).makespan_ns


def test_pushes_of_a_bucket_overlap_pulls_of_the_one_before() -> None:
    graph = job([4_000, 4_000], [0, 0])
    network = Network("ps", 4, LINK, servers=4)
    # both ready at 1,000: pushes of 4,000 end at 5,100 and 9,100, pulls at 9,200 and 13,200
    assert replay(at_size(graph, network)).makespan_ns == 13_200 + 7


def test_a_thousand_workers_take_a_second() -> None:
    layers = 20
    graph = job([25 * MIB + t for t in range(layers)], [MIB] * layers)
    for network in (
        Network("ring", 1024, LINK), Network("two-level", 1024, LINK, INNER, 8), Network("tree", 1024, LINK),
        Network("ps", 1024, LINK, servers=16), Network("ps", 1024, LINK),
    ):  # fmt: skip
        begin = time.perf_counter()
        replay(at_size(graph, network))
        assert time.perf_counter() - begin < 3.0, network  # 1 s where nothing else runs: benchmarks/scale.py


def test_the_benchmark_prints_a_list() -> None:
    command = [sys.executable, "-m", "benchmarks.scale", "--json", "--workers", "8", "1024"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {row["workers"] for row in rows} == {8, 1024}
    for row in rows:
        assert row["seconds"] < 3.0
        if row["workers"] == 8:
            assert row["makespan_ms"] == row["full_makespan_ms"] > 0
            assert row["error_pct"] == 0
        else:
            assert row["full_makespan_ms"] is None


def test_what_is_refused() -> None:
    ring = Network("ring", 4, LINK)
    with pytest.raises(WhatIfError, match="'all_gather'"):
        at_size(job([1_000], [10], name="all_gather"), ring)
    with pytest.raises(WhatIfError, match="no all-reduce"):
        at_size(job([1_000], [10], name="broadcast"), ring)
    with pytest.raises(WhatIfError, match="unknown size"):
        at_size(job([-1], [10]), ring)
    with pytest.raises(WhatIfError, match="no all-reduce"):
        at_size(Graph(), ring)
    pieces = job([1_000], [10])
    pieces.set_buckets([Bucket((0,), 1_000, (0, pieces.buckets[0].ops[0]))])
    with pytest.raises(WhatIfError, match="several ops"):
        at_size(pieces, ring)
    with pytest.raises(WhatIfError, match="the capture has 5"):
        whole_job(job([1_000], [10], ranks=5), ring)
    long = job([1 << 40] * 20, [10] * 20)
    for network in (Network("ps", 4, Link(0, 1e5), servers=1), Network("ring", 4, Link(0, 1e5))):
        with pytest.raises(WhatIfError, match="years"):
            at_size(long, network)
    with pytest.raises(TopologyError, match="years"):
        at_size(job([1 << 50], [10]), Network("ring", 4, Link(0, 1e5)))


def test_the_graph_stays_as_it_is() -> None:
    graph = job([1_000], [10])
    before = replay(graph).makespan_ns, len(graph), graph.mark(), dict(graph.info)
    compute_only_ns(graph)
    at_size(graph, Network("ps", 8, LINK))
    whole_job(graph, Network("tree", 8, LINK))
    assert (replay(graph).makespan_ns, len(graph), graph.mark(), dict(graph.info)) == before
    assert np.count_nonzero(graph.column("alive")) == len(graph)
