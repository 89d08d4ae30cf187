"""BytePS keeps the adapter contract, with Gluon and with Keras."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Testbed
from dpro.adapter import Knob
from tests.frameworks.byteps.launch import begin
from tests.frameworks.conformance import AdapterContract
from tests.frameworks.launch import Ranks

_MODULES = {"mxnet_subject": "rank", "keras_subject": "keras_rank"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    @cache
    def checked(subject: str) -> list[dict[str, Any]]:
        """By rank, what each check returned; of one job."""
        folder = tmp_path_factory.mktemp("contract")
        module = _MODULES[subject.rpartition(".")[2].partition(":")[0]]
        target = "tests.frameworks.byteps.conformance_job:all_checks"
        with Testbed(2, loopback=True) as bed:
            code = begin(bed, module, folder, target, json.dumps({"subject": subject})).wait(150)
        assert code == 0
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]

    yield checked


class _Contract(AdapterContract):
    knobs = frozenset({Knob.PARTITION_BOUND, Knob.IN_FLIGHT})
    bucketed = False

    def run(self, ranks: Ranks, folder: Path, check: str) -> list[Any]:
        return [one[check] for one in ranks(self.subject)]  # type: ignore[operator]


class TestBytePSMXNet(_Contract):
    subject = "tests.frameworks.byteps.mxnet_subject:make"


class TestBytePSKeras(_Contract):
    subject = "tests.frameworks.byteps.keras_subject:make"
    ordered = False
