"""Gluon with Horovod keeps the adapter contract."""

from __future__ import annotations

from dpro.adapter import Knob
from tests.frameworks.conformance import AdapterContract


class TestHorovodMXNet(AdapterContract):
    subject = "tests.frameworks.horovod_mxnet.subject:make"
    knobs = frozenset({Knob.GROUPS})
    bucketed = False
