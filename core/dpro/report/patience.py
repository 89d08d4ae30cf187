"""A time limit for what the user asked and dpro cannot foresee. Knows nothing of what takes the time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def at_most(seconds: float, refusal: Exception) -> Iterator[None]:
    """Raise ``refusal`` in what takes longer; in a main thread, where alone Python runs signal handlers."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: object) -> NoReturn:
        raise refusal

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
