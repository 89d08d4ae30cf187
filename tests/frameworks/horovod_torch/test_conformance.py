"""Horovod for torch keeps the adapter contract."""

from __future__ import annotations

from dpro.adapter import Knob
from tests.frameworks.conformance import AdapterContract


class TestHorovodTorch(AdapterContract):
    subject = "tests.frameworks.horovod_torch.subject:make"
    knobs = frozenset({Knob.GROUPS})
    only_rank_0_sees_collectives = True
