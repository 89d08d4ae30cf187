"""Fused ops and fused AllReduces of one data-parallel worker's step: DisCo's strategies (TPDS 2022, section 3).

Knows ops, the tensors between them and what a kernel takes (:mod:`dpro.cost.fused`); not which fusion is worth it. A
:class:`Fusion` says in which fused op each op runs. Fusing with a predecessor that others read as well is
*non-duplicate* (:meth:`JointFusion.join`: the others wait for the fused op, which writes for them too) or *duplicate*
(:meth:`JointFusion.duplicate`: it is computed twice, and the others do not wait). AllReduces are nodes as ops are, and
fused as ops are; a fused one waits for all its gradients. :meth:`JointFusion.lower` makes an ordinary graph of one
device and one channel, which the replayer judges.

Variables are not part of the step; ops that load the batch are never fused. Of ops that compute much a kernel has at
most ``anchors``: no compiler makes one kernel of two convolutions (TVM, OSDI 2018, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpro.cost.fused import Estimator, Floats, Ints, Kernel, is_heavy
from dpro.graph.cluster import Line
from dpro.graph.graph import NO_RESOURCE, Graph
from dpro.passes.worker_step import Step

#: More ops in a kernel are refused: registers, and the time to compile, have an end.
MOST_OPS = 64
_NONE: frozenset[int] = frozenset()


@dataclass
class Fusion:
    """Nodes in groups; a group is called by the smallest of its own nodes.

    ``home`` [N]: the group that makes what a node makes, for all that do not make it themselves. ``members``: group ->
    its own nodes, of groups of more than one. ``copies``: group -> ops that it computes again; ``held``: the same by
    op. ``order``: groups so that each comes after what it needs (-1: an empty place), ``place`` [N]: where in it.
    ``time_ns`` [N]: by group; ``stale``: groups whose time is to be found.
    """

    home: list[int]
    order: list[int]
    place: list[int]
    time_ns: Ints
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[int, frozenset[int]] = field(default_factory=dict)
    held: dict[int, frozenset[int]] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)

    def copy(self) -> Fusion:
        return Fusion(
            list(self.home), list(self.order), list(self.place), self.time_ns.copy(), dict(self.members),
            dict(self.copies), dict(self.held), set(self.stale),
        )  # fmt: skip

    def own(self, group: int) -> tuple[int, ...]:
        return self.members.get(group, (group,))

    def groups_of(self, node: int) -> Iterator[int]:
        """Its home, then those that have a copy."""
        yield self.home[node]
        yield from self.held.get(node, _NONE)

    def key(self) -> bytes:
        """Equal for equal fusions."""
        pairs = sorted((op, group) for op, groups in self.held.items() for group in groups)
        return np.array(self.home, dtype=np.int32).tobytes() + np.array(pairs, dtype=np.int32).tobytes()


class JointFusion:
    """The edits of a step's :class:`Fusion`; see the module text.

    Args:
        all_reduce: what an AllReduce takes, ``latency_ns + ns_per_byte · bytes`` (section 4.3).
        anchors: ops that compute much, at most, in one kernel.
    """

    def __init__(self, step: Step, estimator: Estimator, all_reduce: Line, *, anchors: int = 1) -> None:
        self.step, self.estimator, self.all_reduce, self.anchors = step, estimator, all_reduce, anchors
        self._heavy = [i < step.n and is_heavy(kind) for i, kind in enumerate(step.types)]
        self._in_bytes = step.own_bytes + np.bincount(
            step.target, step.tensor_bytes[step.tensor], len(step.names)
        )[: step.n].astype(np.int64)  # fmt: skip
        made = np.unique(np.stack([step.source, step.tensor]), axis=1)
        self._out_bytes = np.bincount(made[0], step.tensor_bytes[made[1]], len(step.names)).astype(np.int64)
        self._known: dict[tuple[tuple[int, ...], bytes], int] = {}

    def start(self) -> Fusion:
        """Nothing fused."""
        nodes = list(range(len(self.step.names)))
        reduced = np.array(nodes) >= self.step.n
        taken = np.where(reduced, self._reduce_ns(self.step.reduce_bytes), self.step.time_ns)
        time_ns = np.rint(taken).astype(np.int64)
        order = self.step.in_order()
        place = [0] * len(nodes)
        for slot, node in enumerate(order):
            place[node] = slot
        return Fusion(nodes, order, place, time_ns)

    def predecessors(self, state: Fusion, group: int) -> list[int]:
        """Groups that ``group`` reads from, ascending; of fused ops fused ops only."""
        inside = {*state.own(group), *state.copies.get(group, _NONE)}
        found = {state.home[a] for v in inside for a, _ in self.step.reads[v] if a not in inside and a < self.step.n}
        return sorted(found)

    def reduces(self, state: Fusion) -> list[int]:
        """Fused AllReduces in the order in which their gradients come up."""
        return [group for group in state.order if group >= self.step.n]

    def may_fuse(self, state: Fusion, one: int, other: int) -> bool:
        """Whether the ops of two groups may be in one kernel, cycles aside."""
        n = self.step.n
        if one == other or (one < n) != (other < n):
            return False
        if one >= n:
            return True
        inside = {*state.own(one), *state.own(other)}
        inside |= state.copies.get(one, _NONE) | state.copies.get(other, _NONE)
        if len(inside) > MOST_OPS or not all(self.step.fusible[op] for op in inside):
            return False
        return sum(self._heavy[op] for op in inside) <= self.anchors

    def join(self, state: Fusion, one: int, other: int) -> bool:
        """Make one group of two, of ops or of AllReduces; False, and nothing done, where they may not or would wait for
        themselves: another way leads from one to the other.
        """
        if not self.may_fuse(state, one, other):
            return False
        place, order = state.place, state.order
        first, last = (one, other) if place[one] < place[other] else (other, one)
        behind = self._behind(state, first, last)
        if behind is None:
            return False
        label = min(one, other)
        gone = one + other - label
        low, high = place[first], place[last]
        between = order[low + 1 : high]
        # what needs the fused op moves behind it; an empty place is left
        moved = [g for g in between if g not in behind] + [label] + [g for g in between if g in behind] + [-1]
        order[low : high + 1] = moved
        for slot, group in enumerate(moved, low):
            if group >= 0:
                place[group] = slot
        mine = tuple(sorted(state.own(one) + state.own(other)))
        copied = (state.copies.get(one, _NONE) | state.copies.get(other, _NONE)) - set(mine)
        for group in (one, other):
            for op in state.copies.pop(group, _NONE):
                _let_go(state, op, group)
        for op in copied:
            state.held[op] = state.held.get(op, _NONE) | {label}
        if copied:
            state.copies[label] = copied
        for node in mine:
            state.home[node] = label
        state.members.pop(gone, None)
        state.members[label] = mine
        state.time_ns[gone] = 0
        state.stale.discard(gone)
        state.stale.add(label)
        self._clean_homes(state, label)
        return True

    def duplicate(self, state: Fusion, predecessor: int, group: int) -> bool:
        """Let ``group`` compute what it reads of ``predecessor`` itself; False, and nothing done, where it may not.

        What nobody else reads is then only computed there.
        """
        if not self.may_fuse(state, predecessor, group):
            return False
        have = {*state.own(group), *state.copies.get(group, _NONE)}
        theirs = {*state.own(predecessor), *state.copies.get(predecessor, _NONE)}
        waiting = [a for v in have for a, _ in self.step.reads[v] if a not in have and state.home[a] == predecessor]
        wanted: set[int] = set()
        while waiting:
            op = waiting.pop()
            if op not in wanted:
                wanted.add(op)
                waiting += [a for a, _ in self.step.reads[op] if a in theirs and a not in have]
        if not wanted:
            return False
        state.copies[group] = state.copies.get(group, _NONE) | wanted
        for op in wanted:
            state.held[op] = state.held.get(op, _NONE) | {group}
        state.stale.add(group)
        self._clean_homes(state, group)
        return True

    def lower(self, state: Fusion, *, named: bool = False) -> Graph:
        """The step as a graph: a kernel or an AllReduce an op, on one device and one channel.

        Args:
            named: ops have the names of what is in them (costs time).
        """
        self._price(state)
        step, count = self.step, len(self.step.names)
        home = np.array(state.home, dtype=np.int64)
        source, target = home[step.source], home[step.target]
        keep = source != target
        pairs = [(op, group) for group, ops in state.copies.items() for op in ops]
        if pairs:
            keep &= ~np.isin(step.source * count + target, [op * count + group for op, group in pairs])
            more = [
                (state.home[a], group)
                for op, group in pairs
                for a, _ in step.reads[op]
                if state.home[a] != group and a not in state.copies[group]
            ]
            edges = np.concatenate([np.stack([source[keep], target[keep]], axis=1), np.array(more).reshape(-1, 2)])
        else:
            edges = np.stack([source[keep], target[keep]], axis=1)
        groups = np.flatnonzero(home == np.arange(count))
        row = np.full(count, -1)
        row[groups] = np.arange(len(groups))
        graph = Graph()
        device, channel = graph.resource("device"), graph.resource("collectives")
        time_ns = state.time_ns[groups]
        resource = np.where(groups < step.n, device, channel)
        names: str | np.ndarray = "op"
        if named:
            texts = ["+".join(step.names[op] for op in state.own(g)) for g in groups.tolist()]
            names = np.array([graph.name(text) for text in texts], dtype=np.int32)
        graph.add_ops(
            names, step.kind[groups].astype(np.uint8), len(groups), duration=time_ns, rank=0,
            resource=np.where(time_ns > 0, resource, NO_RESOURCE),
        )  # fmt: skip
        graph.add_edges(row[edges.astype(np.int64)])
        graph.ranks = 1
        return graph

    def named(self, state: Fusion) -> dict[str, list[list[str]]]:
        """What is fused, by name: ``ops`` and ``reduces`` that became one, and for each such kernel what of ``again``
        it computes though another one does as well.
        """
        names = self.step.names
        out: dict[str, list[list[str]]] = {"ops": [], "again": [], "reduces": []}
        for group in sorted(set(state.order) - {-1}):
            own = [names[node] for node in state.own(group)]
            again = [names[op] for op in sorted(state.copies.get(group, _NONE))]
            if group >= self.step.n:
                out["reduces"].append(own)
            elif len(own) > 1 or again:
                out["ops"].append(own)
                out["again"].append(again)
        return out

    def kernel(self, ops: Sequence[int], exported: Sequence[bool]) -> Kernel:
        """What an estimator is asked about; ``ops`` ascending."""
        step, at = self.step, {op: i for i, op in enumerate(ops)}
        inside: list[tuple[int, int, int]] = []
        outside: set[int] = set()
        for op in ops:
            for a, tensor in step.reads[op]:
                if a in at:
                    inside.append((at[a], at[op], int(step.tensor_bytes[tensor])))
                else:
                    outside.add(tensor)
        where = np.array(ops)
        table = np.array(inside, dtype=np.int64).reshape(-1, 3)
        return Kernel(
            tuple(step.types[op] for op in ops), step.time_ns[where], self._in_bytes[where].astype(np.float64),
            self._out_bytes[where].astype(np.float64), np.zeros(len(ops)), table[:, 0], table[:, 1],
            table[:, 2].astype(np.float64), np.array(exported, dtype=bool), len(outside),
            float(step.own_bytes[where].sum() + step.tensor_bytes[list(outside)].sum()),
        )  # fmt: skip

    # -- what edits are made of ------------------------------------------------------------

    def _after(self, state: Fusion, group: int) -> Iterator[int]:
        """Groups that read from ``group``."""
        for op in state.own(group):
            for user in self.step.users[op]:
                for reader in state.groups_of(user):
                    if reader != group and op not in state.copies.get(reader, _NONE):
                        yield reader

    def _behind(self, state: Fusion, first: int, last: int) -> set[int] | None:
        """Groups before ``last`` that wait for ``first``; None if ``last`` waits for one of them."""
        limit = state.place[last]
        behind: set[int] = set()
        waiting = [group for group in self._after(state, first) if group != last]
        while waiting:
            group = waiting.pop()
            if group in behind or state.place[group] > limit:
                continue
            behind.add(group)
            for reader in self._after(state, group):
                if reader == last:
                    return None
                waiting.append(reader)
        return behind

    def _leaves(self, state: Fusion, op: int, group: int) -> bool:
        """Whether anyone outside reads ``op`` from its home ``group``, or it is a result."""
        users = self.step.users[op]
        return not users or any(
            reader != group and op not in state.copies.get(reader, _NONE)
            for user in users
            for reader in state.groups_of(user)
        )

    def _clean_homes(self, state: Fusion, group: int) -> None:
        """Groups whose ops ``group`` computes again may make for nobody now."""
        self._clean_all(state, sorted(state.copies.get(group, _NONE)))

    def _clean_all(self, state: Fusion, ops: list[int]) -> None:
        done: set[int] = set()
        for op in ops:
            home = state.home[op]
            if op in state.held and home not in done:
                done.add(home)
                self._clean(state, home)

    def _clean(self, state: Fusion, group: int) -> None:
        """Take out of ``group`` what nobody reads from it; who computes it anyway makes it for all then."""
        own = state.own(group)
        inside = sorted({*own, *state.copies.get(group, _NONE)}, reverse=True)
        needed: set[int] = set()
        for op in inside:
            leaves = state.home[op] == group and self._leaves(state, op, group)
            if leaves or any(user in needed for user in self.step.users[op]):
                needed.add(op)
        state.stale.add(group)
        if len(needed) == len(inside):
            return
        gone = [op for op in inside if op not in needed]
        dead = [op for op in gone if state.home[op] == group]
        for op in gone:
            if op not in dead:
                self._drop_copy(state, op, group)
        self._set_own(state, group, tuple(op for op in own if op in needed))
        heirs: dict[int, list[int]] = {}
        for op in dead:
            heirs.setdefault(min(state.held[op]), []).append(op)
        for heir, ops in heirs.items():
            for op in ops:
                self._drop_copy(state, op, heir)
            self._set_own(state, heir, tuple(sorted((*state.own(heir), *ops))))
        # what they read may be written for nobody now, or read by nobody
        state.stale.update(state.home[a] for op in gone for a, _ in self.step.reads[op])
        self._clean_all(state, sorted({a for op in gone for a, _ in self.step.reads[op]}))

    def _drop_copy(self, state: Fusion, op: int, group: int) -> None:
        left = state.copies[group] - {op}
        if left:
            state.copies[group] = left
        else:
            del state.copies[group]
        _let_go(state, op, group)

    def _set_own(self, state: Fusion, group: int, own: tuple[int, ...]) -> None:
        """Give a group its nodes, and the name that goes with them; without nodes it is gone."""
        slot = state.place[group]
        state.members.pop(group, None)
        state.stale.discard(group)
        state.time_ns[group] = 0
        copied = state.copies.pop(group, _NONE)
        for op in copied:
            _let_go(state, op, group)
        if not own:
            state.order[slot] = -1
            return
        label = own[0]
        state.order[slot], state.place[label] = label, slot
        for node in own:
            state.home[node] = label
        if len(own) > 1:
            state.members[label] = own
        if copied:
            state.copies[label] = copied
            for op in copied:
                state.held[op] = state.held.get(op, _NONE) | {label}
        state.stale.add(label)

    def _reduce_ns(self, nbytes: Ints) -> Floats:
        return np.asarray(self.all_reduce.latency_ns + self.all_reduce.ns_per_byte * nbytes, dtype=np.float64)

    def _price(self, state: Fusion) -> None:
        for group in state.stale:
            if group >= self.step.n:
                nbytes = self.step.reduce_bytes[list(state.own(group))].sum(keepdims=True)
                state.time_ns[group] = round(float(self._reduce_ns(nbytes)[0]))
                continue
            ops = tuple(sorted({*state.own(group), *state.copies.get(group, _NONE)}))
            exported = [state.home[op] == group and self._leaves(state, op, group) for op in ops]
            key = ops, bytes(exported)
            if key not in self._known:
                alone = len(ops) == 1
                taken = self.step.time_ns[ops[0]] if alone else self.estimator.time_ns(self.kernel(ops, exported))
                self._known[key] = round(float(taken))
            state.time_ns[group] = self._known[key]
        state.stale.clear()


def _let_go(state: Fusion, op: int, group: int) -> None:
    left = state.held[op] - {group}
    if left:
        state.held[op] = left
    else:
        del state.held[op]
