from dpro.graph.cluster import Cluster, Device, Line
from dpro.graph.graph import OpKind
from dpro.graph.tasks import Tasks, TasksBuilder
from dpro.passes.replicate import LAUNCH_NS
from dpro.passes.split import Split
from dpro.replay.placed import judge
from dpro.search.list_schedule import Problem, dpos
from dpro.search.os_dpos import os_dpos, parts_for, tries_for

MS = 1_000_000


def chain(times_ms: list[float], nbytes: int = 0) -> Tasks:
    build = TasksBuilder()
    for i, ms in enumerate(times_ms):
        build.task(f"op{i}", "Conv2d", OpKind.FORWARD, round(ms * MS))
        if i:
            build.tensor(i - 1, nbytes, [i])
    return build.build()


def free(count: int) -> Cluster:
    return Cluster([Device(f"d{i}", "gpu", "host") for i in range(count)], Line(0.0, 0.0))


def test_a_long_op_is_cut_in_as_many_parts_as_there_are_devices() -> None:
    one = os_dpos(Problem(chain([1, 40, 1]), free(4)), dpos, tries=4)
    # 1 + 10 + 1 ms, and a launch each for the part and the concat; by batch it would be one more, to cut the rows
    assert one.splits == (Split("op1", "channel", 4),)
    assert one.schedule.makespan_ns == 12 * MS + 2 * LAUNCH_NS
    replayed = judge(one.problem.tasks, one.schedule.device, free(4), one.schedule.priority())
    assert replayed.makespan_ns == one.schedule.makespan_ns


def test_nothing_is_cut_where_it_does_not_pay() -> None:
    problem = Problem(chain([1, 2, 1], nbytes=10**9), Cluster.uniform(4, 10.0))
    cut = os_dpos(problem, dpos)
    assert cut.splits == ()
    assert cut.problem is problem
    # batch and channel, 2 and 4 parts, of the longest op: the first that does not pay ends it
    assert cut.tries == 4


def test_one_device_has_nothing_to_cut_for() -> None:
    assert os_dpos(Problem(chain([5, 5]), free(1)), dpos).splits == ()


def test_tries_are_bounded_by_the_size_of_the_graph() -> None:
    assert os_dpos(Problem(chain([9] * 12), free(2)), dpos, tries=3).tries == 3
    assert tries_for(chain([1] * 10)) > tries_for(chain([1] * 10_000))


def test_numbers_of_parts() -> None:
    assert [parts_for(free(n)) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]
