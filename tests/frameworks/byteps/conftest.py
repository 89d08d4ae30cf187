"""These tests need BytePS, from the environment that ``make backends`` makes."""

from __future__ import annotations

import pytest

from tests.backends.build import VENV


@pytest.fixture(autouse=True, scope="session")
def _needs_byteps() -> None:
    if not (VENV / ".byteps").exists():
        pytest.skip(f"no {VENV.name} with BytePS here: `make backends` makes it")
