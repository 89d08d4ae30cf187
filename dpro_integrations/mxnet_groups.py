"""Horovod's explicit groups, put on a ``DistributedTrainer`` that was made without, and taken off again.

``DistributedTrainer`` itself knows groups only as a number of them (``num_groups``). Here its ``_allreduce_grads`` is
replaced on the object by one that hands in the groups of a plan through ``grouped_allreduce_``, with the factors,
names and priorities that the stock method has: a gradient in no group goes as it always did. Every rank reduces every
gradient in every step, whether fresh or not, so that no rank can lack one of a group.
"""

from __future__ import annotations

import hashlib
from typing import Any

import horovod.mxnet as hvd

Group = tuple[int, ...]


def reduces_as_stock(trainer: Any) -> bool:
    """Whether ``trainer`` reduces by the method of Horovod's own class (on the object or in a subclass is another)."""
    return type(trainer)._allreduce_grads is hvd.DistributedTrainer._allreduce_grads and "_allreduce_grads" not in vars(
        trainer
    )


class Groups:
    """The groups of one trainer; none at first.

    Args:
        trainer: made by ``hvd.DistributedTrainer`` without ``num_groups``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._group_of: dict[int, int] = {}
        self.in_force = False

    def set(self, groups: list[list[int]]) -> None:
        """Put ``groups``, of places in ``trainer._params``, in force."""
        self._group_of = {i: number for number, group in enumerate(groups) for i in group}
        self._trainer._allreduce_grads = self._allreduce_grads
        self.in_force = True

    def clear(self) -> None:
        """Back to single tensors, fused as Horovod likes."""
        if not self.in_force:
            return
        # else somebody wrapped ours, which without groups is the stock method
        if vars(self._trainer).get("_allreduce_grads") == self._allreduce_grads:
            del self._trainer._allreduce_grads
        self._group_of = {}
        self.in_force = False

    def made(self) -> list[Group]:
        """What goes together now, in the order in which it is handed in: by the first, as the stock method does.

        Kinds that can't share a buffer are kept apart. Asked in every step, since a job may freeze parameters.
        """
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, parameter in enumerate(self._trainer._params):
            if parameter.grad_req != "null":
                gradient = parameter.list_grad()[0]
                alone = i not in self._group_of
                key = (alone, i) if alone else (alone, self._group_of[i], str(gradient.dtype), str(gradient.context))
                kinds.setdefault(key, []).append(i)
        return [tuple(alike) for alike in kinds.values()]

    def _allreduce_grads(self) -> None:
        trainer = self._trainer
        if not self.in_force:
            type(trainer)._allreduce_grads(trainer)
            return
        compression = trainer._compression
        shared: dict[str, Any] = {
            "average": not trainer._average_in_framework,
            "prescale_factor": 1.0 / trainer._gradient_predivide_factor,
            "postscale_factor": trainer._postscale_factor,
            "process_set": trainer._process_set,
        }
        for group in self.made():
            gradients = [trainer._params[i].list_grad()[0] for i in group]
            sent, contexts = zip(*map(compression.compress, gradients), strict=True)
            name, priority = trainer._prefix + _name(group), -group[0]
            if len(group) == 1:
                hvd.allreduce_(sent[0], name=name, priority=priority, **shared)
            else:
                hvd.grouped_allreduce_(tensors=list(sent), name=name, priority=priority, **shared)
            if compression != hvd.Compression.none:
                for gradient, tensor, context in zip(gradients, sent, contexts, strict=True):
                    gradient[:] = compression.decompress(tensor, context)


def _name(group: Group) -> str:
    """A single gradient's as stock. A group's says what is in it: Horovod remembers shapes by name."""
    if len(group) == 1:
        return str(group[0])
    digest = hashlib.sha256(repr(group).encode()).hexdigest()[:12]
    return f"{group[0]}:{group[-1]}:{digest}"
