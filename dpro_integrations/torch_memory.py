"""What takes a torch job's memory: which units its model has, and marks of when each begins and ends.

Knows modules and torch's allocator; what comes of it is in :mod:`dpro.trace.memory`. A unit is a module below the root,
its Sequentials and its lists of blocks: what a person would name when asked for the model's layers. In a captured step
each has three marks in the profile: its forward pass begins, has ended, its backward pass begins (a hook on the node of
its output: a module's own backward hooks would put nodes into the graph).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from dpro.trace.kineto import Allocation
from dpro.trace.memory import AFTER, BACKWARD, FORWARD, MEMORY, Mark, dump, marks_of, profile
from dpro.trace.model import RankTrace
from dpro_integrations.torch_forward import HOOKS, ForwardHook

#: Their running statistics change in a forward pass; ``torch_recompute`` holds them still in the second one.
NORMS = nn.modules.batchnorm._NormBase
#: As the profiler numbers them.
_CPU, _CUDA = 0, 1


def units(model: nn.Module) -> dict[str, tuple[nn.Module, bool]]:
    """Name -> module, and whether it is of a Sequential and comes right after the unit before."""
    found: dict[str, tuple[nn.Module, bool]] = {}
    total = sum(1 for _ in model.parameters())

    def descend(module: nn.Module, prefix: str) -> None:
        chained = type(module) is nn.Sequential and "forward" not in vars(module)
        first = True
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            most = 2 * sum(1 for _ in child.parameters()) > total and any(True for _ in child.children())
            if most or _opens(child):
                descend(child, f"{name}.")
                first = True
            else:
                found[name] = child, chained and not first
                first = False

    descend(model, "")
    return found


def _opens(module: nn.Module) -> bool:
    """Whether it is no unit but holds some: a container, or what stands around most of the model's blocks."""
    if type(module) in (nn.Sequential, nn.ModuleList):
        return True
    whole = sum(1 for _ in module.parameters())
    for part in module.modules():
        if type(part) not in (nn.Sequential, nn.ModuleList) or len(part) < 2:
            continue
        kinds = {type(child) for child in part.children()}
        alike = len(kinds) == 1 and not isinstance(next(part.children()), nn.Sequential)
        if (
            alike
            and 2 * sum(1 for _ in part.parameters()) > whole
            and any(True for _ in next(part.children()).children())
        ):
            return True
    return False


def why_not_twice(module: nn.Module) -> str:
    """Why its forward pass must not be run a second time in a step; '' if it may."""
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            return "its statistics are of all ranks"
        if isinstance(part, torch.jit.ScriptModule) or hasattr(part, "_orig_mod") or _compiled(part):
            return "it is compiled"
        if any(_foreign(getattr(part, hooks, None)) for hooks in HOOKS):
            return "it has hooks, or a module in it has"
        if isinstance(part, nn.RNNBase) and part.dropout > 0:
            return "its dropout keeps a state of its own"
    return ""


def _foreign(hooks: Any) -> bool:
    """Whether any of them is not ours: in a run of modules those of its members would be called twice."""
    return any(not isinstance(hook, ForwardHook) for hook in (hooks or {}).values())


def _compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


class Meter:
    """From construction to :meth:`detach`: marks in every step; :meth:`begin` is told when one begins.

    Args:
        model: the module itself, not its wrapper.
        unseen_bytes: allocated by what Python does not see (DDP's buckets).

    Raises:
        RuntimeError: it is compiled.
    """

    def __init__(self, model: nn.Module, on_gpu: bool, unseen_bytes: Callable[[], int]) -> None:
        if any(_compiled(part) or hasattr(part, "_orig_mod") for part in model.modules()):
            raise RuntimeError("memory can't be told apart in a compiled model")
        self._on_gpu, self._unseen = on_gpu, unseen_bytes
        self._steps: list[dict[int, tuple[int, ...]]] = []
        self._base: list[int] = []
        self._units = units(model)
        self._refused = [why_not_twice(module) for module, _ in self._units.values()]
        self._versions: dict[int, list[int]] = {}
        self._handles: list[Any] = []
        for number, (module, _) in enumerate(self._units.values()):
            self._handles.append(module.register_forward_pre_hook(_ToldHook(self._before(number))))
            self._handles.append(module.register_forward_hook(_ToldHook(self._after(number))))

    def begin(self) -> None:
        """A step begins. What is there then is counted once, as the second one does: by then what the first frees
        was allocated under the profiler."""
        counts = len(self._base) == 1
        unseen = 0 if self._on_gpu else self._unseen()
        self._base.append(allocated_bytes(self._on_gpu) + unseen if counts or not self._base else 0)
        self._steps.append({})

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def add_to(self, trace: RankTrace, allocations: list[Allocation], steps: int) -> None:
        """Put the profile of the second step (the first, where it is the only one) into ``trace.meta.extra``."""
        step = min(1, steps - 1)
        device = _CUDA if self._on_gpu else _CPU
        events = [(at, address, nbytes) for at, kind, address, nbytes in allocations if kind == device]
        begin, end = trace.step_bounds[step].tolist()
        outputs = self._steps[step]
        marks = [
            Mark(at, label, outputs.get(int(label.removeprefix(AFTER)), ()) if label.startswith(AFTER) else ())
            for at, label in marks_of(trace, begin, end)
        ]
        listed = [
            (name, follows, refused)
            for (name, (_, follows)), refused in zip(self._units.items(), self._refused, strict=True)
        ]
        trace.meta.extra[MEMORY] = dump(profile(events, marks, (begin, end), self._base[step], listed))

    # -- parts ---------------------------------------------------------------------------------

    def _before(self, number: int) -> Callable[..., None]:
        def begins(module: nn.Module, *_: Any) -> None:
            self._versions[number] = [b._version for b in _buffers(module)]
            _mark(f"{FORWARD}{number}")

        return begins

    def _after(self, number: int) -> Callable[..., None]:
        def ended(module: nn.Module, _: Any, output: Any) -> None:
            if not self._refused[number] and [b._version for b in _buffers(module)] != self._versions.get(number):
                self._refused[number] = "its forward pass changes a buffer"
            tensors = list(_tensors(output))
            if self._steps:
                self._steps[-1][number] = tuple(t.untyped_storage().data_ptr() for t in tensors)
            _mark(f"{AFTER}{number}")
            seen = False

            def backward(*_: Any) -> None:
                nonlocal seen
                if not seen:
                    seen = True
                    _mark(f"{BACKWARD}{number}")

            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(backward)

        return ended


def allocated_bytes(on_gpu: bool) -> int:
    """Bytes that torch has allocated for tensors now; on the host, for those that Python knows."""
    if on_gpu:
        return int(torch.cuda.memory_allocated())
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.layout == torch.strided and item.device.type == "cpu":
            with contextlib.suppress(RuntimeError, NotImplementedError):  # one without memory (a compiler's)
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _ToldHook(ForwardHook):
    """A :class:`ForwardHook` whose action is told what the hook is."""

    def __call__(self, module: nn.Module, *told: Any) -> None:
        if self._action is not None:
            if not torch.compiler.is_compiling():
                self._action(module, *told)  # type: ignore[call-arg]
            return
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]


def _mark(label: str) -> None:
    with record_function(label):
        pass


def _buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    """Those that must not change."""
    for part in module.modules():
        if not isinstance(part, NORMS):
            yield from part.buffers(recurse=False)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
