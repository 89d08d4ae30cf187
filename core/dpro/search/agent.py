"""HeteroG's learned agent, small: a graph attention network that is taught by the replayer (CoNEXT 2020, section 4.1).

Knows a :class:`~dpro.search.hetero.Space`. Ops' features go through GAT layers, each group has the mean of its ops, a
GRU says an action for one group after the other, the costliest first, knowing those before. REINFORCE: reward
``-sqrt(T)``, ten times that where memory does not do, against a moving average, with an entropy bonus; every third
round learns from a choice of the pool of good ones as well. The best choice ever replayed is what counts. The paper's
network (12 x 8 heads, Transformer-XL) needs hours on GPUs; this one is for CPUs, and for comparison: the default is
:mod:`dpro.search.mcts`, which needs no training. Needs torch and torch_geometric (``pip install 'dpro[gnn]'``).
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro.errors import DproError
from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints
from dpro.search.grouping import DEFAULT_GROUPS
from dpro.search.hetero import Budget, Choice, Found, Space
from dpro.trace.model_graph import ModelGraph, Role

#: Choices in the pool; one that differs from another in less than a fifth of the groups replaces it, or is left out.
_POOL = 20
_ALIKE = 0.2


@dataclass(frozen=True)
class Learning:
    """``samples`` a round; at most ``rounds``, and ``patience`` of them in a row without a choice that is new."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    samples: int = 8
    rounds: int = 400
    patience: int = 20
    rate: float = 3e-3
    entropy: float = 0.02


def search(
    model: ModelGraph,
    cluster: Cluster,
    *,
    batch: float = 1.0,
    groups: int | Ints = DEFAULT_GROUPS,
    budget: Budget | None = None,
    seed: int = 0,
    learning: Learning | None = None,
) -> Found:
    """As :func:`dpro.search.mcts.search`, by the learned agent.

    Raises:
        DproError: torch or torch_geometric is not installed.
        ValueError: no batch, or no group.
    """
    space = Space(model, cluster, batch=batch, groups=groups, budget=budget)
    learn(space, seed, learning or Learning())
    return space.found()


def features(space: Space) -> tuple[npt.NDArray[np.float32], Ints]:
    """[ops, features], standardised: times on each device, bytes in, out and kept, role; [2, edges] both ways."""
    model = space.model
    times = space.cluster.op_times_ns(model.ops)
    went, came = np.zeros((2, len(model.ops)))
    edges = []
    for tensor in model.tensors:
        came[tensor.producer] += tensor.nbytes
        for consumer in tensor.consumers:
            went[consumer] += tensor.nbytes
            edges += [(tensor.producer, consumer), (consumer, tensor.producer)]
    kept = np.array([op.kept_bytes for op in model.ops], dtype=float)
    roles = np.eye(len(Role))[[op.role for op in model.ops]]
    x = np.concatenate([np.log1p(times), np.log1p(np.stack([went, came, kept], axis=1)), roles], axis=1)
    x = (x - x.mean(axis=0)) / np.maximum(x.std(axis=0), 1e-6)
    return x.astype(np.float32), np.array(edges, dtype=np.int64).reshape(-1, 2).T


def learn(space: Space, seed: int, learning: Learning) -> Choice:
    """Search ``space`` until its budget or ``learning.rounds`` are spent; the best choice ever replayed."""
    try:
        import torch
        from torch_geometric import nn as geometric
    except ImportError as error:
        raise DproError("the learned agent needs torch and torch_geometric: pip install 'dpro[gnn]'") from error
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as done:
        done.enter_context(torch.random.fork_rng(devices=[]))
        done.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # tensors are small: threads would only wait for one another
        torch.manual_seed(seed)
        rng = random.Random(seed)
        agent = _Agent(torch, geometric, space, learning)
        pool = _Pool(space)
        for choice in space.pool().values():
            pool.offer(space.canonical(choice), space.evaluate(choice).reward)
        assert space.best is not None
        yardstick, average = -space.known[space.best].reward, 0.0
        stale = 0
        for turn in range(learning.rounds):
            if space.spent() or stale >= learning.patience:
                break
            before = space.evaluations
            chosen = torch.cat([agent.sample(learning.samples), agent.sample(1, greedy=True)])
            if turn % 3 == 2:
                chosen = torch.cat([chosen, torch.tensor([agent.places(rng.choice(pool.choices))])])
            rewards = []
            for row in chosen.tolist():
                choices = agent.actions(row)
                rewards.append(space.evaluate(choices).reward / yardstick)
                pool.offer(space.canonical(choices), rewards[-1] * yardstick)
            stale = 0 if space.evaluations > before else stale + 1
            average = rewards[0] if not turn else (average + float(np.mean(rewards))) / 2
            agent.learn(chosen, np.array(rewards) - average)
    assert space.best is not None
    return space.best


