"""Which submodules of a torch model could be compiled, and what that is worth: timed away from the training.

Candidates are the blocks a model is made of: submodules that hold several layers and no block of their own, none in
another. While a capture runs it is noted when each is called and with what (:class:`LayerMarks`), so that the graph
knows its ops. Those that look alike are one kind, of which one is timed: its forward and backward pass, compiled and as
it is in turns, on data of the captured shapes. Nothing of the job is changed (``torch_compile.passes``).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from dpro.trace.model import EventKind, RankTrace
from dpro.trace.regions import LAYERS, Region, RegionTime
from dpro_integrations.torch_compile import (
    apart,
    called,
    compiled,
    passes,
    start_compiler,
    why_no_compiler,
    why_not,
)
from dpro_integrations.torch_forward import CallHook

_BACKWARD = "autograd::engine::evaluate_function"
#: A block of more layers compiles for too long, and hands over all of its gradients at once.
_MOST_LAYERS = 24
#: A kind that has less of the captured compute is not worth the trial.
_LEAST_SHARE = 0.005
_TURNS = 9


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of ``model`` that could be compiled, by name, in the model's order; none in another."""
    if why_no_compiler() or model._compiled_call_impl is not None:
        return {}
    twice = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}

    def walk(around: nn.Module, prefix: str) -> None:
        for name, part in around.named_children():
            if not any(True for _ in part.children()):
                continue
            shared = any(twice[id(inner)] > 1 for inner in part.modules())
            if _is_block(part) and not shared and not why_not(part):
                found[prefix + name] = part
            else:
                walk(part, f"{prefix}{name}.")

    walk(model, "")
    return found


def _is_block(module: nn.Module) -> bool:
    """Whether it holds several layers, but no blocks that are repeated."""
    if isinstance(module, nn.Sequential) and len(_composites(module)) > 1:
        return False
    leaves = sum(not any(True for _ in part.children()) for part in module.modules())
    return 1 < leaves <= _MOST_LAYERS and not any(_repeats(part) for part in module.modules())


def _composites(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.children() if any(True for _ in part.children())]


def _repeats(module: nn.Module) -> bool:
    """Whether it is a list with two blocks that look alike."""
    looks = Counter((type(part), repr(_weights(part))) for part in _composites(module))
    return isinstance(module, (nn.Sequential, nn.ModuleList)) and max(looks.values(), default=0) > 1


def _weights(module: nn.Module) -> list[Any]:
    return [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in module.parameters()]


@dataclass(frozen=True)
class _Spec:
    """A tensor of numbers that need not be kept to make another like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class _Call:
    """How a submodule was called first."""

    args: Any
    kwargs: Any
    #: autocast's state by device
    autocast: tuple[tuple[str, bool, torch.dtype], ...]


class LayerMarks:
    """When each candidate is called while a capture runs, and how it was called first.

    Args:
        model: names are below it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = candidates(model)
        #: name, begin and end (CLOCK_MONOTONIC, ns), numbers that the first node of its backward pass has and the first
        #: one after it
        self.calls: list[tuple[str, int, int, int, int]] = []
        self.first: dict[str, _Call] = {}
        self._open: dict[str, tuple[int, int]] = {}

    def attach(self) -> list[Any]:
        """Handles of hooks, to be removed."""
        handles: list[Any] = []
        for name, module in self.modules.items():
            handles.append(module.register_forward_pre_hook(CallHook(self._begins(name)), with_kwargs=True))
            handles.append(module.register_forward_hook(CallHook(self._ends(name))))
        return handles

    def _begins(self, name: str) -> Callable[..., None]:
        def begins(args: Any, kwargs: Any) -> None:
            if not torch.is_grad_enabled():
                return
            if name not in self.first:
                self.first[name] = _Call(tree_map(_spec, args), tree_map(_spec, kwargs), _autocast())
            self._open[name] = time.monotonic_ns(), torch.autograd._get_sequence_nr()

        return begins

    def _ends(self, name: str) -> Callable[..., None]:
        def ends(*_: Any) -> None:
            if name in self._open:
                begin, node = self._open.pop(name)
                self.calls.append((name, begin, time.monotonic_ns(), node, torch.autograd._get_sequence_nr()))

        return ends

    def mark(self, trace: RankTrace) -> None:
        """Note in ``trace`` (on CLOCK_MONOTONIC) which ops are of which candidate, forward and backward.

        Only of those that are called once a step: of others no op can stand for all.
        """
        step = trace.step_at(np.array([begin for _, begin, *_ in self.calls], dtype=np.int64))
        often = Counter(zip((call[0] for call in self.calls), step.tolist(), strict=True))
        once = {name for name, _ in often} - {name for (name, at), count in often.items() if count > 1 and at >= 0}
        self.modules = {name: part for name, part in self.modules.items() if name in once}
        if not self.modules:
            return
        layers = list(self.modules)
        trace.meta.extra[LAYERS] = layers
        number = {name: at for at, name in enumerate(layers)}
        ops = trace.kind == EventKind.CPU_OP
        is_node = np.isin(trace.name, [i for i, name in enumerate(trace.names) if name.startswith(_BACKWARD)])
        marks = (trace.kind == EventKind.ANNOTATION) & np.isin(
            trace.name, [i for i, name in enumerate(trace.names) if name.startswith("ProfilerStep")]
        )
        main = np.isin(trace.resource, trace.resource[marks])
        for name, begin, end, first, after in self.calls:
            if name in number:
                inside = ops & main & ~is_node & (trace.start >= begin) & (trace.start < end)
                inside |= ops & is_node & (trace.flow >= first) & (trace.flow < after)
                trace.columns["link"][inside] = number[name]


