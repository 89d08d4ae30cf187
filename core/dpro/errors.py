"""The two errors a caller may want to catch. Ground floor: imports nothing of dpro."""

from __future__ import annotations


class DproError(Exception):
    """Base of every error that dpro raises on purpose; its text is one line meant for a person."""


class TraceError(DproError):
    """A file or folder that cannot be used: ``str(error)`` is ``<path>: <reason>``."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason


class PlanError(DproError):
    """A plan that is malformed, or does not fit the job it is offered to."""
