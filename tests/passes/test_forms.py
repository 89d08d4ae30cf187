"""Whatever the forms of its ops, a compiled step computes what one device computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.graph.cluster import Cluster, Device, Line
from dpro.graph.graph import OpKind
from dpro.graph.tasks import CHANNEL
from dpro.passes.forms import Form, FormCompiler, Strategy
from dpro.passes.replicate import LAUNCH_NS, REPLICA, replicate
from dpro.replay.placed import judge
from dpro.trace.model_graph import ModelGraph, ModelOp, Role, Tensor, read
from tests.passes.toy_step import Toy

GRAPHS = Path(__file__).resolve().parents[2].parent / "shared" / "graphs"
DEVICES = 4
TOY = Toy()


def forms() -> st.SearchStrategy[Form]:
    device = st.integers(0, DEVICES - 1)
    full = st.lists(device, min_size=1, max_size=DEVICES, unique=True).map(lambda d: Form.full(*d))
    parts = st.sampled_from([2, 3, 4, 6, 8, 12]).flatmap(lambda n: st.lists(device, min_size=n, max_size=n))
    return full | parts.map(lambda d: Form.parted(*d))


@st.composite
def plans(draw: st.DrawFn) -> Strategy:
    """Of few forms, so that ops that meet often have the same."""
    palette = draw(st.lists(forms(), min_size=1, max_size=3))
    count = len(TOY.ops)
    form = draw(st.lists(st.integers(0, len(palette) - 1), min_size=count, max_size=count))
    reduces = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return Strategy(tuple(palette), np.array(form), np.array(reduces))


def uniform(form: Form, all_reduce: bool, count: int = len(TOY.ops)) -> Strategy:
    return Strategy((form,), np.zeros(count, np.int64), np.full(count, all_reduce))


def check_gradients(strategy: Strategy) -> None:
    compiler = FormCompiler(TOY.model, Cluster.uniform(DEVICES, 10.0))
    tasks, device = compiler.compile(strategy)
    applied = TOY.interpret(tasks, strategy)
    assert {TOY.ops[tasks.origin[task]].name for task, _ in applied} == {"w1/update", "w2/update", "w3/update"}
    for task, gradient in applied:
        np.testing.assert_allclose(gradient, TOY.alone[TOY.ops[tasks.origin[task]].name], rtol=1e-10, atol=1e-10)
    for number, op in enumerate(TOY.ops):  # an update is done wherever its variable is, and nowhere else
        if op.role is Role.UPDATE:
            held = [device[tasks.origin == which].tolist() for which in (number, op.partner)]
            assert held[0] == held[1]
            assert len(set(held[0])) == len(held[0])
        elif op.role is not Role.VARIABLE:
            assert tuple(device[tasks.origin == number]) == strategy.forms[strategy.form[number]].devices
    assert judge(tasks, device, Cluster.uniform(DEVICES, 10.0)).makespan_ns > 0


@settings(max_examples=150, deadline=None)
@given(plans())
def test_gradients_are_those_of_one_device(strategy: Strategy) -> None:
    check_gradients(strategy)


@pytest.mark.parametrize("all_reduce", [False, True])
@pytest.mark.parametrize(
    "form", [Form.full(2), Form.parted(0, 1, 2, 3), Form.parted(0, 0, 0, 1, 2, 3), Form.full(0, 3)]
)
def test_gradients_where_all_ops_are_alike(form: Form, all_reduce: bool) -> None:
    check_gradients(uniform(form, all_reduce))


def test_the_interpreter_notices_a_part_that_is_lost() -> None:
    strategy = uniform(Form.parted(0, 1), False)
    tasks, _ = FormCompiler(TOY.model, Cluster.uniform(2, 10.0)).compile(strategy)
    add = tasks.types.index("AddN")
    keep = np.ones(len(tasks.use_task), dtype=bool)
    keep[np.flatnonzero(tasks.use_task == add)[0]] = False
    tasks.use_tensor, tasks.use_task = tasks.use_tensor[keep], tasks.use_task[keep]
    wrong = [not np.allclose(g, TOY.alone[TOY.ops[tasks.origin[t]].name]) for t, g in TOY.interpret(tasks, strategy)]
    assert any(wrong)


def test_all_reduce_takes_equal_devices_of_gradient_and_variable() -> None:
    forms = (Form.parted(0, 1), Form.parted(0, 2))
    form = np.zeros(len(TOY.ops), np.int64)
    one = next(i for i, op in enumerate(TOY.ops) if op.name == "gy/grad")
    compiler = FormCompiler(TOY.model, Cluster.uniform(3, 10.0))
    reduces = np.ones(len(TOY.ops), dtype=bool)
    tasks, device = compiler.compile(Strategy(forms, form, reduces))
    # w1, the shared w2 twice, w3
    assert tasks.types.count("AllReduce") == 4 == np.count_nonzero(device == CHANNEL)
    form[one] = 1  # the gradient of w3 is made elsewhere now
    tasks, device = compiler.compile(Strategy(forms, form, reduces))
    assert tasks.types.count("AllReduce") == 3
    w3 = next(i for i, op in enumerate(TOY.ops) if op.name == "w3")
    assert np.count_nonzero(tasks.origin == w3) == 1


def line_model() -> ModelGraph:
    """A layer with 8 MB of parameters: 4 ms forward, 8 ms backward, 2 MB of rows in and out."""
    ops = [
        ModelOp("w", "Variable", Role.VARIABLE, 0, 8_000_000),
        ModelOp("x", "Input", Role.FORWARD, 0),
        ModelOp("f", "MatMul", Role.FORWARD, 4_000_000),
        ModelOp("b", "MatMul", Role.BACKWARD, 8_000_000, 0, 2),
        ModelOp("u", "Update", Role.UPDATE, 0, 0, 0),
    ]
    tensors = [
        Tensor(0, 8_000_000, (2, 3, 4), False), Tensor(1, 2_000_000, (2, 3)), Tensor(2, 2_000_000, (3,)),
        Tensor(3, 8_000_000, (4,), False),
    ]  # fmt: skip
    return ModelGraph("line", ops, tensors)


def test_times_of_a_parameter_server_and_of_a_collective_by_hand() -> None:
    cluster = Cluster.uniform(2, 1.0, latency_us=0)  # 1 ms a MB
    compiler = FormCompiler(line_model(), cluster)
    parts = (4_000_000 + 8_000_000) // 2 + 2 * LAUNCH_NS
    tasks, device = compiler.compile(uniform(Form.parted(0, 1), False, 5))
    # the variable goes out, the gradient comes back: 8 ms each; what is in one place waits for none of it
    assert judge(tasks, device, cluster).makespan_ns == 8_000_000 + parts + 8_000_000
    tasks, device = compiler.compile(uniform(Form.parted(0, 1), True, 5))
    # a ring of two: 2 (n - 1) / n of the bytes
    assert judge(tasks, device, cluster).makespan_ns == parts + 8_000_000
    tasks, device = compiler.compile(uniform(Form.full(1), True, 5))
    assert judge(tasks, device, cluster).makespan_ns == 12_000_000


def test_a_collective_between_machines_uses_the_link_that_they_share() -> None:
    line = Line.of(1.0, 0)
    cluster = Cluster([Device(f"d{i}", "gpu", f"m{i // 2}") for i in range(4)], line, line, shared=True)
    compiler = FormCompiler(line_model(), cluster)
    on = {}
    for devices in ((0, 1), (1, 2)):
        graph = judge(*compiler.compile(uniform(Form.parted(*devices), True, 5)), cluster).placed.graph
        kinds = graph.column("kind") == OpKind.COLLECTIVE
        on[devices] = [graph.resource_names[r] for r in graph.column("resource")[kinds]]
    assert on == {(0, 1): ["collectives"], (1, 2): ["link/between"]}


def test_memory_by_hand() -> None:
    cluster = Cluster.uniform(2, 1.0, latency_us=0)
    compiler = FormCompiler(line_model(), cluster)
    # the parameters once, the batch, what the layer made, and its gradient, while the backward op runs
    tasks, device = compiler.compile(uniform(Form.full(1), False, 5))
    assert judge(tasks, device, cluster).peak_bytes.tolist() == [0, 20_000_000]
    # the server: the parameters and both gradients, whose sum takes their place; the other: a copy, a gradient, rows
    tasks, device = compiler.compile(uniform(Form.parted(0, 1), False, 5))
    assert judge(tasks, device, cluster).peak_bytes.tolist() == [24_000_000, 18_000_000]


def test_replicas_of_one_device_each_take_their_share_and_are_summed_there() -> None:
    cluster = Cluster.uniform(2, 1.0, latency_us=0)
    tasks, device = FormCompiler(line_model(), cluster).compile(uniform(Form.parted(0, 0, 1), False, 5))
    judged = judge(tasks, device, cluster)
    on_0 = 2 * round(12_000_000 / 3) + 4 * LAUNCH_NS
    on_1 = round(12_000_000 / 3) + 2 * LAUNCH_NS
    server = int(device[tasks.origin == 0][0])
    far = on_1 if server == 0 else on_0
    assert judged.makespan_ns == max(on_0, on_1, 16_000_000 + far)
    sums = [i for i, kind in enumerate(tasks.types) if kind == "AddN"]
    assert sorted(device[sums].tolist()) == sorted([0, server])  # of two replicas on 0, then of both devices
    sent = judged.placed.sent_tensor
    assert sorted(tasks.tensor_bytes[sent].tolist()) == [8_000_000, 8_000_000]


def test_a_server_is_where_the_fewest_bytes_cross_the_slow_link() -> None:
    near, far = Line.of(10.0, 0), Line.of(1.0, 0)
    devices = [Device("a", "gpu", "m0"), Device("b", "gpu", "m1"), Device("c", "gpu", "m1")]
    cluster = Cluster(devices, near, far)
    tasks, device = FormCompiler(line_model(), cluster).compile(uniform(Form.parted(0, 1, 2), False, 5))
    # on a: two gradients come over the one link between machines; on b or c: one
    assert device[tasks.origin == 0].tolist() == [1]


def test_variables_of_equal_size_go_to_servers_in_turn() -> None:
    ops, tensors = [], []
    for _ in range(4):
        shift = len(ops)
        line = line_model()
        ops += [ModelOp(o.name, o.type, o.role, o.time_ns, o.kept_bytes, -1 if o.partner < 0 else o.partner + shift)
                for o in line.ops]  # fmt: skip
        tensors += [Tensor(t.producer + shift, t.nbytes, tuple(c + shift for c in t.consumers), t.batched)
                    for t in line.tensors]  # fmt: skip
    model = ModelGraph("four", ops, tensors)
    tasks, device = FormCompiler(model, Cluster.uniform(4, 1.0)).compile(uniform(Form.parted(0, 1, 2, 3), False, 20))
    held = [device[tasks.origin == op].tolist() for op in (0, 5, 10, 15)]
    assert sorted(held) == [[0], [1], [2], [3]]


def test_ops_that_nobody_reads() -> None:
    cluster = Cluster.uniform(2, 10.0)
    model = ModelGraph("lone", [ModelOp("a", "Op", Role.FORWARD, 2_000_000)], [])
    tasks, device = FormCompiler(model, cluster, 0.5).compile(uniform(Form.parted(0, 1), False, 1))
    assert tasks.names == ["a@0", "a@1"]
    assert judge(tasks, device, cluster).makespan_ns == 500_000 + LAUNCH_NS
    tasks, device = FormCompiler(ModelGraph("none", [], []), cluster).compile(uniform(Form.full(0), False, 0))
    assert len(tasks) == 0


def test_forms_that_are_none_are_refused() -> None:
    for devices, part in (((), False), ((1, 0), True), ((0,), True), ((0, 0), False), ((-1,), False)):
        with pytest.raises(ValueError):
            Form(devices, part)
    assert Form.parted(3) == Form.full(3)
    compiler = FormCompiler(TOY.model, Cluster.uniform(2, 10.0))
    with pytest.raises(ValueError, match="2 devices"):
        compiler.compile(uniform(Form.full(2), False))
    with pytest.raises(ValueError):
        FormCompiler(TOY.model, Cluster.uniform(2, 10.0), batch=0)


@pytest.mark.parametrize("name", ["vgg16", "inception_v3"])
@pytest.mark.parametrize("batch", [1.0, 0.125])
def test_even_replicas_with_one_server_are_the_start_graph_of_fastt(name: str, batch: float) -> None:
    path = GRAPHS / "pipedream" / f"{name}.graph.txt"
    if not path.exists():
        pytest.skip("the public graphs are not here (../shared/graphs)")
    model, cluster = read(path), Cluster.uniform(4, 10.0)
    start = replicate(model, 4, batch)
    expected = judge(start, np.maximum(np.array(start.info[REPLICA]), 0), cluster)
    strategy = uniform(Form.parted(0, 1, 2, 3), False, len(model.ops))
    tasks, device = FormCompiler(model, cluster, batch).compile(strategy)
    single = np.array([op.role in (Role.VARIABLE, Role.UPDATE) for op in model.ops])
    device[np.flatnonzero(tasks.origin < 0)] = 0
    device[(tasks.origin >= 0) & single[tasks.origin]] = 0
    judged = judge(tasks, device, cluster)
    assert judged.makespan_ns == expected.makespan_ns
    assert judged.peak_bytes.tolist() == expected.peak_bytes.tolist()
