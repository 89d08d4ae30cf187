"""Gradient accumulation in a torch job: a step's batch in micro-batches, synchronised after the last.

For that dpro must have a step as a function of its batch: in a plain loop :func:`step` takes the place of the two lines
that compute a loss and its gradients. Until a plan says otherwise, and wherever the batch cannot be cut into equal
parts, it does just what these lines did. That the parts' mean gradient is the whole batch's is not believed but
computed, before any plan is made (:func:`times`): batch norm, dropout, or a loss that is no mean over the samples, are
found out. DDP is told here when to synchronise, Horovod's optimizer in ``horovod_torch``.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: Micro-batches per step that are timed; how often each, and how often at most while that takes less than so long.
PARTS, _TIMES, _MOST_TIMES, _LONG_S = (2, 4, 8), 5, 25, 0.2
#: Share of the largest gradient that rounding may make of a difference between a batch and its parts.
_ROUNDING = 1e-4

LossOf = Callable[[Any, Any], torch.Tensor]


@dataclass
class Cutting:
    """How a job's batches are cut: in ``parts``. ``watched``: what a step was made of is kept in ``seen``.
    ``broke_off`` is called where the job's own code raises in the midst of a step's parts. ``even``: samples of a rank
    if all had as many; a batch of another size counts by its size (0: each rank's counts the same)."""

    parts: int = 1
    even: float = 0.0
    broke_off: Callable[[], None] | None = None
    watched: bool = False
    seen: tuple[LossOf, Any] | None = None


#: Models whose steps go through :func:`step`.
_states: weakref.WeakKeyDictionary[nn.Module, Cutting] = weakref.WeakKeyDictionary()


def step(model: nn.Module, loss_of: LossOf, batch: Any) -> torch.Tensor:
    """Forward and backward pass of one step; the optimizer's is the caller's. Returns the loss, detached.

    Args:
        model: as the job calls it: wrapped by DDP, or the one that is trained under Horovod.
        loss_of: gives of a model and a batch the mean loss over its samples.
        batch: a tensor, or a tuple, list or dict of tensors, samples first.
    """
    state = cutting(model)
    if state.watched:
        state.seen = loss_of, batch
    parts = state.parts
    weight = samples(batch) / state.even if state.even else 1.0
    if parts < 2 or samples(batch) % parts:
        loss = loss_of(model, batch)
        (loss if weight == 1 else loss * weight).backward()
        return loss.detach()
    try:
        return _in_parts(model, loss_of, batch, parts, weight)
    except BaseException:
        if state.broke_off is not None:
            state.broke_off()
        raise


def _in_parts(model: nn.Module, loss_of: LossOf, batch: Any, parts: int, weight: float) -> torch.Tensor:
    total: torch.Tensor | None = None
    for number in range(parts):
        held = isinstance(model, DistributedDataParallel) and number < parts - 1
        with model.no_sync() if held else nullcontext():
            loss = loss_of(model, part_of(batch, number, parts)) / parts
            (loss if weight == 1 else loss * weight).backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def cutting(model: nn.Module) -> Cutting:
    """What says how its batches are cut; from now on they can be."""
    return _states.setdefault(model, Cutting())


def can_cut(model: nn.Module) -> bool:
    """Whether the job's steps go through :func:`step`."""
    return model in _states


def set_parts(model: nn.Module, parts: int) -> None:
    """Cut each batch from now on into ``parts``; 1: not at all."""
    if model in _states:
        _states[model].parts = parts


def watch(model: nn.Module, watched: bool) -> None:
    """Keep what the latest step was made of, for :func:`times`, or let go of it."""
    if model in _states:
        _states[model].watched, _states[model].seen = watched, None


@torch.random.fork_rng()
def times(model: nn.Module) -> dict[int, int]:
    """What a forward and backward pass over a part of the batch takes, parts per batch -> ns; with 1, the whole.

    Away from the training: nothing is accumulated or synchronised, no gradient of the job's is touched. Beside
    those there is one set of gradients at a time, as the job may be short of memory. Adding a part's gradients to
    those before it is counted in. Empty where the job's batch can't be cut.

    Raises:
        RuntimeError: parts of a batch give other gradients than the batch, or change what the model keeps.
    """
    seen = _states[model].seen if model in _states else None
    if seen is None:
        return {}
    loss_of, batch = seen
    counts = [parts for parts in PARTS if samples(batch) >= parts and not samples(batch) % parts]
    if not counts:
        return {}
    if isinstance(model, DistributedDataParallel):
        model = model.module
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = [buffer.clone() for buffer in model.buffers()]

    def gradients(part: Any) -> object:
        return torch.autograd.grad(loss_of(model, part), parameters, allow_unused=True)

    try:
        rest = _apart(partial(loss_of, model), parameters, batch, counts[0])
        if any(not torch.equal(old, new) for old, new in zip(kept, model.buffers(), strict=True)):
            raise RuntimeError("a forward pass changes what the model keeps")
        adding_ns = min(_timed(partial(torch._foreach_add_, rest, rest)) for _ in range(_TIMES))
        del rest
        # each part's time beside the whole's, in turns: what else the machine does, it does to both
        taken: dict[int, list[float]] = {parts: [] for parts in counts}
        whole_ns: list[int] = []
        begin = time.perf_counter()
        while len(whole_ns) < _TIMES or (len(whole_ns) < _MOST_TIMES and time.perf_counter() - begin < _LONG_S):
            whole_ns.append(_timed(partial(gradients, batch)))
            for parts in counts:
                part_ns = _timed(partial(gradients, part_of(batch, 0, parts)))
                taken[parts].append((part_ns + adding_ns * (parts - 1) / parts) / whole_ns[-1])
        once_ns = statistics.median(whole_ns)
        return {1: round(once_ns)} | {parts: round(once_ns * statistics.median(taken[parts])) for parts in counts}
    finally:
        with torch.no_grad():
            for old, new in zip(kept, model.buffers(), strict=True):
                new.data.copy_(old)


def _apart(
    loss_of: Callable[[Any], torch.Tensor], parameters: list[torch.nn.Parameter], batch: Any, parts: int
) -> list[torch.Tensor]:
    """The whole batch's gradients less the mean of its parts'. This one set is all that is held: a gradient is added to
    it, or taken off, as soon as it is there, and nothing is left of it then.

    Raises:
        RuntimeError: they are not alike.
    """
    rest = [torch.zeros_like(p) for p in parameters]
    share = 1.0

    def taken(into: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        into.add_(gradient, alpha=share)
        return into.new_zeros(()).expand_as(into)  # in its place, of no size

    handles = [p.register_hook(partial(taken, into)) for p, into in zip(parameters, rest, strict=True)]
    try:
        torch.autograd.grad(loss_of(batch), parameters, allow_unused=True)
        largest = _largest(rest)
        share = -1 / parts
        for number in range(parts):
            torch.autograd.grad(loss_of(part_of(batch, number, parts)), parameters, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    if not _largest(rest) <= _ROUNDING * largest:
        raise RuntimeError("parts of a batch give other gradients than the batch (batch norm, dropout, no mean loss)")
    return rest


def _largest(gradients: list[torch.Tensor]) -> float:
    """Of all their values, without the sign; NaN where one is."""
    norms = [torch.linalg.vector_norm(g, float("inf")).double() for g in gradients if g.numel()]
    return float(torch.stack(norms).max()) if norms else 0.0


def _timed(call: Callable[[], object]) -> int:
    """One run, ns."""
    begin = time.perf_counter_ns()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return max(1, time.perf_counter_ns() - begin)


def samples(batch: Any) -> int:
    """How many samples there are in all tensors alike; 1, which no number divides, where that is not so."""
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in _tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else 1


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def part_of(batch: Any, number: int, parts: int) -> Any:
    """Part ``number`` of ``parts`` that are equal; what is no tensor stays whole."""
    if isinstance(batch, torch.Tensor):
        size = batch.shape[0] // parts
        return batch[number * size : (number + 1) * size]
    if isinstance(batch, dict):
        return type(batch)({key: part_of(value, number, parts) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(part_of(value, number, parts) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(part_of(value, number, parts) for value in batch)
    return batch
