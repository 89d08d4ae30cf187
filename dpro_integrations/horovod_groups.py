"""Horovod's explicit groups, put on a ``DistributedOptimizer`` that was made without, and taken off again.

Stock ``groups=[[...]]`` is state of four attributes that the optimizer's hooks read at every gradient. They
are set here on the same object, between two steps. One thing stock groups lack is added: a group in which a
gradient is missing (an unused layer, a remainder of ``backward_passes_per_step``) is sent as a group all the
same, with zeros as Horovod sends them for single tensors. Else a rank that has all gradients would send other
names than one that lacks some, and both would wait for ever.
"""

from __future__ import annotations

from typing import Any

import torch

Group = tuple[torch.nn.Parameter, ...]


def is_idle(optimizer: Any) -> bool:
    """Whether no gradient is under way: only then groups may change."""
    return not optimizer._handles and not any(optimizer._group_counts.values())


def split_by_kind(parameters: list[torch.nn.Parameter]) -> list[Group]:
    """Parameters of one dtype and device each, in the order given: others cannot share a buffer."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [tuple(alike) for alike in kinds.values()]


class Groups:
    """The groups of one optimizer; none at first.

    Args:
        optimizer: made by ``hvd.DistributedOptimizer`` without ``groups``.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.in_force = False

    def set(self, groups: list[list[torch.nn.Parameter]]) -> None:
        """Put ``groups`` in force. A parameter in none of them is one of its own, as Horovod has it.

        Raises:
            RuntimeError: gradients are under way; nothing was changed.
        """
        optimizer = self._optimizer
        if not is_idle(optimizer):
            raise RuntimeError("gradients are under way, groups can't be changed now")
        made = [alike for group in groups for alike in split_by_kind(group)]
        named = {parameter for group in made for parameter in group}
        made += [(p,) for p in optimizer._parameter_names if p in optimizer._requires_update and p not in named]
        optimizer._p_to_group = {parameter: group for group in made for parameter in group}
        optimizer._group_counts = dict.fromkeys(made, 0)
        optimizer._groups = [list(group) for group in made]
        # on the object, not its class: whoever calls them, Horovod's step() included, comes here first
        optimizer.synchronize = self._synchronize
        optimizer.load_state_dict = self._load_state_dict
        self.in_force = True

    def clear(self) -> None:
        """Back to single tensors, fused as Horovod likes.

        Raises:
            RuntimeError: gradients are under way; nothing was changed.
        """
        optimizer = self._optimizer
        if not self.in_force:
            return
        if not is_idle(optimizer):
            raise RuntimeError("gradients are under way, groups can't be changed now")
        optimizer._groups, optimizer._p_to_group, optimizer._group_counts = None, {}, {}
        for name, ours in (("synchronize", self._synchronize), ("load_state_dict", self._load_state_dict)):
            if vars(optimizer).get(name) == ours:  # else somebody wrapped ours, which without groups adds nothing
                delattr(optimizer, name)
        self.in_force = False

    def _synchronize(self) -> None:
        optimizer = self._optimizer
        for group in optimizer._group_counts:
            if group in optimizer._handles:
                continue
            for parameter in group:
                if parameter.grad is None:
                    parameter.grad = parameter.data.new_zeros(parameter.shape)
                optimizer._handles.pop(parameter, None)
            optimizer._handles[group] = optimizer._grouped_allreduce_grad_async(group)
            optimizer._group_counts[group] = 0
        type(optimizer).synchronize(optimizer)

    def _load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        # Horovod forgets what is under way here, but not how many of a group it has counted
        self._optimizer._group_counts = dict.fromkeys(self._optimizer._group_counts, 0)
        return type(self._optimizer).load_state_dict(self._optimizer, *args, **kwargs)
