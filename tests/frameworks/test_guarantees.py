"""The page of guarantees names tests; each of them exists."""

from __future__ import annotations

import re

from tests.frameworks.launch import ROOT


def test_every_test_named_in_the_guarantees_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text()))
    written = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 30
    assert sorted(named - written) == []
