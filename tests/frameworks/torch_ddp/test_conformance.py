"""PyTorch DDP keeps the adapter contract."""

from __future__ import annotations

from dpro.adapter import Knob
from tests.frameworks.conformance import AdapterContract


class TestTorchDDP(AdapterContract):
    subject = "tests.frameworks.torch_ddp.subject:make"
    knobs = frozenset({Knob.BUCKET_CAP, Knob.BUCKET_VIEW})
