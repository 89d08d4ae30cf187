"""Which tests are run a second time when they fail, and which share a process when several run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Jobs of several real processes with real sockets, whose order on shared cores is the machine's to choose. Nothing
#: else is run twice, and what was shows in pytest's closing line: a second look, not a way to hide the first.
REAL = ("frameworks", "testbed", "graph/test_real_gloo.py", "graph/test_real_wire.py", "clock/test_real_hosts.py")
#: What takes longest begins first: two processes then end at about the same time. BytePS' jobs, which wait for most of
#: their time, and Keras' begin together. Folders whose tests share processes (``conftest.py``) are one piece.
LONGEST = (
    "frameworks/horovod_keras",
    "frameworks/byteps",
    "testbed/test_matrices.py",
    "frameworks/horovod_torch",
    "frameworks/torch_ddp",
    "frameworks/horovod_mxnet",
    "frameworks/lightning",
)


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks when it has its turn
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    real = [HERE / place for place in REAL]
    pieces = {HERE / place: place for place in LONGEST}
    order = {place: number for number, place in enumerate(LONGEST)}
    found: dict[pytest.Item, str] = {}
    for item in items:
        places = (item.path, *item.path.parents)
        if any(place in places for place in real):
            item.add_marker(pytest.mark.flaky(reruns=1))
        piece = next((pieces[place] for place in places if place in pieces), "")
        found[item] = piece
        item.add_marker(pytest.mark.xdist_group(piece or str(item.path.relative_to(HERE))))
    items.sort(key=lambda item: order.get(found[item], len(order)))
