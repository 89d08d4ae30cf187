"""What every integration shares: the adapter contract and the one-line log.

Nothing here knows a framework. ``tests/frameworks/conformance.py`` is the same contract as tests;
every adapter runs it.
"""

from __future__ import annotations

from dpro.adapter import Adapter, Knob

__all__ = ["Adapter", "Knob"]
