"""The wire tracer's test library, and connections over loopback."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.trace import wire_library
from tests.trace.wire_ends import Ends, connected


@pytest.fixture(scope="module", params=list(wire_library.KINDS))
def each_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return wire_library.build(tmp_path_factory.mktemp("wire"), request.param)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return wire_library.build(tmp_path_factory.mktemp("wire"), "relro")


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = connected()
    yield pair
    for end in pair:
        end.close()
