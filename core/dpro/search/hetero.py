"""What HeteroG decides, and what a decision is worth (CoNEXT 2020, sections 3 and 4).

Knows a model, a cluster, groups of ops and the M + 4 actions of each: all of it on one of M devices, or data parallel
with {one replica a device | replicas in proportion to the devices' speeds} x {parameter server | all-reduce}. A choice
is an action for each group; :class:`Space` compiles and replays it, in the order of upward ranks, memory counted.
:mod:`dpro.search.mcts` and :mod:`dpro.search.agent` look for good ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints, Placed, Tasks, lower
from dpro.passes.forms import Form, FormCompiler, Strategy
from dpro.replay.engine import replay_arrays
from dpro.replay.placed import Judged, judge, peak_bytes
from dpro.search.grouping import DEFAULT_GROUPS, group
from dpro.search.order import replay_ordered
from dpro.trace.model_graph import ModelGraph, Role

Choice = tuple[int, ...]
RANK, FIFO = "rank", "fifo"
#: Of the reward when a device has too little memory (HeteroG, section 4.1.3).
OOM_FACTOR = 10.0
_MOST_REPLICAS_A_DEVICE = 3


@dataclass(frozen=True)
class Action:
    """``name``: ``MP@gpu0``, ``EV-PS``, ``EV-AR``, ``CP-PS`` or ``CP-AR``, as in the paper's tables."""

    name: str
    form: Form
    all_reduce: bool


@dataclass(frozen=True)
class Outcome:
    """``over_bytes``: what devices need beyond what they have, together."""

    makespan_ns: int
    over_bytes: int

    @property
    def key(self) -> tuple[int, int]:
        """The smaller the better: what fits comes first."""
        return self.over_bytes, self.makespan_ns

    @property
    def reward(self) -> float:
        """``-sqrt(T)``, T in s; ten times that where memory does not do."""
        return -float(np.sqrt(max(self.makespan_ns, 1) / 1e9)) * (OOM_FACTOR if self.over_bytes else 1.0)


@dataclass
class Budget:
    """Whichever is spent first; None: no bound."""

    seconds: float | None = 60.0
    evaluations: int | None = None


@dataclass(frozen=True)
class Found:
    """The best choice, compiled. ``priority`` as :func:`~dpro.graph.tasks.lower` takes it, None: first come, first
    served is better (``order``). ``fifo_ns``: of this choice served like that. ``baselines``: name -> outcome, the
    better of both orders; ``DP`` is FastT's start. ``actions`` [groups]: the names; none where that start is best.
    """

    choice: Choice
    actions: tuple[str, ...]
    strategy: Strategy
    tasks: Tasks
    device: Ints
    priority: Ints | None
    judged: Judged
    order: str
    fifo_ns: int
    baselines: dict[str, Outcome]
    evaluations: int
    seconds: float

    @property
    def makespan_ns(self) -> int:
        return self.judged.makespan_ns


def proportional(cluster: Cluster, model: ModelGraph) -> tuple[int, ...]:
    """A device for each replica, so many of each as make the slowest soonest done, at most three, the fewest of equals.

    Speeds are those for the model's own mix of ops.
    """
    times = cluster.op_times_ns(model.ops)
    spent = times.sum(axis=0).astype(float)
    speed = max(spent.max(), 1.0) / np.maximum(spent, 1.0)
    best, counts = np.inf, np.ones(len(cluster), dtype=np.int64)
    for scale in np.arange(1.0, _MOST_REPLICAS_A_DEVICE + 0.01, 0.5):
        n = np.clip(np.floor(scale * speed + 0.5), 1, _MOST_REPLICAS_A_DEVICE).astype(np.int64)
        slowest = float((n / speed).max() / n.sum())
        if slowest < best * (1 - 1e-9):
            best, counts = slowest, n
    return tuple(np.repeat(np.arange(len(cluster)), counts).tolist())


def actions(cluster: Cluster, model: ModelGraph, machines: bool = False) -> list[Action]:
    """M + 4; fewer where proportional and even replicas are the same, or there is one device.

    Args:
        machines: data parallelism on one machine's devices as well (as TAG has it), ``EV-AR@m0``.
    """
    out = [Action(f"MP@{d.name}", Form.full(i), False) for i, d in enumerate(cluster.devices)]
    if len(cluster) == 1:
        return out
    even, shares = Form.parted(*range(len(cluster))), Form.parted(*proportional(cluster, model))
    out += [Action("EV-PS", even, False), Action("EV-AR", even, True)]
    if shares != even:
        out += [Action("CP-PS", shares, False), Action("CP-AR", shares, True)]
    for machine in dict.fromkeys(device.machine for device in cluster.devices) if machines else ():
        form = Form.parted(*(i for i, device in enumerate(cluster.devices) if device.machine == machine))
        if form.part and form != even:
            out += [Action(f"EV-PS@{machine}", form, False), Action(f"EV-AR@{machine}", form, True)]
    return out


