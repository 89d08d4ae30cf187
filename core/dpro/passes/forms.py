"""A model's step spread over devices, each op in a form of its own: HeteroG's compiler (CoNEXT 2020, section 3).

Knows ops, forms and what must stand between two of them; not which forms are good. An op's *form* says on which devices
it runs, and whether each of them has the whole batch (Full) or a share of it (Part). Where a tensor's producer and its
reader differ, Split, Concat and AddN are put in (:mod:`dpro.passes.conversions`); a variable's gradient is summed on
one device that holds the variable (a parameter server), or by a collective between copies of it. Everything is done for
all ops of equal forms at once, so that a search can compile thousands of strategies.

Source: the form semantics of HeteroG's released compiler, as told in ``fastt_heterog_disco.md`` section 2.6. As there,
Split, Concat and AddN take no time of their own. Replicas of one device are added up there before their sum is sent, to
a parameter server as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.graph.cluster import Cluster
from dpro.graph.graph import OpKind
from dpro.graph.tasks import CHANNEL, Ints, Tasks
from dpro.passes.conversions import ALL_REDUCE, Conversions, Mode
from dpro.passes.replicate import KIND, LAUNCH_NS, REPLICA
from dpro.passes.servers import Servers
from dpro.trace.model_graph import ModelGraph, Role

Bools = npt.NDArray[np.bool_]
#: In :attr:`Tasks.info`: [tensors] the model's tensor that each one is, or is a part or a sum of.
MODEL_TENSOR = "model_tensor"


@dataclass(frozen=True)
class Form:
    """``devices``: one for each replica, in ascending order; of a Full form each once, of a Part form at least two.

    Replica k of n of a Part form has the rows from ``k / n`` to ``(k + 1) / n`` of the batch.

    Raises:
        ValueError: the devices are no such list.
    """

    devices: tuple[int, ...]
    part: bool

    def __post_init__(self) -> None:
        if not self.devices or min(self.devices) < 0 or list(self.devices) != sorted(self.devices):
            raise ValueError(f"{self.devices}: devices, in ascending order, at least one")
        if self.part and len(self.devices) < 2:
            raise ValueError("a batch is parted between at least two replicas")
        if not self.part and len(set(self.devices)) < len(self.devices):
            raise ValueError(f"{self.devices}: two full copies on one device")

    @classmethod
    def full(cls, *devices: int) -> Form:
        """The whole batch on each of these."""
        return cls(tuple(sorted(devices)), False)

    @classmethod
    def parted(cls, *devices: int) -> Form:
        """A replica for each mention of a device, with an even share of the batch; one alone is full."""
        return cls(tuple(sorted(devices)), len(devices) > 1)

    @property
    def distinct(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.devices)))


@dataclass(frozen=True)
class Strategy:
    """``form`` [ops]: of each op its place in ``forms``. ``all_reduce`` [ops]: read of variables alone.

    The form of a variable says where it may be: on one of those devices, or, ``all_reduce``, on each; that takes that
    what makes its gradients has the same devices, else it is on one. Updates are where their variable is.
    """

    forms: tuple[Form, ...]
    form: Ints
    all_reduce: Bools


class FormCompiler:
    """Compiles strategies for one model on one cluster.

    Args:
        batch: of the model's batch.

    Raises:
        ValueError: no batch.
    """

    def __init__(self, model: ModelGraph, cluster: Cluster, batch: float = 1.0) -> None:
        if batch <= 0:
            raise ValueError("some of the batch")
        self.model, self.cluster, self.batch = model, cluster, batch
        ops = model.ops
        self.role = np.array([op.role for op in ops], dtype=np.int64)
        self._kind = np.array([KIND[op.role] for op in ops], dtype=np.uint8)
        self._time_ns = np.array([op.time_ns for op in ops], dtype=np.int64)
        self._kept = np.array([op.kept_bytes for op in ops], dtype=np.int64)
        self._names = np.array([op.name for op in ops], dtype=object)
        self._types = np.array([op.type for op in ops], dtype=object)
        self._shared = ~np.isin(self.role, (Role.VARIABLE, Role.UPDATE))
        self._producer = np.array([t.producer for t in model.tensors], dtype=np.int64)
        self._nbytes = np.array([t.nbytes for t in model.tensors], dtype=np.int64)
        self._batched = np.array([t.batched for t in model.tensors], dtype=bool)
        readers = [len(t.consumers) for t in model.tensors]
        self._use_tensor = np.repeat(np.arange(len(readers)), readers)
        self._use_op = np.array([c for t in model.tensors for c in t.consumers], dtype=np.int64)
        partner = np.array([op.partner for op in ops], dtype=np.int64)
        #: [ops] of a variable and of what updates it the variable, else -1
        self._variable = np.where(self.role == Role.UPDATE, partner, -1)
        self._variable[self.role == Role.VARIABLE] = np.flatnonzero(self.role == Role.VARIABLE)
        # gradients: what an update reads that is not the variable itself
        by = self._producer[self._use_tensor]
        to_update = (self.role[self._use_op] == Role.UPDATE) & (self.role[by] != Role.VARIABLE)
        to_update &= ~self._batched[self._use_tensor] & (self._variable[self._use_op] >= 0)
        self._to_update = to_update
        self._grad_by, self._grad_of = by[to_update], self._variable[self._use_op[to_update]]
        self._trained = np.zeros(len(ops), dtype=bool)
        self._trained[self._grad_of] = True
        self._servers = Servers(cluster, self._gradients())
        self._table: list[Form] = []
        self._number: dict[Form, int] = {}
        self._conversions = Conversions()
        self._all_reduce_ns: dict[tuple[int, tuple[int, ...]], int] = {}
        self._replica_names: dict[int, list[str]] = {}

    def _gradients(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(variable, bytes of its gradients, who makes or reads it), in the order in which gradients are made."""
        touch: dict[int, set[int]] = {}
        nbytes: dict[int, int] = {}
        for use in np.flatnonzero(self._to_update).tolist():
            tensor, variable = int(self._use_tensor[use]), int(self._variable[self._use_op[use]])
            nbytes[variable] = nbytes.get(variable, 0) + int(self._nbytes[tensor])
            touch.setdefault(variable, set()).add(int(self._producer[tensor]))
        last = {variable: max(by) for variable, by in touch.items()}
        for tensor, op in zip(self._use_tensor.tolist(), self._use_op.tolist(), strict=True):
            if self._producer[tensor] in touch and self.role[op] != Role.UPDATE:
                touch[int(self._producer[tensor])].add(op)
        return [(v, nbytes[v], tuple(sorted(touch[v]))) for v in sorted(last, key=lambda v: (last[v], v))]

    def _numbers(self, forms: Iterable[Form]) -> Ints:
        """Places of forms in the compiler's own table."""
        out = []
        for form in forms:
            if form not in self._number:
                if form.devices[-1] >= len(self.cluster):
                    raise ValueError(f"{form.devices}: the cluster has {len(self.cluster)} devices")
                self._number[form] = len(self._table)
                self._table.append(form)
            out.append(self._number[form])
        return np.array(out, dtype=np.int64)

    def _resolved(self, strategy: Strategy) -> tuple[Ints, Bools]:
        """[ops] the form in which each is compiled, of variables and updates too; and whether the op is a variable with
        copies that a collective keeps alike, or its update.
        """
        form = self._numbers(strategy.forms)[strategy.form]
        every = range(len(self._table))
        spread = self._numbers([Form.full(*self._table[i].distinct) for i in every])
        devices = np.array([[d in self._table[i].devices for d in range(len(self.cluster))] for i in every])
        lists = {devices: i for i, devices in enumerate(dict.fromkeys(self._table[i].devices for i in every))}
        multiset = np.array([lists[self._table[i].devices] for i in every])
        alike = np.ones(len(form), dtype=bool)
        np.logical_and.at(alike, self._grad_of, multiset[form[self._grad_by]] == multiset[form[self._grad_of]])
        variable = self.role == Role.VARIABLE
        several = np.array([len(self._table[i].distinct) > 1 for i in every])[form]
        copied = variable & several & np.where(self._trained, alike & strategy.all_reduce, True)
        resolved = form.copy()
        resolved[copied] = spread[form[copied]]
        alone = np.flatnonzero(variable & ~copied)
        at = self._servers.choose(form, devices, variable & ~copied)
        resolved[alone] = self._numbers(Form.full(d) for d in range(len(self.cluster)))[at[alone]]
        updates = np.flatnonzero((self.role == Role.UPDATE) & (self._variable >= 0))
        resolved[updates] = resolved[self._variable[updates]]
        copied[updates] = copied[self._variable[updates]]
        return resolved, copied

    def compile(self, strategy: Strategy, *, named: bool = True) -> tuple[Tasks, Ints]:
        """The tasks, and [tasks] the device of each. A search that makes thousands has no use for their names.

        ``tasks.info``: ``replica`` [tasks] the replica that each is, -1 for what was put in; :data:`MODEL_TENSOR`.

        Raises:
            ValueError: a device that the cluster has not.
        """
        form, copied = self._resolved(strategy)
        placed = [np.array(f.devices, dtype=np.int64) for f in self._table]
        count = np.array([len(d) for d in placed])[form]
        share = self.batch / np.where(np.array([f.part for f in self._table])[form], count, 1)
        share = np.where(self._shared, share, 1.0)
        base = np.concatenate([[0], np.cumsum(count)])
        op = np.repeat(np.arange(len(form)), count)
        cut = (share != 1.0) & (self._time_ns > 0)
        time_ns = np.where(cut, np.rint(self._time_ns * share).astype(np.int64) + LAUNCH_NS, self._time_ns)
        device = np.concatenate([placed[f] for f in form.tolist()]) if len(form) else np.zeros(0, np.int64)

        made = count[self._producer]
        first = np.concatenate([[0], np.cumsum(made)])
        whole = np.where(self._batched, np.rint(self._nbytes * self.batch).astype(np.int64), self._nbytes)
        one = np.where(self._batched, np.rint(self._nbytes * share[self._producer]).astype(np.int64), self._nbytes)
        model_tensor = np.repeat(np.arange(len(made)), made)
        tensor_of = base[self._producer[model_tensor]] + _within(made)
        new = self._convert(form, copied, base, first, whole)
        zeros = np.zeros(len(new.device), np.int64)
        names = [*self._named(count), *self._named_in(new)] if named else [""] * (len(op) + len(zeros))
        kinds = np.where(new.types == ALL_REDUCE, OpKind.COLLECTIVE, OpKind.LOCAL).astype(np.uint8)
        tasks = Tasks(
            names, [*self._types[op].tolist(), *new.types.tolist()], np.concatenate([self._kind[op], kinds]),
            np.concatenate([time_ns[op], new.time_ns]), np.concatenate([self._kept[op], zeros]),
            np.full(len(names), -1, np.int64), np.concatenate([op, zeros - 1]),
            np.concatenate([tensor_of, new.tensor_of]), np.concatenate([one[model_tensor], new.tensor_bytes]),
            new.use_tensor, new.use_task,
        )  # fmt: skip
        tasks.info[REPLICA] = np.concatenate([_within(count), zeros - 1])
        tasks.info[MODEL_TENSOR] = np.concatenate([model_tensor, new.model_tensor])
        return tasks, np.concatenate([device, new.device])

    def _convert(self, form: Ints, copied: Bools, base: Ints, first: Ints, whole: Ints) -> _PutIn:
        """Every use of a tensor, through what must stand between its producer's form and its reader's; once for all
        readers of one form.
        """
        by, to = form[self._producer[self._use_tensor]], form[self._use_op]
        mode = np.where(self._batched[self._use_tensor], Mode.ROWS, Mode.SUM)
        mode[self._to_update & copied[self._use_op]] = Mode.COLLECTIVE
        forms, modes = len(self._table), len(Mode)
        pairs, pair = np.unique((by * forms + to) * modes + mode, return_inverse=True)
        number = np.array(
            [self._conversion(p // modes // forms, p // modes % forms, Mode(p % modes)) for p in pairs.tolist()]
        )
        keys, which = np.unique(self._use_tensor * len(pairs) + pair.ravel(), return_inverse=True)
        pool, which = self._conversions, which.ravel()
        pool.settle()
        tensor, kind = keys // max(1, len(pairs)), number[keys % max(1, len(pairs))].astype(np.int64)
        ops, tensors = pool.ops.length[kind], pool.tensors.length[kind]
        task0 = base[-1] + np.cumsum(ops) - ops
        tensor0 = first[-1] + np.cumsum(tensors) - tensors

        at, _, cell = pool.ops.take(kind)
        types, device = pool.types[cell], pool.device[cell]
        time_ns = np.zeros(len(cell), np.int64)
        for i in np.flatnonzero(device == CHANNEL).tolist():
            time_ns[i] = self._collective_ns(int(self._nbytes[tensor[at[i]]]), pool.sources[kind[at[i]]])
        row, _, made = pool.tensors.take(kind)
        tensor_of, of = task0[row] + pool.maker[made], tensor[row]
        tensor_bytes = np.rint(whole[of] * pool.fraction[made]).astype(np.int64)
        row, _, used = pool.uses.take(kind)
        source = pool.source[used]
        inner = np.where(source >= 0, first[tensor[row]] + source, tensor0[row] + ~source)
        reader = task0[row] + pool.reader[used]
        use, replica, read = pool.reads.take(kind[which])
        source, row = pool.read[read], which[use]
        outer = np.where(source >= 0, first[tensor[row]] + source, tensor0[row] + ~source)
        return _PutIn(
            types, device, time_ns, self._producer[tensor[at]], tensor_of, tensor_bytes, of,
            np.concatenate([inner, outer]), np.concatenate([reader, base[self._use_op[use]] + replica]),
        )  # fmt: skip

    def _conversion(self, source: int, target: int, mode: Mode) -> int:
        one, other = self._table[source], self._table[target]
        return self._conversions.number(one.devices, one.part, other.devices, other.part, mode)

    def _collective_ns(self, nbytes: int, devices: tuple[int, ...]) -> int:
        key = nbytes, devices
        if key not in self._all_reduce_ns:
            self._all_reduce_ns[key] = self.cluster.all_reduce_ns(nbytes, devices)
        return self._all_reduce_ns[key]

    def _named(self, count: Ints) -> list[str]:
        """``conv1@0`` …; made once for each op and number of replicas."""
        out: list[str] = []
        for op, n in enumerate(count.tolist()):
            if n == 1:
                out.append(self._names[op])
                continue
            key = n * len(count) + op
            if key not in self._replica_names:
                self._replica_names[key] = [f"{self._names[op]}@{k}" for k in range(n)]
            out += self._replica_names[key]
        return out

    def _named_in(self, new: _PutIn) -> list[str]:
        return [f"{name}/{kind}" for name, kind in zip(self._names[new.near], new.types, strict=True)]


@dataclass(frozen=True)
class _PutIn:
    """q ops that were put in, behind the ``near`` [q] ops of the model; r tensors that they make, as in
    :class:`Tasks`; and the uses of all tensors.
    """

    types: npt.NDArray[np.object_]
    device: Ints
    time_ns: Ints
    near: Ints
    tensor_of: Ints
    tensor_bytes: Ints
    model_tensor: Ints
    use_tensor: Ints
    use_task: Ints


def _within(count: Ints) -> Ints:
    """0 … n - 1 for each n of ``count``."""
    out: Ints = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return out
