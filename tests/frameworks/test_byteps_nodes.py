"""Where a BytePS job's servers are, told by a worker's connections: by hand, and by sockets of this very process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpro_integrations import byteps_nodes
from dpro_integrations.byteps_nodes import of_connections

HERE, THERE = "10.0.0.1", "10.0.0.2"
SCHEDULER = (HERE, 9100)
EST, LISTEN = "01", "0A"


def worker(*servers: tuple[str, int]) -> list[tuple[tuple[str, int], tuple[str, int], str, str]]:
    """Of a worker on host 1: it listens, has called the scheduler, the servers and itself, and was called."""
    made = [
        (("0.0.0.0", 7000), ("0.0.0.0", 0), LISTEN, "1"),
        ((HERE, 40_000), SCHEDULER, EST, "2"),
        ((HERE, 40_001), (HERE, 7000), EST, "3"),  # itself, both ends
        ((HERE, 7000), (HERE, 40_001), EST, "4"),
        ((HERE, 7000), (HERE, 50_001), EST, "5"),  # called by the scheduler
    ]
    for number, server in enumerate(servers):
        made.append(((HERE, 41_000 + number), server, EST, f"a{number}"))
        made.append(((HERE, 7000), (server[0], 51_000 + number), EST, f"b{number}"))
    return made


@pytest.mark.parametrize(
    ("servers", "hosts"),
    [
        ([(HERE, 8000)], (HERE,)),
        ([(THERE, 8000)], (THERE,)),
        ([(THERE, 8000), (HERE, 8000)], (HERE, THERE)),
        ([(THERE, 8000), (THERE, 8001)], (THERE, THERE)),
    ],
)
def test_a_worker_has_called_every_server(servers: list[tuple[str, int]], hosts: tuple[str, ...]) -> None:
    assert of_connections(worker(*servers), SCHEDULER, len(servers)) == (HERE, hosts)


def test_nothing_is_told_where_the_job_itself_has_connections_as_well() -> None:
    both = worker((THERE, 8000), (THERE, 443))
    assert of_connections(both, SCHEDULER, 1) == ("", ())


def test_nothing_is_told_without_a_scheduler() -> None:
    assert of_connections([], SCHEDULER, 0) == ("", ())


def test_a_connection_that_has_ended_is_none() -> None:
    gone = (HERE, 41_009), (THERE, 8009), "06", "c"
    assert of_connections([*worker((THERE, 8000)), gone], SCHEDULER, 1) == (HERE, (THERE,))


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def test_a_scheduler_may_be_reached_over_another_interface() -> None:
    local = "127.0.0.1", 9100
    made = [((local[0], 40_000), local, EST, "2") if one[3] == "2" else one for one in worker((HERE, 8000))]
    assert of_connections(made, local, 1) == (HERE, (HERE,))


def test_without_a_job_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    byteps_nodes.nodes.cache_clear()
    monkeypatch.delenv("DMLC_PS_ROOT_URI", raising=False)
    assert byteps_nodes.nodes() == ("", ())
    byteps_nodes.nodes.cache_clear()


def test_the_process_own_connections_are_read() -> None:
    with listening() as address, socket.create_connection(address) as call:
        found = list(byteps_nodes._connections(Path("/proc/self")))
        assert (call.getsockname(), address, EST) in [one[:3] for one in found]
        assert (address, ("0.0.0.0", 0), LISTEN) in [one[:3] for one in found]
