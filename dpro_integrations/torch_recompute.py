"""Re-computation in a torch job: chosen blocks run their forward pass again instead of keeping what it made.

``torch.utils.checkpoint`` (the non-reentrant one, with the generators' states kept: dropout draws the same mask) around
the forward of a module, or around a run of modules inside their Sequential's forward, put on the objects themselves and
taken off again. What a second forward pass would change is held still: batch norm's running statistics. Blocks that
change anything else are refused when they are measured (``torch_memory``).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpro.errors import PlanError
from dpro_integrations.base import put_on
from dpro_integrations.torch_forward import StandIn
from dpro_integrations.torch_memory import NORMS, units, why_not_twice

#: Where a run of modules begins and ends (exclusive) in its Sequential.
_Run = tuple[int, int]


def check_blocks(model: nn.Module, blocks: Iterable[str]) -> None:
    """Refuse what :func:`recompute` could not do.

    Raises:
        PlanError: no such block, one that must not run twice, or one module in two blocks.
    """
    _found(model, blocks)


def recompute(model: nn.Module, blocks: Iterable[str]) -> Callable[[], None]:
    """Have ``blocks`` recomputed from the next forward on. Returns the undo.

    Args:
        model: the module itself, not its wrapper.
        blocks: as in ``plan.recompute``: a module's name, or ``<first>..<last key>`` of a Sequential.

    Raises:
        PlanError: as :func:`check_blocks`, before anything is changed.
    """
    single, runs = _found(model, blocks)
    undone = [
        put_on(module, "forward", StandIn(module, "forward", _again(module.forward, [module]))) for module in single
    ]
    for chain, cuts in runs.items():
        undone.append(put_on(chain, "forward", StandIn(chain, "forward", _in_runs(chain, sorted(cuts)))))

    def undo() -> None:
        for one in reversed(undone):
            one()

    return undo


def _found(model: nn.Module, blocks: Iterable[str]) -> tuple[list[nn.Module], dict[nn.Sequential, list[_Run]]]:
    """Modules that are a block by themselves, and runs of modules by their Sequential."""
    known = {name: module for name, (module, _) in units(model).items()}
    single: list[nn.Module] = []
    runs: dict[nn.Sequential, list[_Run]] = {}
    taken: set[nn.Module] = set()
    for name in blocks:
        first, dots, last = name.partition("..")
        if first not in known:
            raise PlanError(f"the model has no block {name!r}")
        members = [known[first]]
        if dots:
            chain, begin, end = _run(model, first, last, name)
            members = [*chain][begin:end]
            runs.setdefault(chain, []).append((begin, end))
        else:
            single.append(members[0])
        for member in members:
            if member in taken:
                raise PlanError(f"block {name!r} has a module that another block has as well")
            if reason := why_not_twice(member):
                raise PlanError(f"block {name!r} can't be recomputed: {reason}")
            taken.add(member)
    return single, runs


def _run(model: nn.Module, first: str, last: str, name: str) -> tuple[nn.Sequential, int, int]:
    path, _, key = first.rpartition(".")
    chain = model.get_submodule(path)
    keys = [one for one, _ in chain.named_children()]
    if type(chain) is not nn.Sequential or last not in keys or keys.index(last) < keys.index(key):
        raise PlanError(f"the model has no block {name!r}")
    return chain, keys.index(key), keys.index(last) + 1


def _again(forward: Callable[..., Any], modules: list[nn.Module]) -> Callable[..., Any]:
    """``forward`` under a checkpoint, where there is a backward pass to come."""

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not any(module.training for module in modules):
            return forward(*args, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=True,
            context_fn=lambda: (contextlib.nullcontext(), _as_before(modules)), **kwargs,
        )  # fmt: skip

    return checkpointed


def _in_runs(chain: nn.Sequential, runs: list[_Run]) -> Callable[[Any], Any]:
    """``nn.Sequential.forward`` with its runs under checkpoints."""

    def forward(value: Any) -> Any:
        modules, at = [*chain], 0
        for begin, end in runs:
            value = _through(modules[at:begin], value)
            members = modules[begin:end]
            value = _again(lambda x, members=members: _through(members, x), members)(value)
            at = end
        return _through(modules[at:], value)

    return forward


def _through(modules: list[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _as_before(modules: list[nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Second forward passes in here are as the one that begins now: running statistics stay as they are, and Python's
    and numpy's generators, which torch does not keep, draw what they draw now (a block that is skipped at random)."""
    drawn = random.getstate(), np.random.get_state()  # noqa: NPY002 (the generator that the job's code draws from)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        later = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])  # noqa: NPY002
        try:
            with _statistics_held(modules):
                yield
        finally:
            random.setstate(later[0])
            np.random.set_state(later[1])  # noqa: NPY002

    return again()


@contextlib.contextmanager
def _statistics_held(modules: list[nn.Module]) -> Iterator[None]:
    """Second forward passes in here leave running statistics as they are: with a momentum of 0 they stay what they
    were to the last bit, while the batch's own statistics, which normalise, are computed as ever."""
    undone: list[Callable[[], None]] = []
    for norm in (part for module in modules for part in module.modules() if isinstance(part, NORMS)):
        if norm.track_running_stats:
            undone.append(put_on(norm, "momentum", 0.0))
            undone.append(_without_count(norm))
    try:
        yield
    finally:
        for one in reversed(undone):
            one()


def _without_count(norm: nn.Module) -> Callable[[], None]:
    count = norm._buffers.get("num_batches_tracked")
    norm._buffers["num_batches_tracked"] = None

    def undo() -> None:
        norm._buffers["num_batches_tracked"] = count

    return undo