class _Pool:
    """Good choices that differ."""

    def __init__(self, space: Space) -> None:
        self._groups = space.groups
        self.choices: list[Choice] = []
        self._rewards: list[float] = []

    def offer(self, choice: Choice, reward: float) -> None:
        for i, other in enumerate(self.choices):
            if sum(a != b for a, b in zip(choice, other, strict=True)) < max(1, _ALIKE * self._groups):
                if reward > self._rewards[i]:
                    self.choices[i], self._rewards[i] = choice, reward
                return
        if len(self.choices) >= _POOL:
            worst = int(np.argmin(self._rewards))
            if reward <= float(np.mean(self._rewards)):
                return
            del self.choices[worst], self._rewards[worst]
        self.choices.append(choice)
        self._rewards.append(reward)


class _Agent:
    """The network and its optimizer. A sample is, for each group, the place of an action among the group's options."""

    def __init__(self, torch: Any, geometric: Any, space: Space, learning: Learning) -> None:
        self._torch, self._learning = torch, learning
        self._options = space.options
        x, edges = features(space)
        self._x, self._edges = torch.from_numpy(x), torch.from_numpy(edges)
        self._group = torch.from_numpy(space.group)
        widest, width = max(len(options) for options in space.options), learning.width
        masked = [[i >= len(options) for i in range(widest)] for options in space.options]
        self._masked = torch.tensor(masked)
        nn = torch.nn
        sizes = [x.shape[1], *[width] * learning.layers]
        self._net = nn.ModuleDict({
            "gat": nn.ModuleList(
                geometric.GATConv(a, width // learning.heads, heads=learning.heads)
                for a in sizes[:-1]
            ),
            "said": nn.Embedding(widest + 1, width),
            "gru": nn.GRUCell(2 * width, width),
            "out": nn.Linear(2 * width, widest),
        })  # fmt: skip
        self._start = widest
        self._optimizer = torch.optim.Adam(self._net.parameters(), lr=learning.rate)

    def _encoded(self) -> Any:
        """[groups, width]"""
        torch, h = self._torch, self._x
        for i, layer in enumerate(self._net["gat"]):
            new = torch.nn.functional.elu(layer(h, self._edges))
            h = new + h if i else new
        count = torch.bincount(self._group, minlength=len(self._options)).clamp(min=1)
        pooled = torch.zeros(len(self._options), h.shape[1]).index_add(0, self._group, h)
        return pooled / count[:, None]

    def _said(self, count: int, given: Any = None, greedy: bool = False) -> tuple[Any, Any, Any]:
        """[count, groups] places, their log-probabilities, and entropies; of ``given`` ones where there are."""
        torch, groups = self._torch, self._encoded()
        hidden = torch.zeros(count, self._learning.width)
        last = torch.full((count,), self._start)
        places, logs, entropies = [], [], []
        for g in range(len(self._options)):
            context = groups[g].expand(count, -1)
            hidden = self._net["gru"](torch.cat([context, self._net["said"](last)], dim=1), hidden)
            scores = self._net["out"](torch.cat([hidden, context], dim=1)).masked_fill(self._masked[g], -1e9)
            log = torch.log_softmax(scores, dim=1)
            if given is not None:
                last = given[:, g]
            else:
                last = log.argmax(dim=1) if greedy else torch.multinomial(log.exp(), 1)[:, 0]
            places.append(last)
            logs.append(log.gather(1, last[:, None])[:, 0])
            entropies.append(-(log.exp() * log).sum(dim=1))
        return torch.stack(places, dim=1), torch.stack(logs, dim=1), torch.stack(entropies, dim=1)

    def sample(self, count: int, greedy: bool = False) -> Any:
        """[count, groups]"""
        with self._torch.no_grad():
            return self._said(count, greedy=greedy)[0]

    def learn(self, chosen: Any, advantage: npt.NDArray[np.float64]) -> None:
        """One step of REINFORCE."""
        _, logs, entropies = self._said(len(chosen), chosen)
        worth = self._torch.from_numpy(advantage.astype(np.float32))
        loss = -(logs.mean(dim=1) * worth).mean() - self._learning.entropy * entropies.mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._net.parameters(), 1.0)
        self._optimizer.step()

    def actions(self, places: list[int]) -> list[int]:
        return [options[place] for options, place in zip(self._options, places, strict=True)]

    def places(self, choice: Choice) -> list[int]:
        return [options.index(action) for options, action in zip(self._options, choice, strict=True)]
