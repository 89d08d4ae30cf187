"""A real gloo job on hosts with clocks of their own: found where they are, inside the stated uncertainty."""

from __future__ import annotations

import pytest

from benchmarks import clocks
from dpro.trace import wire
from tests.testbed.test_testbed import needs_namespaces


@needs_namespaces
@pytest.mark.skipif(bool(wire.supported()), reason=f"the wire tracer cannot run here: {wire.supported()}")
def test_two_hosts_half_a_second_apart() -> None:
    rows = list(clocks.real((0, -500)))
    assert len(rows) == 2 and "20 ppm" in rows[1]["case"]
    for row in rows:
        assert row["source"] == ["messages"] and row["payload_matched_pct"] >= 99.9
        assert row["covered"] and row["offset_error_us_max"] <= 50
