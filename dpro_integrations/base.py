"""What every integration shares: the adapter contract, and how it says that it steps aside.

Nothing here knows a framework. ``tests/frameworks/conformance.py`` is the same contract as tests;
every adapter runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dpro.adapter import Adapter, Knob
from dpro.errors import DproError
from dpro.meeting import describe
from dpro.session import Session
from dpro.settings import Settings

__all__ = ["Adapter", "Knob", "before_call", "before_the_meeting", "put_on", "step_aside"]


def before_the_meeting() -> Settings:
    """The environment's settings, or the defaults where they are no settings: the rank that has those says so once it
    has met the others, who wait for it."""
    try:
        return Settings.from_env()
    except DproError:
        return Settings()


def before_call(name: str, modules: Sequence[ModuleType], first: Callable[[], None]) -> Callable[[], None]:
    """Have ``first``, which must not raise, called before the job calls a library's function. Returns the undo.

    Args:
        name: of the function.
        modules: where a job finds it. One of them that has another one (a patch of the job's) is left alone.
    """
    original = getattr(modules[0], name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    patched = [module for module in modules if getattr(module, name) is original]
    for module in patched:
        setattr(module, name, wrapper)

    def undo() -> None:
        for module in patched:
            if getattr(module, name) is wrapper:  # else somebody patched on top of us
                setattr(module, name, original)

    return undo


def put_on(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Put ``value`` on the object itself, past what its class makes of setting. Returns the undo."""
    had, own = name in vars(owner), vars(owner).get(name)

    def undo() -> None:
        # somebody may have patched on top of us: his patch then still works, and calls ours
        if vars(owner).get(name) is not value:
            return
        if had:
            vars(owner)[name] = own
        else:
            del vars(owner)[name]

    vars(owner)[name] = value
    return undo


def step_aside(reason: str | BaseException, rank: int) -> None:
    """The one line. An error is said by the rank that has it; a reason that all ranks share by rank 0."""
    alone = isinstance(reason, BaseException)
    text = describe(reason) if isinstance(reason, BaseException) else reason
    Session(Settings(), rank).say(f"stepped aside: {text}", everywhere=alone)
