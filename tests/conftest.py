"""Which tests are run a second time when they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Jobs of several real processes with real sockets, whose order on shared cores is the machine's to choose. Nothing
#: else is run twice, and what was shows in pytest's closing line: a second look, not a way to hide the first.
REAL = ("frameworks", "testbed", "graph/test_real_gloo.py", "graph/test_real_wire.py", "clock/test_real_hosts.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [HERE / place for place in REAL]
    for item in items:
        if any(place in (item.path, *item.path.parents) for place in places):
            item.add_marker(pytest.mark.flaky(reruns=1))
