"""One op cut into parts that may run on different devices: FastT's SplitOperation (Middleware 2020, Algorithm 2).

Knows tasks and their tensors; not where they run, nor whether it pays. By ``batch``, each part has some of the samples:
it reads its rows of what has rows, and all parameters; its gradients of parameters are a summand. By ``channel``, each
part makes some of the output's channels: it reads all samples and its part of the parameters. A backward op is cut as
its forward op would be, so by ``channel`` its gradient of the input is the summand.

A split task cuts what a part reads a piece of, a concat task (or a sum) joins what parts make; both are placed like any
task. Departure from the paper, which joins once for each successor: once for each tensor, for a tensor is sent once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from dpro.graph.graph import OpKind
from dpro.graph.tasks import Ints, Tasks
from dpro.passes.replicate import LAUNCH_NS

Dimension = Literal["batch", "channel"]
DIMENSIONS: tuple[Dimension, ...] = ("batch", "channel")
#: Convolutions and matrix products, and their gradients (FastT, section 5.2). Not what normalises over a batch.
_SPLITTABLE = re.compile(r"Conv|Linear|MatMul")


@dataclass(frozen=True)
class Split:
    """A decision: ``task`` (a name) in ``parts`` along ``dimension``."""

    task: str
    dimension: Dimension
    parts: int


def dimensions(tasks: Tasks, task: int) -> tuple[Dimension, ...]:
    """Along which a task may be cut; none where it is no such op, takes no time or must stay with others."""
    computes = tasks.kind[task] in (OpKind.FORWARD, OpKind.BACKWARD) and tasks.time_ns[task] > 0
    if not computes or tasks.together[task] >= 0 or not _SPLITTABLE.search(tasks.types[task]):
        return ()
    return DIMENSIONS


def split(tasks: Tasks, task: int, dimension: Dimension, parts: int) -> Tasks:
    """New tasks in which ``task`` is in ``parts``; in one part, as they were.

    The parts' times add up to the whole's, and each part, split, concat and sum takes a launch
    (:data:`~dpro.passes.replicate.LAUNCH_NS`) besides. Part 0 keeps the task's number, all else comes last.

    Raises:
        ValueError: no part, or the task cannot be cut so.
    """
    if parts < 1 or dimension not in dimensions(tasks, task):
        raise ValueError(f"{tasks.names[task]!r} cannot be cut into {parts} parts along {dimension!r}")
    if parts == 1:
        return tasks
    return _Cut(tasks, task, dimension, parts).made()


class _Cut:
    """One split while it is made: what comes after the old tasks, tensors and uses."""

    def __init__(self, tasks: Tasks, task: int, dimension: Dimension, parts: int) -> None:
        self.old, self.task, self.dimension, self.parts = tasks, task, dimension, parts
        self.names: list[str] = []
        self.types: list[str] = []
        self.kinds: list[int] = []
        self.times_ns: list[int] = []
        self.made_by: list[int] = []
        self.nbytes: list[int] = []
        self.uses: list[tuple[int, int]] = []

    def made(self) -> Tasks:
        old, task, parts = self.old, self.task, self.parts
        name, whole_ns = old.names[task], int(old.time_ns[task])
        shares_ns = [share + LAUNCH_NS for share in _shares(whole_ns, parts)]
        kind = int(old.kind[task])
        pieces = [
            task,
            *(self._task(f"{name}/part{i}", old.types[task], kind, shares_ns[i]) for i in range(1, parts)),
        ]
        tensor_of, use_task = old.tensor_of.copy(), old.use_task.copy()
        for use in np.flatnonzero(old.use_task == task).tolist():
            self._read(use, pieces, use_task)
        for tensor in np.flatnonzero(old.tensor_of == task).tolist():
            self._join(tensor, pieces, tensor_of)
        names, time_ns = list(old.names), old.time_ns.copy()
        names[task], time_ns[task] = f"{name}/part0", shares_ns[0]
        kept = old.kept_bytes.copy()
        kept[task] = _shares(int(kept[task]), parts)[0]
        info = dict(old.info)
        if "replica" in info:
            replica = np.asarray(info["replica"])
            info["replica"] = [*replica.tolist(), *[int(replica[task])] * len(self.names)]
        return replace(
            old,
            names=[*names, *self.names],
            types=[*old.types, *self.types],
            kind=np.append(old.kind, np.array(self.kinds, np.uint8)),
            time_ns=_more(time_ns, self.times_ns),
            kept_bytes=_more(kept, self._kept(int(old.kept_bytes[task]))),
            together=_more(old.together, [-1] * len(self.names)),
            origin=_more(old.origin, [int(old.origin[task])] * (parts - 1) + [-1] * (len(self.names) - parts + 1)),
            tensor_of=_more(tensor_of, self.made_by),
            tensor_bytes=_more(old.tensor_bytes, self.nbytes),
            use_tensor=_more(old.use_tensor, [tensor for tensor, _ in self.uses]),
            use_task=_more(use_task, [reader for _, reader in self.uses]),
            info=info,
        )

    def _kept(self, nbytes: int) -> list[int]:
        rest = _shares(nbytes, self.parts)[1:]
        return rest + [0] * (len(self.names) - len(rest))

    def _task(self, name: str, op_type: str, kind: int, time_ns: int) -> int:
        self.names.append(name)
        self.types.append(op_type)
        self.kinds.append(kind)
        self.times_ns.append(time_ns)
        return len(self.old) + len(self.names) - 1

    def _tensor(self, producer: int, nbytes: int) -> int:
        self.made_by.append(producer)
        self.nbytes.append(nbytes)
        return len(self.old.tensor_of) + len(self.made_by) - 1

    def _read(self, use: int, pieces: list[int], use_task: Ints) -> None:
        """What the task reads: all of it by each part, or a piece each, cut by a task of its own."""
        tensor = int(self.old.use_tensor[use])
        if is_parameter(self.old, tensor) != (self.dimension == "channel"):
            self.uses += [(tensor, piece) for piece in pieces[1:]]
            return
        name = self.old.names[self.task]
        cut = self._task(f"{name}/split{tensor}", "Split", int(self.old.kind[self.task]), LAUNCH_NS)
        use_task[use] = cut
        for piece, nbytes in zip(pieces, _shares(int(self.old.tensor_bytes[tensor]), self.parts), strict=True):
            self.uses.append((self._tensor(cut, nbytes), piece))

    def _join(self, tensor: int, pieces: list[int], tensor_of: Ints) -> None:
        """What the task makes: parts of it put together, or summands added."""
        gradient, forward = is_gradient(self.old, tensor), self.old.kind[self.task] == OpKind.FORWARD
        added = gradient if self.dimension == "batch" else not (gradient or forward)
        whole = int(self.old.tensor_bytes[tensor])
        sizes = [whole] * self.parts if added else _shares(whole, self.parts)
        word = "AddN" if added else "Concat"
        name = f"{self.old.names[self.task]}/{word.lower()}{tensor}"
        joined = self._task(name, word, int(self.old.kind[self.task]), LAUNCH_NS)
        tensor_of[tensor] = joined
        for piece, nbytes in zip(pieces, sizes, strict=True):
            self.uses.append((self._tensor(piece, nbytes), joined))


def is_parameter(tasks: Tasks, tensor: int) -> bool:
    """Whether a variable makes it: something that is kept, and waits for nothing."""
    source = tasks.tensor_of[tensor]
    return bool(tasks.kind[source] == OpKind.LOCAL and tasks.kept_bytes[source] > 0)


def is_gradient(tasks: Tasks, tensor: int) -> bool:
    """Whether a variable's update reads it, or the sum of the replicas' gradients before that."""
    readers = tasks.use_task[tasks.use_tensor == tensor]
    sums: npt.NDArray[np.bool_] = (tasks.kind[readers] == OpKind.LOCAL) & (tasks.together[readers] >= 0)
    return bool(((tasks.kind[readers] == OpKind.UPDATE) | sums).any())


def _shares(whole: int, parts: int) -> list[int]:
    """Whole numbers, as equal as they get, that add up to ``whole``."""
    return [whole // parts + (i < whole % parts) for i in range(parts)]


def _more(column: Ints, values: list[int]) -> Ints:
    return np.append(column, np.array(values, np.int64))