def time_regions(marks: LayerMarks, names: dict[int, str], trace: RankTrace, budget_s: float) -> list[Region]:
    """Time the candidates that ``marks`` saw, those first that took most of the captured steps, until the time is up.

    What can't be timed is left out, with a line among the trace's warnings: what breaks a graph, fails, or comes out
    otherwise; a kind that alone took longer than ``budget_s``. Ends with the compiling that is under way when the time
    is up; it is counted from when the compiler has started.

    Args:
        names: of the gradients that are synchronised, by the id of their parameter.
    """
    kinds: dict[str, list[str]] = {}
    for name, module in marks.modules.items():
        if name in marks.first and not why_not(module):
            kinds.setdefault(_kind(module, marks.first[name]), []).append(name)
    took = _captured_ns(trace)
    share = {kind: sum(took[name] for name in alike) for kind, alike in kinds.items()}
    least = _LEAST_SHARE * sum(trace.step_ns().tolist())
    found: list[Region] = []
    if kinds and (why := start_compiler()):
        trace.warnings.append(f"no submodule can be compiled: {why}")
        return found
    deadline = time.monotonic() + budget_s
    for kind in sorted(kinds, key=lambda kind: -share[kind]):
        first = kinds[kind][0]
        if share[kind] < least:
            break
        if time.monotonic() >= deadline:
            trace.warnings.append(f"submodules such as {first!r} not timed: the time for it was up (regions_s)")
            break
        began = time.monotonic()
        timed = _timed(marks.modules[first], marks.first[first])
        if isinstance(timed, RegionTime) and time.monotonic() - began > budget_s:
            timed = f"it compiles for more than {budget_s:.3g} s (regions_s)"
        if isinstance(timed, str):
            trace.warnings.append(f"submodules such as {first!r} are not to be compiled: {timed}")
            continue
        for name in kinds[kind]:
            weights = (names.get(id(p), "") for p in marks.modules[name].parameters())
            found.append(Region((name,), tuple(filter(None, weights)), kind, timed))
    return found


def _captured_ns(trace: RankTrace) -> Counter[str]:
    """Captured time by candidate, all steps together: of outermost ops, as far as one can be told from those in it."""
    layers = trace.meta.extra.get(LAYERS, [])
    found: Counter[str] = Counter()
    until = 0
    rows = np.flatnonzero((trace.link >= 0) & (trace.kind == EventKind.CPU_OP) & (trace.step >= 0))
    columns = (trace.columns[key][rows].tolist() for key in ("link", "start", "end"))
    for layer, start, end in zip(*columns, strict=True):
        if start >= until:
            found[layers[layer]] += end - start
            until = end
    return found


def _kind(module: nn.Module, call: _Call) -> str:
    """Equal for submodules that compute alike, as far as one sees from outside."""
    given = tree_map(_looks, (call.args, call.kwargs)), call.autocast, module.training
    told = type(module).__qualname__, repr(module), _weights(module), given
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _looks(value: Any) -> Any:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else value


def _timed(module: nn.Module, call: _Call) -> RegionTime | str:
    """Or why not."""
    drawn = torch.Generator().manual_seed(0)  # a generator of our own
    args, kwargs = (tree_map(lambda value: _like(value, drawn), given) for given in (call.args, call.kwargs))
    way = compiled(module)
    with ExitStack() as stack:
        for context in _autocasts(call):
            stack.enter_context(context)
        if why := apart(module, way, args, kwargs):
            return why
        turns = [
            (passes(module, module._call_impl, args, kwargs), passes(module, called(way), args, kwargs))
            for _ in range(_TURNS)
        ]
    # the shortest: all else is somebody else's work
    plain, fused = zip(*turns, strict=True)
    return RegionTime(
        min(one.forward_ns for one in plain),
        min(one.backward_ns for one in plain),
        min(one.forward_ns for one in fused),
        min(one.backward_ns for one in fused),
    )


# -- what a submodule is called with ---------------------------------------------------------------


def _spec(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value.detach() if isinstance(value, torch.Tensor) else value
    return _Spec(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)


def _like(value: Any, drawn: torch.Generator) -> Any:
    if not isinstance(value, _Spec):
        return value
    numbers = torch.randn(value.shape, generator=drawn).to(value.device, value.dtype)
    if 0 not in value.stride:
        numbers = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(numbers)
    return numbers.requires_grad_(value.requires_grad)


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )


def _autocasts(call: _Call) -> Iterator[AbstractContextManager[Any]]:
    for device, enabled, dtype in call.autocast:
        if enabled:
            yield torch.autocast(device, dtype=dtype)
