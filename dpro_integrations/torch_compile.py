"""Submodules of a torch model compiled by inductor, each where it is called in training; everything else is left alone.

What ``submodule.compile()`` puts on a submodule is put on it here, and taken off again. Knows how a submodule is tried
and called compiled, not which ones are worth it (``torch_regions``).

A compiler may refuse, break a graph in two, or be wrong: the first call that a plan's submodule gets in training
compiles it, forward and backward, on data of its own, and compares what comes of it with what comes without. What does
not pass goes on as it is. So does each call that differs from the first in shapes: nothing is ever compiled anew in the
midst of training.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from dpro.errors import PlanError
from dpro_integrations.base import put_on
from dpro_integrations.torch_forward import HOOKS

#: How far results may be from those without a compiler, by their norm: it adds up in another order. Gradients may be
#: farther: what lies at a kink (ReLU's) falls on either side; one value in a million that does makes 1e-3 of the norm.
_APART = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_GRADIENTS_APART = 1e-2
#: Of the same random numbers as without; no threads and processes that outlive the compiling.
_OPTIONS = {"fallback_random": True, "compile_threads": 1}
#: What compiling may take in all, s, before the rest goes on as it is: all ranks wait in their next collective.
LIMIT_S = 120.0
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_SYNCHRONISING = ("torch.nn.parallel", "torch.distributed", "horovod")


def why_no_compiler() -> str:
    """Why nothing can be compiled here; "" it can."""
    if not hasattr(torch, "compile") or not hasattr(torch.compiler, "set_stance"):
        return "this torch has no torch.compile that keeps from compiling anew"
    if any(vars(nn.modules.module)[f"_global{name}"] for name in HOOKS):
        return "there are hooks on all modules"
    return ""


def why_not(module: nn.Module) -> str:
    """Why ``module`` can't be compiled on its own with the same effects; "" it can, as far as one sees from outside."""
    if isinstance(module, (_CONTAINERS, torch.jit.ScriptModule)):
        return "has no forward pass to compile"
    for part in module.modules():
        if _is_compiled(part):
            return "is compiled already"
        if "forward" in vars(part) or any(getattr(part, name) for name in HOOKS):
            return "has hooks, or a forward of its own"
        if type(part).__module__.startswith(_SYNCHRONISING) or isinstance(part, nn.SyncBatchNorm):
            return "synchronises on its own"
    if any(parameter._backward_hooks for parameter in module.parameters()):
        return "has parameters with hooks"
    return ""


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _above(name: str) -> list[str]:
    """The names of what is around a submodule, the model itself aside."""
    return [name[:at] for at, letter in enumerate(name) if letter == "."]


