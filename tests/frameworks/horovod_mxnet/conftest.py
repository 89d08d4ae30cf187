"""Processes with Horovod for MXNet for all tests of this folder, from the environment that ``make backends`` makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.build import VENV
from tests.frameworks.horovod_torch.conftest import HorovodRanks

MODULES = ("mxnet", "horovod.mxnet", "tests.frameworks.horovod_mxnet.jobs")


@pytest.fixture(scope="session")
def ranks() -> Iterator[HorovodRanks]:
    if not (VENV / ".made").exists():
        pytest.skip(f"no {VENV.name} with Horovod here: `make backends` makes it")
    made = HorovodRanks(*MODULES)
    yield made
    made.close()


@pytest.fixture
def fresh_ranks(ranks: HorovodRanks) -> Iterator[HorovodRanks]:
    """Processes in which nothing has run yet."""
    made = HorovodRanks(*MODULES)
    yield made
    made.close()
