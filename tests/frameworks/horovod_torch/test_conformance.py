"""Horovod for torch keeps the adapter contract."""

from __future__ import annotations

from dpro.adapter import Knob
from tests.frameworks.conformance import AdapterContract


class TestHorovodTorch(AdapterContract):
    subject = "tests.frameworks.horovod_torch.subject:make"
    knobs = frozenset({Knob.GROUPS})
    bucketed = False
