"""From a job's first wrapper to the end of its tuning: what every activation by environment shares.

Knows no framework: what is wrapped, when a step ends and how a tuner is made is for subclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Watch:
    """Tunes what the job made, at the steps that :meth:`_stepped` is told of.

    Args:
        made: what the job constructed.
        restore: lets the constructor go.
    """

    #: Said when the job makes another: one tuner can't tell the all-reduces of two apart.
    another = ""

    def __init__(self, made: Any, restore: Callable[[], None]) -> None:
        self.made = made
        self._restore = restore
        self._tuner: Any = None
        self._over = False

    @staticmethod
    def say(reason: str | BaseException) -> None:
        """That dpro steps aside."""
        raise NotImplementedError

    def second(self) -> None:
        """The job made another."""
        if self._tuner is not None:
            self._tuner.fail(self.another)
        elif not self._over:
            self._stop()
            self.say(self.another)

    # -- for subclasses ------------------------------------------------------------------------

    def _counts(self, *_: Any) -> bool:
        """Whether the step that just ended, of which this was told, is one of ``made``'s."""
        return True

    def _make(self) -> Any:
        """A tuner, None where there is nothing to tune. At the end of the first step: all ranks are there, or near."""
        raise NotImplementedError

    def _unhook(self, made: Any) -> None:
        """Let the job's steps go; we may be in a hook of theirs just now."""
        raise NotImplementedError

    # -- parts ---------------------------------------------------------------------------------

    def _stepped(self, *told: Any) -> None:
        if self._over:
            return
        try:
            if not self._counts(*told):
                return
            if self._tuner is None:
                self._tuner = self._make()
            if self._tuner is None:
                self._stop()
                return
            self._tuner.step()
            if self._tuner.outcome is not None:
                self._stop()
        except Exception as error:  # the job comes first
            self._stop()
            self.say(error)

    def _stop(self) -> None:
        """Take back every patch, let go of the job's objects."""
        self._over = True
        self._restore()
        self._unhook(self.made)
        self.made = self._tuner = None


def watch_first(wrapper: Any, watch_class: type[Watch]) -> None:
    """Watch the first object that the job makes of the class ``wrapper``, and tell the watch of a second one."""
    construct = wrapper.__init__
    watch: Watch | None = None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal watch
        construct(self, *args, **kwargs)
        try:
            if watch is None:
                watch = watch_class(self, restore)
            elif watch.made is not self:  # it is, where a plan wraps anew in place
                watch.second()
        except Exception as error:  # the job comes first
            restore()
            watch_class.say(error)

    def restore() -> None:
        if wrapper.__init__ is __init__:
            wrapper.__init__ = construct

    __init__.__wrapped__ = construct  # type: ignore[attr-defined]  # inspect.signature sees the real one
    wrapper.__init__ = __init__
