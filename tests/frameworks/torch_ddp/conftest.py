"""Processes with torch for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frameworks.launch import Ranks

pytest.importorskip("torch")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    made = Ranks(
        "torch", "torch.profiler", "torch._dynamo", "tests.frameworks.torch_ddp.jobs", "dpro_integrations.torch_ddp"
    )
    yield made
    made.close()