def _surely_fits(placed: Placed, limit: Ints) -> bool:
    """Whether every device has room for all that is ever on it at once, as far as is quick to tell."""
    tasks, device, n = placed.tasks, placed.device, len(limit)
    home = device[tasks.tensor_of]
    all_of_it = np.bincount(np.maximum(device, 0), tasks.kept_bytes, n)
    all_of_it += np.bincount(home[home >= 0], tasks.tensor_bytes[home >= 0], n)
    all_of_it += np.bincount(placed.sent_to, tasks.tensor_bytes[placed.sent_tensor], n)
    return bool(np.all((limit == 0) | (all_of_it <= limit)))


class Space:
    """All choices for one model on one cluster, and what was learnt of them.

    Args:
        batch: of the model's batch. ``groups``: at most so many, or [ops] the group of each.
        order: :data:`RANK`, or :data:`FIFO` to see what ranks are worth. ``machines``: see :func:`actions`.
    """

    def __init__(
        self, model: ModelGraph, cluster: Cluster, *, batch: float = 1.0, groups: int | Ints = DEFAULT_GROUPS,
        order: str = RANK, budget: Budget | None = None, machines: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.cluster, self.order = model, cluster, order
        self.compiler = FormCompiler(model, cluster, batch)
        self.actions = actions(cluster, model, machines)
        self.group: Ints = group(model, cluster, groups) if isinstance(groups, int) else groups
        self.groups = int(self.group.max()) + 1 if len(self.group) else 0
        self.budget = budget or Budget()
        self.known: dict[Choice, Outcome] = {}
        self.best: Choice | None = None
        self._begun = time.monotonic()
        self._limit = cluster.memory_bytes()
        self._forms = tuple(action.form for action in self.actions)
        self._reduces = np.array([action.all_reduce for action in self.actions])
        trained = np.zeros(self.groups, dtype=bool)
        trained[self.group[[op.role is Role.VARIABLE for op in model.ops]]] = True
        first = {form: i for i, form in reversed(list(enumerate(self._forms)))}
        #: [groups, actions] the first action that does the same: without a variable nothing is synchronised
        self._same = np.array([
            [i if has else first[form] for i, form in enumerate(self._forms)] for has in trained
        ])  # fmt: skip
        #: [groups] how many actions of each differ
        self.options = [sorted(set(row)) for row in self._same.tolist()]

    @property
    def evaluations(self) -> int:
        return len(self.known)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def spent(self) -> bool:
        """Whether the budget is."""
        over = self.budget.seconds is not None and self.seconds >= self.budget.seconds
        return over or (self.budget.evaluations is not None and self.evaluations >= self.budget.evaluations)

    def canonical(self, choice: Sequence[int]) -> Choice:
        """The same with one action for all that are alike."""
        return tuple(self._same[np.arange(self.groups), list(choice)].tolist())

    def strategy(self, choice: Sequence[int]) -> Strategy:
        action = np.array(choice, dtype=np.int64)[self.group]
        return Strategy(self._forms, action, self._reduces[action])

    def evaluate(self, choice: Sequence[int]) -> Outcome:
        """What it is worth; looked up where a choice that comes to the same was asked for before."""
        key = self.canonical(choice)
        outcome = self.known.get(key)
        if outcome is None:
            outcome = self.known[key] = self.outcome(key, self.order)
            if self.best is None or outcome.key < self.known[self.best].key:
                self.best = key
        return outcome

    def outcome(self, choice: Sequence[int], order: str) -> Outcome:
        """As :meth:`worth`; not remembered."""
        return self.worth(self.strategy(choice), order)

    def worth(self, strategy: Strategy, order: str) -> Outcome:
        """Compiled and replayed."""
        placed = lower(*self.compiler.compile(strategy, named=False), self.cluster)
        arrays = placed.graph.arrays()
        played = replay_ordered(arrays)[0] if order == RANK else replay_arrays(arrays)
        over = 0
        if not _surely_fits(placed, self._limit):
            beyond = peak_bytes(placed, played, len(self.cluster)) - self._limit
            over = int(np.maximum(beyond, 0)[self._limit > 0].sum())
        return Outcome(played.makespan_ns, over)

    def uniform(self) -> dict[str, Choice]:
        """Every group alike: the four kinds of data parallelism that the paper compares with, and single devices."""
        return {action.name: (i,) * self.groups for i, action in enumerate(self.actions)}

    def pool(self) -> dict[str, Choice]:
        """Where a search begins: :meth:`uniform`, and model parallelism by turns and by blocks."""
        devices = len(self.cluster)
        out = {**self.uniform(), "MP-turns": tuple(g % devices for g in range(self.groups))}
        first = np.full(self.groups, len(self.group))
        np.minimum.at(first, self.group, np.arange(len(self.group)))
        line = np.argsort(first, kind="stable")
        time_ns = np.bincount(self.group, [op.time_ns for op in self.model.ops], self.groups)
        kept = np.bincount(self.group, [op.kept_bytes for op in self.model.ops], self.groups)
        room = np.where(self._limit > 0, self._limit, self._limit.max() or 1)
        for name, load, power in (("MP-blocks", time_ns, np.ones(devices)), ("MP-memory", kept, room)):
            if load.sum() > 0:
                middle = (np.cumsum(load[line]) - load[line] / 2) / load.sum()
                cell = np.searchsorted(np.cumsum(power) / power.sum(), middle)
                blocks = np.zeros(self.groups, dtype=np.int64)
                blocks[line] = np.minimum(cell, devices - 1)
                out[name] = tuple(blocks.tolist())
        return out

    def priors(self) -> npt.NDArray[np.float64]:
        """[groups, actions] how promising each looks: its ops' time and its variables' synchronisation, one by one."""
        types = [op.type for op in self.model.ops]
        times = self.cluster.times_ns(types, np.array([op.time_ns for op in self.model.ops], dtype=np.int64))
        spent = np.stack([np.bincount(self.group, times[:, d], self.groups) for d in range(len(self.cluster))], axis=1)
        kept = np.bincount(self.group, [op.kept_bytes for op in self.model.ops], self.groups)
        cost = np.zeros((self.groups, len(self.actions)))
        for a, action in enumerate(self.actions):
            shares = np.bincount(action.form.devices, minlength=len(self.cluster)) / len(action.form.devices)
            cost[:, a] = (spent * shares).max(axis=1)
            n, among = len(action.form.distinct), np.ix_(action.form.distinct, action.form.distinct)
            if n > 1:
                for g in range(self.groups):
                    collective = self.cluster.all_reduce_ns(int(kept[g]), action.form.distinct)
                    by_server = 2 * (n - 1) * self.cluster.ns_per_byte[among].max() * kept[g] / n
                    cost[g, a] += collective if action.all_reduce else by_server
        weight = 1.0 / np.maximum(cost, cost.max() * 1e-6 + 1.0)
        return np.asarray(weight / weight.sum(axis=1, keepdims=True))

    def start(self) -> Strategy:
        """Data parallelism with all variables on the first device: FastT's start (``passes/replicate.py``)."""
        forms = Form.full(0), Form.parted(*range(len(self.cluster)))
        variable = np.array([op.role is Role.VARIABLE for op in self.model.ops], dtype=bool)
        return Strategy(forms, np.where(variable, 0, 1), np.zeros(len(variable), dtype=bool))

    def found(self) -> Found:
        """The best so far in the better of both orders, or a baseline where that is faster still."""
        assert self.best is not None, "nothing was evaluated"
        named = {name: (self.strategy(choice), choice) for name, choice in self.uniform().items()}
        named["DP"] = self.start(), ()
        outcomes: dict[str, Outcome] = {}
        candidates: list[tuple[tuple[int, int], str, Strategy, Choice]] = []
        for name, (strategy, choice) in {"": (self.strategy(self.best), self.best), **named}.items():
            both = {order: self.worth(strategy, order) for order in (RANK, FIFO)}
            candidates += [(outcome.key, order, strategy, choice) for order, outcome in both.items()]
            if name:
                outcomes[name] = min(both.values(), key=lambda o: o.key)
        _, order, strategy, choice = min(candidates, key=lambda candidate: candidate[0])
        tasks, device = self.compiler.compile(strategy)
        priority = None
        if order == RANK:
            priority = replay_ordered(lower(tasks, device, self.cluster).graph.arrays())[1].astype(np.int64)
        judged = judge(tasks, device, self.cluster, priority)
        fifo_ns = judge(tasks, device, self.cluster).makespan_ns
        return Found(
            choice, tuple(self.actions[a].name for a in choice), strategy, tasks, device, priority, judged, order,
            fifo_ns, outcomes, self.evaluations, self.seconds,
        )  # fmt: skip
