"""Horovod on the testbed: the environment that horovodrun gives, and a real all-reduce between namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed import Testbed, TestbedError
from benchmarks.testbed.horovod import environment, find_python, start
from tests.testbed.test_testbed import needs_namespaces


def test_ranks_of_one_machine_and_of_many() -> None:
    """On loopback one host with two slots; on namespaces two hosts with one each (``get_host_assignments``)."""
    bed = Testbed(hosts=2, loopback=True)
    assert {k: v for k, v in environment(bed, 1, 77).items() if k.endswith(("RANK", "SIZE"))} == {
        "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
    }  # fmt: skip


@needs_namespaces
def test_an_allreduce_between_hosts(tmp_path: Path) -> None:
    """Three hosts with own clocks: 1 + 2 + 3 on each of them, one process per host."""
    try:
        python = find_python()
    except TestbedError as error:
        pytest.skip(str(error))
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()\n"
        "open(f'{sys.argv[1]}/{hvd.rank()}', 'w').write(f'{total} {hvd.size()} {hvd.local_size()}')\n"
        "hvd.shutdown()\n"
    )
    with Testbed(hosts=3, clock_offsets_ns=[0, 5_000_000, -5_000_000]) as bed:
        assert start(bed, [python, str(script), str(tmp_path)], python=python).wait(120) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["6.0 3 1"] * 3
