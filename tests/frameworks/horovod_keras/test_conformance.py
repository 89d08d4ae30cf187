"""Keras with Horovod keeps the adapter contract."""

from __future__ import annotations

from dpro.adapter import Knob
from tests.frameworks.conformance import AdapterContract


class TestHorovodKeras(AdapterContract):
    subject = "tests.frameworks.horovod_keras.subject:make"
    knobs = frozenset({Knob.GROUPS})
    bucketed = False
    ordered = False
