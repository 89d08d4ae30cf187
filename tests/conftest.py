"""Which tests are run a second time when they fail, and which share a process when several run side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
#: Jobs of several real processes with real sockets, whose order on shared cores is the machine's to choose. Nothing
#: else is run twice, and what was shows in pytest's closing line: a second look, not a way to hide the first.
REAL = (
    "frameworks", "testbed", "graph/test_real_gloo.py", "graph/test_real_wire.py", "clock/test_real_hosts.py",
    "passes/test_own_pass.py",
)  # fmt: skip
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


def piece_of(path: Path) -> str:
    """What is never split: a folder of :data:`LONGEST`, or a file."""
    for place in LONGEST:
        if HERE / place in (path, *path.parents):
            return place
    return str(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    real = [HERE / place for place in REAL]
    for item in items:
        if any(place in (item.path, *item.path.parents) for place in real):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: LONGEST.index(piece) if (piece := piece_of(item.path)) in LONGEST else len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Pieces(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return piece_of(config.rootpath / nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # in the order above
    return Pieces(config, log)
