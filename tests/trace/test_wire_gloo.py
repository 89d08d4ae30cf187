"""The wire tracer on stock torch with gloo: two processes, every byte of every collective."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpro.trace import wire
from tests.trace import wire_job

pytestmark = [
    pytest.mark.skipif(bool(wire.supported()), reason=wire.supported() or "-"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

#: Payload bytes that all ranks together send, per byte of the tensor, with 2 ranks: a ring all-reduce sends
#: 2 (N - 1) / N times the tensor per rank, a broadcast the tensor to N - 1 ranks, a ring all-gather every rank's
#: tensor to N - 1 others.
SENT = {"all_reduce": 2, "broadcast": 1, "all_gather": 2}


@pytest.fixture(scope="module")
def captures() -> list[dict[str, Any]]:
    """Per collective, what both ranks saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parents[2]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.trace.wire_job"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, env=env, cwd=root)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    both = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [dict(mine) | {"seen": mine["seen"] + other["seen"]} for mine, other in zip(*both, strict=True)]


@pytest.mark.parametrize("operation", wire_job.OPERATIONS)
def test_every_byte_of_a_collective_is_seen_at_both_ends(captures: list[dict[str, Any]], operation: str) -> None:
    mine = [capture for capture in captures if capture["operation"] == operation]
    assert [capture["nbytes"] for capture in mine] == list(wire_job.SIZES)
    for capture in mine:
        assert capture["dropped"] == 0
        ends: dict[str, dict[str, dict[str, Any]]] = {}
        for stream in capture["seen"]:
            ends.setdefault(stream["stream"], {})[stream["kind"]] = stream
        gloo = {name: both for name, both in ends.items() if any(end["framed"] for end in both.values())}
        assert len(gloo) == 2  # there and back
        for both in gloo.values():
            sent, received = both["SEND"], both["RECV"]
            for key in ("first", "bytes", "payload", "slots"):
                assert sent[key] == received[key], key
            assert sent["contiguous"] and received["contiguous"]
            assert sent["framed"] == sent["bytes"]  # nothing that is not a frame
        assert sum(both["SEND"]["payload"] for both in gloo.values()) == SENT[operation] * capture["nbytes"]


def test_streams_go_on_from_capture_to_capture(captures: list[dict[str, Any]]) -> None:
    """Each capture finds its place anew, from the kernel: it is where the one before it had ended."""
    at: dict[str, int] = {}
    compared = 0
    for capture in captures:
        for stream in capture["seen"]:
            if stream["kind"] == "SEND" and stream["framed"]:
                compared += stream["stream"] in at
                assert at.get(stream["stream"], stream["first"]) == stream["first"]
                at[stream["stream"]] = stream["first"] + stream["bytes"]
    assert compared >= 2 * (len(captures) - 1)
