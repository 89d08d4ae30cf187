"""Processes with TensorFlow and Horovod for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.build import VENV
from tests.frameworks.horovod_torch.conftest import HorovodRanks


@pytest.fixture(scope="session")
def keras_ranks() -> Iterator[HorovodRanks]:
    if not (VENV / ".made").exists():
        pytest.skip(f"no {VENV.name} with Horovod here: `make backends` makes it")
    made = HorovodRanks("tests.frameworks.horovod_keras.jobs", "dpro_integrations.keras")
    yield made
    made.close()


@pytest.fixture
def ranks(keras_ranks: HorovodRanks) -> HorovodRanks:
    return keras_ranks
