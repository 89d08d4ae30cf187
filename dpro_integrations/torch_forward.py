"""Hooks on a model's forward, and what stands in for its methods, which a job can neither save nor copy by mistake.

Knows nothing of tuning. For capture, for :func:`before_next_forward`, and for plans that change how a module is run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from dpro_integrations.torch_rewrap import reducer_parameters

#: Where a module keeps the hooks that its calls run.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def before_next_forward(module: nn.Module, action: Callable[[], None]) -> None:
    """Call ``action`` once, as the next forward of ``module`` begins.

    For hooks that take themselves away: an optimizer walks its live dictionary of hooks, in which
    nothing may be removed meanwhile, and the job may have hooks behind ours. A module walks a copy.
    """

    def once() -> None:
        handle.remove()
        action()

    handle = module.register_forward_pre_hook(ForwardHook(once))


class OrderWatch:
    """From construction to :meth:`ends_early`, over a step: does the next forward begin before the step ends?

    Such a job (delayed gradients) holds a graph of the present reducer at every step's end, so that
    there is no moment at which the reducer may be replaced.
    """

    def __init__(self, ddp: Any) -> None:
        self._open = False
        self._seen = False
        self._handles = [ddp.register_forward_pre_hook(ForwardHook(self._forward))]
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self._accumulated) for _, parameter in reducer_parameters(ddp)
        ]

    def ends_early(self) -> bool:
        """Take the hooks away; whether a forward was begun after the last gradient was there."""
        for handle in self._handles:
            handle.remove()
        return self._open and self._seen

    def _forward(self) -> None:
        self._open |= torch.is_grad_enabled()

    def _accumulated(self, _: torch.Tensor) -> None:
        self._open, self._seen = False, True


class ForwardHook:
    """A forward hook; in a copied or pickled model one that does nothing."""

    def __init__(self, action: Callable[[], None] | None) -> None:
        self._action = action

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._action is not None:
            self._action()
            return
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHook:
        return type(self)(None)

    def __reduce__(self) -> Any:
        # not ours: a model that was saved must load where there is no dpro
        return getattr, (nullcontext(), "__exit__")


class CallHook(ForwardHook):
    """One whose action is told what the module is called with."""

    def __init__(self, action: Callable[..., None] | None) -> None:
        super().__init__(None)
        self._told = action

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if self._told is not None:
            self._told(*given)
        else:
            super().__call__(module)


class StandIn:
    """Is put on a module itself, as its method ``name``, and does ``call``; a copied or pickled module has the method
    that it would have without."""

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name, self._call = module, name, call
        self._plain = getattr(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain, memo)

    def __reduce__(self) -> Any:
        return getattr, (self._module, self._name)  # of the new module, which has none of its own yet
