"""HeteroG's strategies without training: Monte Carlo tree search, then descent (HeteroG, CoNEXT 2020; TAG's search).

Knows a :class:`~dpro.search.hetero.Space`. The tree decides on group after group, the costliest first (``PUCT``, as
TAG has it: ``fastt_heterog_disco.md`` section 2.10). A leaf leaves groups undecided: they are taken from the best
choice so far, and what that replays to is the leaf's value. A third of the budget goes to the tree, the rest to
descent: each group's best action with all others fixed, from several choices of the pool, and kicks out of where that
ends.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np

from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints
from dpro.search.grouping import DEFAULT_GROUPS
from dpro.search.hetero import Budget, Choice, Found, Space, actions
from dpro.trace.model_graph import ModelGraph

#: How much an untried action is worth trying.
_EXPLORE = 0.5
#: Of the budget, for the tree.
_TREE = 0.3
_LONGEST_RUN = 8
#: Choices of the pool that a descent begins from, the best one first.
_STARTS = 4
#: Actions of a group that a first descent tries.
_PROMISING = 5


def search(
    model: ModelGraph,
    cluster: Cluster,
    *,
    batch: float = 1.0,
    groups: int | Ints = DEFAULT_GROUPS,
    budget: Budget | None = None,
    seed: int = 0,
    uniform_priors: bool = False,
    machines: bool = False,
) -> Found:
    """The best strategy found, never worse than a baseline that fits. With a budget of evaluations alone the same for
    the same seed, on any machine.

    Args:
        machines: data parallelism on one machine's devices is an action too (:func:`~dpro.search.hetero.actions`).

    Raises:
        ValueError: no batch, or no group.
    """
    space = Space(model, cluster, batch=batch, groups=groups, budget=budget, machines=machines)
    explore(space, seed, uniform_priors=uniform_priors)
    return space.found()


def explore(space: Space, seed: int = 0, *, uniform_priors: bool = False) -> Choice:
    """Search ``space`` until its budget is spent, or all of it is known; the best choice."""
    pool = {space.canonical(choice): space.evaluate(choice).key for choice in space.pool().values()}
    assert space.best is not None
    rng = random.Random(seed)
    total = math.prod(len(options) for options in space.options)
    tree = _Tree(space, uniform_priors)
    begun, first, lost = space.seconds, space.evaluations, 0
    while not space.spent() and space.evaluations < total and lost < 50 * space.groups:
        before = space.evaluations
        tree.playout()
        lost = 0 if space.evaluations > before else lost + 1
        if _share(space, begun, first) >= _TREE:
            break
    base = len(actions(space.cluster, space.model))
    starts = sorted(pool, key=lambda choice: (max(choice) >= base, pool[choice], choice))[:_STARTS]
    _descend(space, [space.best, *starts], base, rng, total)
    return space.best


def _share(space: Space, begun: float, first: int) -> float:
    """Of the budget, spent since."""
    shares = [0.0]
    if space.budget.seconds is not None:
        shares.append((space.seconds - begun) / max(space.budget.seconds - begun, 1e-9))
    if space.budget.evaluations is not None:
        shares.append((space.evaluations - first) / max(space.budget.evaluations - first, 1))
    return max(shares)


@dataclass
class _Node:
    prior: list[float]
    options: list[int]
    visits: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    children: dict[int, _Node] = field(default_factory=dict)
    #: all that is below is known
    done: list[bool] = field(default_factory=list)


class _Tree:
    """Values are ``reward of the best at the start / reward``: above 1 for what is better."""

    def __init__(self, space: Space, uniform_priors: bool) -> None:
        self._space = space
        priors = np.ones((space.groups, len(space.actions))) if uniform_priors else space.priors()
        self._priors = [
            [float(priors[g, a] / priors[g, options].sum()) for a in options] for g, options in enumerate(space.options)
        ]
        assert space.best is not None
        self._yardstick = space.known[space.best].reward
        self._root = self._node(0)

    def _node(self, depth: int) -> _Node:
        n = len(self._space.options[depth])
        return _Node(self._priors[depth], self._space.options[depth], [0] * n, [0.0] * n, {}, [False] * n)

    def playout(self) -> None:
        """One way down, a new leaf, its value back up: the best below each node."""
        space, node = self._space, self._root
        path: list[tuple[_Node, int]] = []
        while True:
            i = self._select(node)
            path.append((node, i))
            if node.visits[i] == 0 or len(path) == space.groups:
                break
            if i not in node.children:
                node.children[i] = self._node(len(path))
            node = node.children[i]
        assert space.best is not None
        chosen = [node.options[i] for node, i in path]
        outcome = space.evaluate([*chosen, *space.best[len(chosen) :]])
        value = self._yardstick / outcome.reward
        whole = len(path) == space.groups
        for node, i in reversed(path):
            node.visits[i] += 1
            node.value[i] = max(node.value[i], value)
            node.done[i] = whole
            whole = whole and all(node.done)

    def _select(self, node: _Node) -> int:
        visits = sum(node.visits)
        tried = [v for v, n in zip(node.value, node.visits, strict=True) if n]
        untried = max(tried) if tried else 1.0
        best, place = -math.inf, 0
        for i, n in enumerate(node.visits):
            worth = (node.value[i] if n else untried) + _EXPLORE * node.prior[i] * math.sqrt(visits + 1) / (1 + n)
            if node.done[i]:
                worth -= 1e6
            if worth > best:
                best, place = worth, i
        return place


def _descend(space: Space, starts: list[Choice], base: int, rng: random.Random, total: int) -> None:
    """Every group in turn until nothing helps, first by its most promising actions of the M + 4 ``base`` ones; so from
    each of ``starts``, and then again and again from a few steps away from the best.
    """
    assert space.best is not None
    first = np.full(space.groups, len(space.group))
    np.minimum.at(first, space.group, np.arange(len(space.group)))
    line = np.argsort(first, kind="stable").tolist()
    prior = space.priors()
    ranked = [
        [options[i] for i in np.argsort(-prior[g, options], kind="stable")] for g, options in enumerate(space.options)
    ]
    few = [[action for action in options if action < base][:_PROMISING] for options in ranked]
    for start in dict.fromkeys(starts):
        if not space.spent():
            _settle(space, start, few, rng)
    here, lost = space.best, 0
    while not space.spent() and space.evaluations < total and lost < 200:
        before = space.evaluations
        here = _settle(space, here, ranked, rng)
        if space.known[here].key > space.known[space.best].key:
            here = space.best
        lost = 0 if space.evaluations > before else lost + 1
        here = _kicked(space, here, line, rng)


def _settle(space: Space, here: Choice, options: list[list[int]], rng: random.Random) -> Choice:
    """A choice that no change of one group, to one of its ``options``, makes better; as far as the budget goes."""
    space.evaluate(here)
    here = space.canonical(here)
    waiting = rng.sample(range(space.groups), space.groups)
    while waiting and not space.spent():
        g = waiting.pop()
        better = here
        for action in options[g]:
            if space.spent():
                break
            other = space.canonical([*here[:g], action, *here[g + 1 :]])
            if space.evaluate(other).key < space.known[better].key:
                better = other
        if better != here:
            here = better
            waiting = [o for o in rng.sample(range(space.groups), space.groups) if o != g]
    return here


def _kicked(space: Space, here: Choice, line: list[int], rng: random.Random) -> Choice:
    """With one to three runs of neighbours in the model set to another action each."""
    out = list(here)
    for _ in range(rng.randint(1, 3)):
        begin, length = rng.randrange(space.groups), rng.randint(1, min(_LONGEST_RUN, space.groups))
        run = line[begin : begin + length]
        action = rng.choice(space.options[run[0]])
        for g in run:
            out[g] = action
    return space.canonical(out)