class CompiledRegions:
    """The compiled submodules of one model; none at first.

    Args:
        model: names are below it, as in ``named_modules()``.
        say: takes one line where a submodule goes on as it is.
        limit_s: see :data:`LIMIT_S`.
    """

    def __init__(self, model: nn.Module, say: Callable[[str], None], limit_s: float = LIMIT_S) -> None:
        self._model, self._say, self._limit_s = model, say, limit_s
        #: all that were tried, in force or not: a plan that comes again compiles nothing again
        self._made: dict[str, _Compiled] = {}
        self._in_force: set[str] = set()
        self._spent_s = 0.0
        self._told = False

    @property
    def names(self) -> tuple[str, ...]:
        """Submodules that are called compiled, or are to be from their next call on."""
        return tuple(sorted(name for name in self._in_force if not self._made[name].refused))

    def check(self, names: Iterable[str]) -> None:
        """Refuse what can't be compiled, before anything is changed.

        Raises:
            PlanError: the model has no such submodule; it, or one around it, can't be compiled on its own.
        """
        names = set(names)
        if names and (reason := why_no_compiler()):
            raise PlanError(reason)
        for name in sorted(names - self._in_force):
            try:
                module = self._model.get_submodule(name)
            except AttributeError:
                raise PlanError(f"the model has no submodule {name!r}") from None
            if not name or (reason := why_not(module)):
                raise PlanError(f"submodule {name!r} {reason if name else 'is the whole model'}")
            if any(_is_compiled(self._model.get_submodule(outer)) for outer in ("", *_above(name))):
                raise PlanError(f"submodule {name!r} is in a part of the model that is compiled already")
        for name in sorted(names):
            if around := next((outer for outer in _above(name) if outer in names), ""):
                raise PlanError(f"submodule {name!r} is in {around!r}, which is to be compiled as a whole")

    def set(self, names: Iterable[str]) -> None:
        """Have these submodules compiled at their next call in training, and no others.

        Raises:
            PlanError: as :meth:`check`; nothing was changed.
        """
        names = set(names)
        self.check(names)
        for name in self._in_force - names:
            self._made[name].remove()
        for name in names - self._in_force:
            module = self._model.get_submodule(name)
            if name not in self._made or self._made[name].module is not module:
                self._made[name] = _Compiled(name, module, self)
            self._made[name].put_on()
        self._in_force = names

    def forget(self) -> None:
        """Let go of what is not in force."""
        self._made = {name: self._made[name] for name in self._in_force}

    def try_out(self, one: _Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a submodule is not to be called compiled; "" it is."""
        if self._spent_s > self._limit_s:
            reason = f"the others took more than {self._limit_s:.0f} s to compile"
        else:
            began = time.monotonic()
            reason = apart(one.module, one.fast, args, kwargs)
            self._spent_s += time.monotonic() - began
        self.refused(one.name, reason)
        return reason

    def refused(self, name: str, reason: str) -> None:
        """One line for the first of a plan's submodules."""
        if reason and not self._told:
            self._told = True
            self._say(f"submodule {name!r} (and maybe others) not compiled: {reason}; it goes on as it was")


class _Compiled:
    """Stands in ``_compiled_call_impl`` of one submodule."""

    def __init__(self, name: str, module: nn.Module, regions: CompiledRegions) -> None:
        self.name, self.module, self._regions = name, module, regions
        self._eager = module._call_impl
        self.fast = compiled(module)
        self._called = called(self.fast)
        self._shapes: Any = None
        self.refused = False

    def put_on(self) -> None:
        #: lets the submodule go
        self.remove = put_on(self.module, "_compiled_call_impl", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.refused or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._eager(*args, **kwargs)
        if any(getattr(self.module, name) for name in HOOKS):  # put on it since: only the plain call sees them
            return self._eager(*args, **kwargs)
        shapes = _shapes(args, kwargs)
        if self._shapes is None:
            self._shapes = shapes
            self.refused = bool(self._regions.try_out(self, args, kwargs))
        if self.refused or shapes != self._shapes:
            return self._eager(*args, **kwargs)
        try:
            return self._called(*args, **kwargs)
        except Exception as error:  # the model's own error comes again without
            self.refused = True
            self._regions.refused(self.name, f"{type(error).__name__}: {error}")
            return self._eager(*args, **kwargs)


def compiled(module: nn.Module) -> Callable[..., Any]:
    """``module``'s forward pass compiled to one graph, at its first call; any break in the graph raises."""

    # a function of ours: the compiler leaves frames alone that are torch's own, nn.Sequential's forward for one
    def region(*args: Any, **kwargs: Any) -> Any:
        return module.forward(*args, **kwargs)

    apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    found: Callable[..., Any] = torch.compile(region, fullgraph=True, dynamic=False, options=_OPTIONS, **apart)
    return found


def start_compiler() -> str:
    """Have the compiler do what it does once in a process: import itself, look at the machine, compile its headers.

    Why it can't compile at all; "" it can.
    """
    with torch.random.fork_rng([]):  # its weights are drawn
        least = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    return apart(least, compiled(least), (torch.ones(2, 2),), {})


def called(fast: Callable[..., Any]) -> Callable[..., Any]:
    """``fast`` as it is called in training: compiled for what it was tried with, and as it is for all else."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("eager_on_recompile"):
            return fast(*args, **kwargs)

    return call


@dataclass
class Passes:
    """What came of one forward and one backward pass."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: list[torch.Tensor]
    forward_ns: int
    backward_ns: int


def passes(module: nn.Module, way: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passes:
    """Call ``way``, which is ``module``'s forward pass, forward and backward, and leave nothing of it.

    Gradients go nowhere but here: no hook on them, DDP's for one, sees any (``torch.autograd.grad``). Buffers, what the
    module keeps, and generators are as before.
    """
    leaves: list[torch.Tensor] = []

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        leaf = value.detach().clone()
        if value.requires_grad:
            leaves.append(leaf.requires_grad_())
            return leaf.clone()  # a module may write to what it is given
        return leaf

    with _untouched(module), torch.enable_grad():
        mine, named = tree_map(own, args), tree_map(own, kwargs)
        begin = time.perf_counter_ns()
        out = way(*mine, **named)
        middle = time.perf_counter_ns()
        results = [value for value in tree_flatten(out)[0] if isinstance(value, torch.Tensor)]
        roots = [value for value in results if value.requires_grad]
        wanted = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
        drawn = torch.Generator().manual_seed(0)  # not all alike: of a norm's sum there is no gradient but rounding
        towards = [torch.randn(root.shape, generator=drawn).to(root.device, root.dtype) for root in roots]
        again = time.perf_counter_ns()
        found = torch.autograd.grad(roots, wanted, towards, allow_unused=True)
        end = time.perf_counter_ns()
        state = [*(buffer.clone() for buffer in module.buffers()), torch.get_rng_state()]
    gradients = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]
    return Passes([r.detach() for r in results], gradients, state, middle - begin, end - again)


def apart(module: nn.Module, way: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Compile ``way`` and say in what it differs from ``module``'s own forward and backward pass; "" in nothing."""
    import torch._dynamo

    try:
        plain = passes(module, module.forward, args, kwargs)
        # DDP would have a graph cut by its buckets: a region is one graph, whose place among them is planned
        with torch._dynamo.config.patch(optimize_ddp=False):
            fused = passes(module, way, args, kwargs)
    except Exception as error:  # the compiler's; one of the model's comes again when it is called without
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    for what, least in ("results", 0.0), ("gradients", _GRADIENTS_APART), ("state", 0.0):
        if not _near(getattr(plain, what), getattr(fused, what), least):
            return f"compiled it has other {what}"
    return ""


def _near(plain: list[torch.Tensor], fused: list[torch.Tensor], least: float) -> bool:
    """All of them together, by their norm, to :data:`_APART` or ``least``; what is no float to the bit."""
    if [(t.shape, t.dtype) for t in plain] != [(t.shape, t.dtype) for t in fused]:
        return False
    floats = [pair for pair in zip(plain, fused, strict=True) if pair[0].is_floating_point()]
    if not all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True) if not a.is_floating_point()):
        return False
    limit = max((_APART.get(a.dtype, 0.0) for a, _ in floats), default=0.0)
    limit = max(limit, least)
    far = sum(float((a.double() - b.double()).square().sum()) for a, b in floats)
    size = sum(float(a.double().square().sum()) for a, _ in floats)
    return bool(far**0.5 <= limit * size**0.5)  # not so where one of them is no number


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Whatever a forward pass changes of ``module`` or draws, undone: the very objects are put back."""
    kept: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
    for part in module.modules():
        own = vars(part)
        inside = [(value, value.copy()) for value in own.values() if isinstance(value, (dict, list, set))]
        kept.append((own, dict(own), inside))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.detach().clone()
    drawn = random.getstate()
    devices = {t.device for t in module.parameters() if t.is_cuda}
    try:
        with torch.random.fork_rng([d.index for d in devices]):
            yield
    finally:
        random.setstate(drawn)
        for own, was, inside in kept:
            own.clear()
            own.update(was)
            for value, content in inside:
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What must be as at first for a compiled call."""
    flat = (
        args
        if not kwargs and all(isinstance(value, torch.Tensor) for value in args)
        else tree_flatten((args, kwargs))[0]
    )
    return [(v.shape, v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else type(v) for v in flat]
