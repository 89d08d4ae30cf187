"""One worker and the channel stand for N equal workers: their replays are equal (DisCo, TPDS 2022, section 4.4)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.cost.fused import SumOfOps
from dpro.graph.cluster import Cluster, Line
from dpro.graph.graph import OpKind
from dpro.graph.tasks import CHANNEL, TasksBuilder
from dpro.passes.joint_fusion import Fusion, JointFusion
from dpro.passes.worker_step import Step
from dpro.replay.engine import replay
from dpro.replay.placed import judge
from tests.search.worker_steps import Halved, step_of, steps

LINE = Line(latency_ns=7, ns_per_byte=1)


def workers_ns(fusion: JointFusion, state: Fusion, count: int) -> int:
    """``count`` workers that each do what ``state`` says on a device of their own; all join in each AllReduce."""
    one = fusion.lower(state)
    kinds, times = one.column("kind"), one.column("duration")
    build = TasksBuilder()
    device: list[int] = []
    task: dict[tuple[int, int], int] = {}
    for op, kind in enumerate(kinds.tolist()):
        shared = kind == OpKind.COLLECTIVE
        for worker in range(1 if shared else count):
            task[op, worker] = build.task(f"op{op}@{worker}", "any", OpKind(kind), int(times[op]))
            device.append(CHANNEL if shared else worker)
    for a, b in dict.fromkeys(map(tuple, one.edges().tolist())):
        for worker in range(count):
            build.tensor(task.get((a, worker), task[a, 0]), 1, [task.get((b, worker), task[b, 0])])
    return judge(build.build(), np.array(device), Cluster.uniform(count, 1.0)).makespan_ns


@settings(max_examples=80, deadline=None)
@given(steps(), st.integers(2, 5), st.data())
def test_one_worker_stands_for_all(step: Step, count: int, data: st.DataObject) -> None:
    fusion = JointFusion(step, Halved(), LINE)
    state = fusion.start()
    for _ in range(data.draw(st.integers(0, 6))):
        living = sorted(set(state.order) - {-1})
        pair = data.draw(st.lists(st.sampled_from(living), min_size=2, max_size=2))
        (fusion.join if data.draw(st.booleans()) else fusion.duplicate)(state, *pair)
    assert workers_ns(fusion, state, count) == replay(fusion.lower(state)).makespan_ns


def test_by_hand() -> None:
    # 10, then 20 beside the reduction of the first (7 + 30); that of the second (7 + 10); the update (5)
    step = step_of([10, 20, 5], [[], [0], []], [(0, 30, []), (1, 10, [2])])
    fusion = JointFusion(step, SumOfOps(), LINE)
    state = fusion.start()
    assert replay(fusion.lower(state)).makespan_ns == 10 + 37 + 17 + 5
    assert workers_ns(fusion, state, 3) == 10 + 37 + 17 + 5
