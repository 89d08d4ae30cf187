import numpy as np

from dpro.graph.cluster import Cluster, Device, Line
from dpro.graph.graph import OpKind
from dpro.graph.tasks import Ints, Tasks, TasksBuilder
from dpro.replay.placed import judge
from dpro.search.exploration import UNKNOWN, Costs, Explorer, Profile

MS = 1_000_000


def branches(count: int = 4) -> Tasks:
    """``count`` convolutions of 10 ms that one op reads."""
    build = TasksBuilder()
    last = build.task("join", "Add", OpKind.FORWARD, MS)
    for i in range(count):
        conv = build.task(f"conv{i}", "Conv2d", OpKind.FORWARD, 10 * MS)
        build.tensor(conv, 1_000_000, [last])
    return build.build()


class Hardware:
    """A job on devices whose speeds and links only it knows: a replay with them."""

    def __init__(self, tasks: Tasks, cluster: Cluster) -> None:
        self.tasks, self.cluster = tasks, cluster
        self.runs: list[list[int]] = []

    def run(self, device: Ints, priority: Ints) -> Profile:
        self.runs.append(device.tolist())
        judged = judge(self.tasks, device, self.cluster, priority)
        took = judged.played.end - judged.played.start
        placed = judged.placed
        sent = [
            (int(device[self.tasks.tensor_of[t]]), int(to), int(self.tasks.tensor_bytes[t]), int(took[op]))
            for t, to, op in zip(placed.sent_tensor, placed.sent_to, placed.sent_op, strict=True)
        ]
        return Profile(judged.makespan_ns, took[: len(self.tasks)], sent)


def hidden(speeds: dict[str, float], gb_per_s: float = 10.0) -> Cluster:
    """A device of each type; its speed for convolutions is not what whoever plans knows."""
    devices = [Device(f"d{i}", kind, "host") for i, kind in enumerate(speeds)]
    return Cluster(devices, Line.of(gb_per_s, 20.0), speeds={kind: {"Conv2d": speed} for kind, speed in speeds.items()})


def test_unknown_costs_draw_plans_to_devices_that_were_never_tried() -> None:
    tasks = branches()
    hardware = Hardware(tasks, hidden({"a": 1.0, "b": 4.0}))
    explorer = Explorer(tasks, hardware.cluster, np.zeros(len(tasks), np.int64))
    best_ns = explorer.explore(hardware)
    assert explorer.rounds[0].step_ns == 41 * MS
    # all four on the fast device take 10 ms, three there and one here 10 ms too
    assert best_ns <= 12.2 * MS
    assert any(1 in device for device in hardware.runs)
    assert explorer.best is not None
    assert explorer.best[0] == best_ns == min(one.step_ns for one in explorer.rounds)


def test_a_plan_that_turns_out_slower_is_taken_back() -> None:
    tasks = branches()
    slow = Hardware(tasks, hidden({"a": 1.0, "b": 0.01}))
    explorer = Explorer(tasks, slow.cluster, np.zeros(len(tasks), np.int64))
    assert explorer.explore(slow) == 41 * MS
    assert [one.kept for one in explorer.rounds][:2] == [True, False]
    assert explorer.device.tolist() == [0] * 5
    # what was tried once and was slower is not tried again, and quiet rounds end it
    tried = [device for device in slow.runs if any(device)]
    assert len(tried) == len({tuple(device) for device in tried})
    assert slow.runs[-1] == [0] * 5


def test_costs_are_averaged_by_half_and_say_how_wrong_they_were() -> None:
    tasks = branches(1)
    costs = Costs(tasks, Cluster.uniform(2, 10.0))
    device = np.zeros(2, np.int64)
    assert costs.learn(device, Profile(0, np.array([100, 300]))) == 1.0
    assert costs.times_ns.tolist() == [[100, UNKNOWN], [300, UNKNOWN]]
    # 100 and 300 were known: off by 20 and 100 of 480
    assert costs.learn(device, Profile(0, np.array([80, 400]))) == 120 / 480
    assert costs.times_ns[:, 0].tolist() == [90, 350]
    assert costs.problem().times_ns.tolist() == [[90, 0], [350, 0]]


def test_pairs_of_devices_have_lines_of_their_own() -> None:
    tasks = branches(1)
    costs = Costs(tasks, Cluster.uniform(2, 10.0))
    sent = [(0, 1, 1000, 3000), (0, 1, 2000, 5000), (1, 0, 1000, 500)]
    costs.learn(np.zeros(2, np.int64), Profile(0, np.array([1, 1]), sent))
    cluster = costs.problem().cluster
    assert [cluster.transfer_ns(1000, 0, 1), cluster.transfer_ns(3000, 0, 1)] == [3000, 7000]
    assert cluster.transfer_ns(3000, 1, 0) == 1500
    costs.learn(np.zeros(2, np.int64), Profile(0, np.array([1, 1]), [(1, 0, 1000, 1500)]))
    assert costs.problem().cluster.transfer_ns(1000, 1, 0) == 1000


def test_in_a_steady_job_nothing_is_planned_until_times_change() -> None:
    tasks = branches()
    hardware = Hardware(tasks, hidden({"a": 1.0, "b": 1.0}))
    explorer = Explorer(tasks, hardware.cluster, np.zeros(len(tasks), np.int64))
    before = explorer.explore(hardware)
    runs = len(hardware.runs)
    for _ in range(3):
        explorer.step(hardware)
    assert len({tuple(device) for device in hardware.runs[runs - 1 :]}) == 1
    # device 1 slows down to a fifth: what ran there moves, once that is known
    hardware.cluster = hidden({"a": 1.0, "b": 0.2})
    explorer.step(hardware)  # wrong by far: planning begins again
    assert explorer.quiet == 0
    assert before < explorer.explore(hardware) <= 41 * MS
