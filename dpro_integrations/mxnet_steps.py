"""The end of every iteration of a ``gluon.Trainer``, and of the library under it. Knows nothing of tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dpro_integrations.base import before_call
from dpro_integrations.mxnet_engine import Pace, job_error


def reduced(trainer: Any) -> list[tuple[int, Any]]:
    """Number and parameter of every gradient that ``trainer`` reduces; uninitialised parameters are left out."""
    return [(i, p) for i, p in enumerate(trainer._params) if p.grad_req != "null" and p._grad is not None]


def weights(trainer: Any) -> list[Any]:
    """The arrays that an update writes."""
    return [array for _, parameter in reduced(trainer) for array in parameter.list_data()]


class Steps:
    """Calls ``action`` once after each iteration of ``trainer``, until :meth:`stop`.

    Args:
        trainer: a ``gluon.Trainer``. Its iteration ends where its weights are updated: in ``step()``, or, where the
            job calls ``allreduce_grads()`` itself, in ``update()``.
        action: may call :meth:`stop`. Must not raise.
        ending: called before the job shuts the library down, or where the steps can't be followed any more.
        libraries: modules with the library's ``shutdown``, the one that the job calls first.

    Meanwhile Python is held to one step ahead of the engine (:class:`~dpro_integrations.mxnet_engine.Pace`).
    """

    def __init__(
        self, trainer: Any, action: Callable[[], None], ending: Callable[[], None], libraries: Sequence[ModuleType]
    ) -> None:
        self._trainer = trainer
        self._action, self._ending = action, ending
        self._pace = Pace(lambda: weights(trainer))
        self._stopped = False
        # both step() and update() come by here, also where the job holds on to one of them from before
        self._own: Callable[..., Any] | None = vars(trainer).get("_update")
        self._original: Callable[..., Any] = trainer._update
        trainer._update = self._update
        self._unpatch = before_call("shutdown", libraries, ending)

    def stop(self) -> None:
        """No more calls. Safe to call twice, and from ``action``."""
        self._stopped = True
        self._unpatch()
        # who has patched on top of us still works, and calls ours, which goes when he goes, if he is one of us
        trainer = self._trainer
        while (top := _outermost(trainer)) is not None and top._stopped:
            if top._own is None:
                del trainer._update
            else:
                trainer._update = top._own

    def _update(self, *args: Any, **kwargs: Any) -> Any:
        result = self._original(*args, **kwargs)
        if not self._stopped:
            try:
                self._pace.step()
                self._action()
            except Exception:
                if not self._stopped:
                    self.stop()
                    self._ending()
            # what the job would have been told where it next looks at a result
            if (error := job_error()) is not None:
                raise error
        return result


def _outermost(trainer: Any) -> Steps | None:
    """Whose ``_update`` the trainer has in the place of its own."""
    owner = getattr(vars(trainer).get("_update"), "__self__", None)
    return owner if isinstance(owner, Steps) else None
