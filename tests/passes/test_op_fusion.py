"""Op fusion against steps worked out by hand, and its undo."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.graph.graph import Graph, OpKind, TensorInfo
from dpro.passes.op_fusion import OpFusion, fusion_pays
from dpro.replay.engine import replay
from dpro.trace.regions import REGIONS, LayerOps, Region, RegionTime, dump, load, named
from tests.passes.regions import MS, keras_graph, region

#: 4 MB: 4.01 ms on the channel. Forward 3 ms, backward a 2, b 2, c 1.
FORWARD, BACKWARD, BYTES = {"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 1}, {"a": 1_000_000, "c": 4_000_000}


def step_ms(graph: Graph) -> float:
    return replay(graph).makespan_ns / MS


def graph_with(*regions: Region, ranks: int = 1) -> Graph:
    return keras_graph(FORWARD, BACKWARD, BYTES, list(regions), ranks=ranks)


def state(graph: Graph) -> tuple[object, ...]:
    columns = [graph.column(key).tolist() for key in ("duration", "gap", "alive", "resource")]
    return columns, sorted(map(tuple, graph.edges().tolist())), graph.buckets


def test_the_step_without() -> None:
    # compute 3 + 5 = 8; c's gradient is there at 4 and reduced at 8.01, a's there at 8 and reduced at 9.02
    assert step_ms(graph_with()) == pytest.approx(9.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_work_that_is_saved_moves_everything_behind_it(ranks: int) -> None:
    # b takes half: forward 0.5 and backward 1 less, 6.5; c's gradient at 3.5, reduced at 7.51; a's reduced at 8.52
    half = region("b", 0.5, 0.5)
    graph = graph_with(half, ranks=ranks)
    before = state(graph)
    fusion = OpFusion()
    assert fusion.legal(graph, (half,))
    assert fusion.cost(graph, (half,)) == pytest.approx(-1.5 * MS * ranks)
    mark = fusion.apply(graph, (half,))
    assert step_ms(graph) == pytest.approx(8.52)
    graph.undo(mark)
    assert state(graph) == before


def test_gradients_of_a_region_are_there_at_its_end() -> None:
    # all in one, no faster: c's gradient is not there at 4 but at 8, reduced at 12.01, a's at 13.02: nothing overlaps
    whole = region("a,b,c", 1, 1, tensors="a/kernel,c/kernel")
    graph = graph_with(whole)
    OpFusion().apply(graph, (whole,))
    assert step_ms(graph) == pytest.approx(13.02)


def test_a_region_saves_more_than_its_gradients_lose() -> None:
    # b and c: backward 3 to 1.5; forward 3: done at 4.5, c's gradient then, reduced at 8.51; a's there at 6.5: 9.52
    pair = region("b,c", 1, 0.5, tensors="c/kernel")
    graph = graph_with(pair)
    OpFusion().apply(graph, (pair,))
    assert step_ms(graph) == pytest.approx(9.52)
    # and where there is nothing to transfer it pays
    silent = keras_graph(FORWARD, BACKWARD, {"a": 1, "c": 1}, [pair])
    without = step_ms(silent)
    OpFusion().apply(silent, (pair,))
    assert step_ms(silent) == pytest.approx(without - 1.5)


def test_a_region_runs_when_the_last_of_its_inputs_is_there() -> None:
    # a's sum needs what another thread makes until 5 ms: all of a runs after it, 0.5 instead of 1 ms
    half = region("a", 0.5, 1)
    graph = Graph()
    graph.ranks = 1
    host, other = graph.resource("main"), graph.resource("other")
    first = graph.add_op("net/a/mul", 0, resource=host, duration=600_000, rank=0)
    late = graph.add_op("net/x/conv", 0, resource=other, duration=5 * MS, rank=0)
    second = graph.add_op("net/a/add", 0, resource=host, duration=400_000, rank=0, after=[first, late])
    user = graph.add_op("net/b/conv", 0, resource=other, duration=MS, rank=0, after=[first, late])
    graph.add_op("gradient_tape/net/a/mul", 1, resource=host, duration=0, rank=0, after=[second, user])
    graph.info["regions"] = [half]
    graph.out_op[0, 0] = user
    assert replay(graph).makespan_ns == 6 * MS
    OpFusion().apply(graph, (half,))
    times = replay(graph)
    # what takes a part of the region takes all of it
    assert times.start[second] == 5 * MS
    assert times.start[user] == pytest.approx(5.5 * MS)
    assert times.makespan_ns == pytest.approx(6.5 * MS)


def test_candidates_are_kinds_and_leave_out_what_cannot_pay() -> None:
    slower, norm, other = region("a", 1.1, 1), region("b", 0.5, 0.5, "norm"), region("c", 0.9, 0.9, "norm")
    graph = graph_with(slower, norm, other, region("nowhere", 0.1, 0.1))
    assert [*OpFusion().candidates(graph)] == [(norm, other)]


def test_a_shorter_forward_pass_may_pay_for_a_longer_backward_pass() -> None:
    """c's gradient (4.01 ms) is ready at 3 ms and done at 7.01, a's, ready at 3.2, at 7.02. With a compiled to half
    forward, and three times what it takes backward, c's is ready at 2.5, a's at 3.1: 6.52."""
    early = region("a", 0.5, 3)
    graph = keras_graph({"a": 1, "c": 1}, {"a": 0.2, "c": 1}, {"a": 1, "c": 4_000_000}, [early])
    assert step_ms(graph) == pytest.approx(7.02)
    assert [*OpFusion().candidates(graph)] == [(early,)]
    OpFusion().apply(graph, (early,))
    assert step_ms(graph) == pytest.approx(6.52)


def test_runs_that_share_a_layer_are_not_both_fused() -> None:
    one, both = region("b", 0.5, 0.5), region("b,c", 0.5, 0.5)
    graph = graph_with(one, both)
    assert not OpFusion().legal(graph, (one, both))
    assert not OpFusion().legal(graph, ())


@pytest.mark.parametrize("first", [1.0, 3.0])
@pytest.mark.parametrize("second", [1.0, 2.0])
@pytest.mark.parametrize("sync", [0.0, 0.5, 1.5, 4.0])
@pytest.mark.parametrize("fused", [0.5, 2.0, 3.5, 6.0])
def test_theorem_1_is_the_recurrence(first: float, second: float, fused: float, sync: float) -> None:
    # ends of both tensors' synchronisation, with one of the second op that takes 1
    apart = max(first + second, first + sync) + 1.0
    together = max(fused, fused + sync) + 1.0
    pays = fusion_pays(first_ns=first, second_ns=second, fused_ns=fused, first_sync_ns=sync)
    assert pays == (together < apart)
    if sync <= second:  # the paper's form
        assert pays == (sync < first + second - fused)


def test_ops_are_known_by_their_layers() -> None:
    find = LayerOps(["norm", "block", "block/norm"])
    assert find("net/norm/mul") == ("norm", False)
    assert find("gradient_tape/net/norm/mul/Mul_1") == ("norm", True)
    assert find("net/block/norm/mul") == ("block", False)
    for other in ("net/norm_1/mul", "norm/mul", "net/norm", "net/x/norm/mul", "SGD/update/norm"):
        assert find(other) is None


def test_times_survive_a_file_and_nonsense_does_not() -> None:
    pair = [region("a", 0.5, 1, "k"), region("b,c", 0.5, 1, "k", "b/kernel")]
    assert load(dump(pair)) == pair
    good = dump(pair)
    for broken in (
        None, [], {"times": 1}, {**good, "times": {"k": [1, 2, 3]}}, {**good, "times": {"k": [1, 2, 3, -1]}},
        {**good, "times": {"k": [1, 2, 3, "4"]}}, {**good, "regions": 3},
        {**good, "regions": [1, {"layers": [], "tensors": [], "kind": "k"}]},
        {**good, "regions": [{"layers": "a", "tensors": [], "kind": "k"}]},
    ):  # fmt: skip
        assert load(broken) == []
    assert RegionTime(1, 2, 3, 4).plain_ns == 3
    assert np.all([r.time.fused_ns == 1.5 * MS for r in load(good)])


def test_on_a_thread_in_order_gradients_between_come_after_the_region() -> None:
    # as under torch: of a's two nodes backward (1 and 2 ms) each is followed by a gradient that is there (0.1 ms each)
    region_a = region("a", 1, 0.5, tensors="a/weight,a/bias")
    graph = Graph()
    graph.ranks = 1
    host = graph.resource("main")
    graph.tensors = [TensorInfo("a/bias", 4, "float32", 0), TensorInfo("a/weight", 4, "float32", 1)]
    graph.info[REGIONS] = [region_a]
    last = graph.add_op(named("a", "aten::linear", False), OpKind.FORWARD, resource=host, duration=MS, rank=0)
    nodes = []
    for tensor, took in enumerate((1, 2)):
        nodes.append(named("a", f"node {tensor}", True))
        more = {"resource": host, "rank": 0}
        last = graph.add_op(nodes[-1], OpKind.BACKWARD, duration=took * MS, after=[last], **more)
        last = graph.add_op("ready", OpKind.OUT, duration=MS // 10, tensor=tensor, after=[last], **more)
        graph.out_op[0, tensor] = last
    before = state(graph)
    fusion = OpFusion()
    assert fusion.legal(graph, (region_a,))
    mark = fusion.apply(graph, (region_a,))
    # 1 forward; half of 3, and only then the first gradient
    played = replay(graph)
    assert played.makespan_ns / MS == pytest.approx(1 + 1.5 + 0.2)
    arrays = graph.arrays()
    end = {int(op): int(ns) for op, ns in zip(arrays.ids, played.end, strict=True)}
    assert end[graph.out_op[0, 0]] / MS == pytest.approx(2.6)
    graph.undo(mark)
    assert state(graph) == before
