"""Patches that a job makes on purpose, taken back before the next job in the same process."""

from __future__ import annotations

from typing import Any

_made: list[tuple[Any, str, Any]] = []


def patch(holder: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or object until the job ends."""
    _made.append((holder, name, getattr(holder, name)))
    setattr(holder, name, value)


def undo() -> None:
    while _made:
        setattr(*_made.pop())
