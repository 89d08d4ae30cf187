"""The graph against a model of dicts and sets, and its undo against the graph it was."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.graph import NO_RESOURCE, Arrays, Bucket, Graph, OpKind, TensorInfo

COLUMNS = ("kind", "resource", "duration", "gap", "priority", "tensor", "rank", "nbytes")


class Model:
    """What a graph means, with no journal and no arrays: ops by id, edges as a list."""

    def __init__(self) -> None:
        self.ops: dict[int, dict[str, int]] = {}
        self.names: dict[int, str] = {}
        self.edges: list[tuple[int, int]] = []

    def assert_equal(self, graph: Graph) -> None:
        assert len(graph) == len(self.ops)
        assert graph.edges().tolist() == [list(edge) for edge in self.edges]
        arrays = graph.arrays()
        assert arrays.ids.tolist() == sorted(self.ops)
        row = {op: i for i, op in enumerate(sorted(self.ops))}
        for op, i in row.items():
            assert graph.name_of(op) == self.names[op]
            assert {key: int(graph.column(key)[op]) for key in COLUMNS} == self.ops[op]
            for key in ("resource", "duration", "gap", "priority"):
                assert getattr(arrays, key)[i] == self.ops[op][key]
            after = arrays.indices[arrays.indptr[i] : arrays.indptr[i + 1]].tolist()
            assert after == [row[dst] for src, dst in self.edges if src == op]
        assert len(arrays.indptr) == len(row) + 1
        assert arrays.indptr[-1] == len(arrays.indices) == len(self.edges)


def edit(graph: Graph, model: Model, rng: random.Random) -> None:
    """One random edit, to both."""
    alive = sorted(model.ops)
    what = rng.choice(["op", "op", "op", "edge", "edge", "set", "scale", "remove", "buckets", "tensors"])
    if what == "op" or not alive:
        values = {key: rng.randrange(5) for key in COLUMNS}
        values["resource"] = rng.choice([NO_RESOURCE, graph.resource("a"), graph.resource("b")])
        kind, name = OpKind(values["kind"]), rng.choice("xyz")
        after = rng.sample(alive, min(len(alive), rng.randrange(3)))
        rest = {key: value for key, value in values.items() if key != "kind"}
        op = graph.add_op(name, kind, after=after, **rest)
        assert op not in model.ops
        model.ops[op], model.names[op] = values, name
        model.edges += [(before, op) for before in after]
    elif what == "edge":
        edge = rng.choice(alive), rng.choice(alive)
        graph.add_edge(*edge)
        model.edges.append(edge)
    elif what == "set":
        op, key, value = rng.choice(alive), rng.choice(COLUMNS[1:]), rng.randrange(9)
        if key == "resource":
            value = NO_RESOURCE
        graph.set(op, key, value)
        model.ops[op][key] = value
    elif what == "scale":
        ops = np.array(rng.sample(alive, rng.randint(1, len(alive))))
        graph.scale(ops, 3.0)
        for op in ops.tolist():
            model.ops[op]["duration"] *= 3
        ops[:] = 0  # the caller may do with his array what he likes
    elif what == "remove":
        gone = rng.sample(alive, rng.randint(1, min(4, len(alive))))
        graph.remove_ops(gone)
        for op in gone:
            del model.ops[op], model.names[op]
        model.edges = [(a, b) for a, b in model.edges if a not in gone and b not in gone]
    elif what == "tensors":
        graph.set_tensors([TensorInfo("t", n) for n in range(rng.randrange(4))])
    else:
        graph.set_buckets([Bucket((n,), n) for n in range(rng.randrange(4))])


def state(graph: Graph) -> tuple[object, ...]:
    """Everything an undo must bring back, by value."""
    arrays = graph.arrays()
    values = [getattr(arrays, f.name).tolist() for f in fields(Arrays) if f.name != "resources"]
    columns = {key: graph.column(key)[graph.column("alive")].tolist() for key in COLUMNS}
    names = [graph.name_of(op) for op in arrays.ids.tolist()]
    return values, columns, names, graph.edges().tolist(), list(graph.buckets), list(graph.tensors)


@settings(max_examples=80, deadline=None)
@given(rng=st.randoms(use_true_random=False), edits=st.integers(0, 40))
def test_any_edits_give_what_the_model_says(rng: random.Random, edits: int) -> None:
    graph, model = Graph(), Model()
    for _ in range(edits):
        edit(graph, model, rng)
    model.assert_equal(graph)


@settings(max_examples=80, deadline=None)
@given(rng=st.randoms(use_true_random=False), depths=st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_undo_brings_back_exactly_what_was(rng: random.Random, depths: list[int]) -> None:
    graph, model = Graph(), Model()
    saved = []
    for edits in depths:  # marks within marks
        saved.append((graph.mark(), state(graph)))
        for _ in range(edits):
            edit(graph, model, rng)
    while saved:
        mark, before = saved.pop(rng.randrange(len(saved)) if rng.random() < 0.3 else -1)
        saved = [s for s in saved if s[0] <= mark]  # marks taken later are gone with it
        graph.undo(mark)
        assert state(graph) == before
        assert graph.mark() == mark


@settings(max_examples=30, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_edits_after_an_undo_are_as_on_a_graph_never_undone(rng: random.Random) -> None:
    graph, model = Graph(), Model()
    for _ in range(10):
        edit(graph, model, rng)
    mark = graph.mark()
    for _ in range(10):
        edit(graph, model_of(graph), rng)
    graph.undo(mark)
    for _ in range(10):
        edit(graph, model, rng)
    model.assert_equal(graph)


def model_of(graph: Graph) -> Model:
    model = Model()
    for op in graph.arrays().ids.tolist():
        model.ops[op] = {key: int(graph.column(key)[op]) for key in COLUMNS}
        model.names[op] = graph.name_of(op)
    model.edges = [(a, b) for a, b in graph.edges().tolist()]
    return model


def test_growth_past_the_first_allocation_keeps_every_op_and_edge() -> None:
    # 64 places are made first; numpy.resize repeats old rows in the new ones, which must not show
    graph = Graph()
    for op in range(200):
        graph.add_op(f"op{op}", OpKind.LOCAL, duration=op, after=[op - 1] if op else [])
    assert len(graph) == 200
    assert graph.column("duration").tolist() == list(range(200))
    assert graph.edges().tolist() == [[op - 1, op] for op in range(1, 200)]
    graph.undo(graph.mark() - 2)  # the last op and its edge
    assert len(graph) == 199
    assert graph.edges().tolist()[-1] == [197, 198]


def test_removed_ops_take_their_edges_along_and_never_come_back() -> None:
    graph = Graph()
    a = graph.add_op("a", OpKind.FORWARD)
    b = graph.add_op("b", OpKind.FORWARD, after=[a])
    c = graph.add_op("c", OpKind.FORWARD, after=[b])
    graph.remove_ops([b, b])
    assert len(graph) == 2
    assert graph.edges().tolist() == []
    assert graph.arrays().ids.tolist() == [a, c]
    assert graph.add_op("d", OpKind.FORWARD) == 3  # not 1 again
    for edge in ((a, b), (b, c), (a, 4), (-1, a)):
        with pytest.raises(ValueError, match="there is no op"):
            graph.add_edge(*edge)


def test_columns_are_read_only() -> None:
    graph = Graph()
    graph.add_op("a", OpKind.FORWARD, duration=5)
    with pytest.raises(ValueError, match="read-only"):
        graph.column("duration")[0] = 6
    graph.set(0, "duration", 7)  # the journalled way still works
    assert graph.column("duration").tolist() == [7]


def test_arrays_are_kept_until_the_next_edit() -> None:
    graph = Graph()
    graph.add_op("a", OpKind.FORWARD, duration=5)
    first = graph.arrays()
    assert graph.arrays() is first
    graph.set(0, "duration", 6)
    assert (first.duration.tolist(), graph.arrays().duration.tolist()) == ([5], [6])


def test_to_networkx_has_the_living_ops_with_their_columns() -> None:
    graph = Graph()
    stream = graph.resource("rank0/stream/7")
    a = graph.add_op("matmul", OpKind.BACKWARD, resource=stream, duration=30, gap=4, rank=0)
    dead = graph.add_op("dead", OpKind.LOCAL, after=[a])
    b = graph.add_op("all_reduce", OpKind.COLLECTIVE, duration=100, nbytes=4096, after=[a])
    graph.remove_ops([dead])
    out = graph.to_networkx()
    assert sorted(out.nodes) == [a, b]
    assert list(out.edges) == [(a, b)]
    assert out.nodes[a] == {
        "name": "matmul", "kind": "BACKWARD", "resource": stream, "duration": 30, "gap": 4,
        "priority": 0, "tensor": -1, "rank": 0, "nbytes": -1,
    }  # fmt: skip
    assert (out.nodes[b]["kind"], out.nodes[b]["nbytes"]) == ("COLLECTIVE", 4096)


def test_a_subgraph_is_a_graph_of_its_own() -> None:
    graph = Graph()
    host = graph.resource("host")
    a, b, c, d = (graph.add_op(name, OpKind.LOCAL, resource=host, duration=i) for i, name in enumerate("abcd"))
    graph.add_edge(a, c)
    graph.add_edge(b, c)
    graph.add_edge(c, d)
    graph.out_op, graph.in_op = {(0, 0): a, (1, 0): b}, {(0, 0): d}
    graph.set_buckets([Bucket((0,), 8, (b, c))])
    graph.info["channel"] = "x"
    graph.remove_ops([d])
    part, new = graph.subgraph(np.array([True, False, True, True]))
    assert new.tolist() == [0, -1, 1, -1]  # d is dead
    assert [part.name_of(op) for op in range(len(part))] == ["a", "c"]
    assert part.edges().tolist() == [[0, 1]]
    assert (part.out_op, part.in_op, part.buckets) == ({(0, 0): 0}, {}, [Bucket((0,), 8, (1,))])
    part.add_op("e", OpKind.LOCAL, resource=part.resource("host"), duration=9, after=[1])
    assert part.resource("other") == 1
    part.undo(0)
    assert len(part) == 2
    assert (len(graph), graph.resource_names, graph.column("duration").tolist()) == (3, ["host"], [0, 1, 2, 3])


def test_many_at_once_are_as_one_by_one() -> None:
    many, single = Graph(), Graph()
    for graph in (many, single):
        graph.resource("link")
        graph.add_op("first", OpKind.LOCAL)
    mark = many.mark()
    duration, gap = np.arange(300), np.full(300, 4)
    ids = many.add_ops("send", OpKind.SEND, 300, resource=np.zeros(300), duration=duration, gap=gap)
    many.add_edges(np.stack([np.zeros(300, int), ids], axis=1))
    many.add_edges(np.zeros((0, 2), int))
    for ns in range(300):
        single.add_op("send", OpKind.SEND, resource=0, duration=ns, gap=4, after=[0])
    for key in ("kind", "name", "resource", "duration", "gap", "priority", "tensor", "rank", "nbytes", "alive"):
        assert many.column(key).tolist() == single.column(key).tolist(), key
    assert many.edges().tolist() == single.edges().tolist()
    assert many.name_table == single.name_table
    with pytest.raises(ValueError, match="not there"):
        many.add_edges(np.array([[0, 301]]))
    many.remove_ops([7])
    with pytest.raises(ValueError, match="not there"):
        many.add_edges(np.array([[0, 7]]))
    many.undo(mark)
    assert (len(many), len(many.edges())) == (1, 0)


def test_many_names_are_numbered_as_one_by_one() -> None:
    graph = Graph()
    graph.name("b")
    assert graph.numbers(["a", "b", "a", "c"]).tolist() == [1, 0, 1, 2]
    assert [graph.name(name) for name in "abc"] == [1, 0, 2]
    assert graph.name_table == ["b", "a", "c"]
