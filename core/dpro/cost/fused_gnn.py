"""What a fused op takes, by a graph neural network on its own ops: DisCo's estimator (TPDS 2022, section 4.3).

Knows kernels that were timed (:mod:`dpro.cost.fused`), torch and torch_geometric, which are imported when they are
used. As in the paper: six layers of multi-head attention over the ops of the kernel, whose features are type, sizes and
the time of each alone; the sum over them; three dense layers; squared error of the logarithm (the paper's equation 3
read so). Other than there, what is learnt is the logarithm relative to the sum of the ops, edges know their bytes and
direction, and the network is small enough for a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpro.cost.fused import Kernel, Sample, SumOfOps, Trust
from dpro.errors import DproError

LAYERS, WIDTH, HEADS = 6, 48, 4
_EDGE, _NODE, _WHOLE = 2, 7, 6


class Gnn:
    """See the module text. ``epochs``: passes over the samples that it was trained for."""

    name = "GNN"
    trust: Trust | None = None

    def __init__(self, base: SumOfOps, types: dict[str, int], network: Any, epochs: int) -> None:
        self._base, self._types, self._network, self.epochs = base, types, network, epochs

    def time_ns(self, kernel: Kernel) -> float:
        import torch
        from torch_geometric.data import Batch

        with torch.no_grad():
            said = float(self._network(Batch.from_data_list([self._graph(kernel)]))[0])
        return self._base.time_ns(kernel) * float(np.exp(said))

    def _graph(self, kernel: Kernel) -> Any:
        return graph(kernel, self._base, self._types)

    @classmethod
    def fit(
        cls, samples: Sequence[Sample], launch_ns: float, seed: int = 0, epochs: int = 60, time_budget_s: float = 120.0
    ) -> Gnn:
        """Trained with Adam on one thread; the same for the same seed where the time budget does not end it.

        Raises:
            DproError: torch or torch_geometric is not installed, or there are fewer than 50 samples.
        """
        if len(samples) < 50:
            raise DproError(f"a network needs at least 50 timed kernels, not {len(samples)}")
        try:
            import torch
            from torch_geometric.loader import DataLoader
        except ImportError as error:
            raise DproError("DisCo's network needs torch and torch-geometric: pip install dpro[gnn]") from error
        base = SumOfOps(launch_ns)
        kinds = sorted({kind for s in samples for kind in s.kernel.types})
        types = {kind: i + 1 for i, kind in enumerate(kinds)}
        data = [graph(s.kernel, base, types, s.time_ns) for s in samples]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                network = _network(len(types) + 1)
                loader = DataLoader(data, batch_size=64, shuffle=True)
                adam = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-5)
                began, done = time.monotonic(), 0
                for epoch in range(epochs):
                    # what is left of the budget decides how fast the rate falls, so that a short training ends well too
                    used = max(epoch / epochs, (time.monotonic() - began) / time_budget_s)
                    if used >= 1:
                        break
                    for group in adam.param_groups:
                        group["lr"] = 2e-3 * (0.02 + 0.98 * (1 + np.cos(np.pi * used)) / 2)
                    for batch in loader:
                        adam.zero_grad()
                        loss = ((network(batch) - batch.y) ** 2).mean()
                        loss.backward()
                        torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
                        adam.step()
                    done = epoch + 1
                network.eval()
        finally:
            torch.set_num_threads(threads)
        return cls(base, types, network, done)


def graph(kernel: Kernel, base: SumOfOps, types: dict[str, int], time_ns: float | None = None) -> Any:
    """A kernel as torch_geometric's Data: both directions of each edge, one node an op."""
    import torch
    from torch_geometric.data import Data

    guess = base.time_ns(kernel)
    work = np.maximum(kernel.time_ns - base.launch_ns, 1.0)
    nodes = np.stack([
        np.log(work) / 10, np.log1p(kernel.in_bytes) / 10, np.log1p(kernel.out_bytes) / 10, np.log1p(kernel.flops) / 10,
        kernel.exported, kernel.kept_share(), work / work.sum(),
    ], axis=1)  # fmt: skip
    sizes = np.log1p(kernel.edge_bytes) / 10
    edges = np.concatenate([np.stack([kernel.source, kernel.target]), np.stack([kernel.target, kernel.source])], axis=1)
    attributes = np.concatenate([np.stack([sizes, sizes * 0], axis=1), np.stack([sizes, sizes * 0 + 1], axis=1)])
    whole = [
        np.log(guess) / 10, np.log1p(kernel.read_bytes) / 10, np.log1p(kernel.written_bytes) / 10,
        np.log(len(kernel)) / 3, kernel.inputs / 10, kernel.outputs / 10,
    ]  # fmt: skip
    wanted = {} if time_ns is None else {"y": torch.tensor([np.log(time_ns / guess)], dtype=torch.float32)}
    return Data(
        x=torch.tensor(nodes, dtype=torch.float32),
        kind=torch.tensor([types.get(kind, 0) for kind in kernel.types]),
        edge_index=torch.tensor(edges, dtype=torch.long),
        edge_attr=torch.tensor(attributes, dtype=torch.float32),
        whole=torch.tensor([whole], dtype=torch.float32),
        **wanted,
    )


def _network(types: int) -> Any:
    import torch
    from torch import nn
    from torch_geometric.nn import TransformerConv, global_add_pool

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind = nn.Embedding(types, 16)
            self.enter = nn.Linear(16 + _NODE, WIDTH)
            self.layers = nn.ModuleList(
                TransformerConv(WIDTH, WIDTH // HEADS, heads=HEADS, edge_dim=_EDGE) for _ in range(LAYERS)
            )
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
            self.head = nn.Sequential(
                nn.Linear(2 * WIDTH + _WHOLE, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
            )
            nn.init.zeros_(self.head[-1].weight)
            nn.init.zeros_(self.head[-1].bias)

        def forward(self, batch: Any) -> Any:
            x = torch.relu(self.enter(torch.cat([self.kind(batch.kind), batch.x], dim=1)))
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = x + torch.relu(layer(norm(x), batch.edge_index, batch.edge_attr))
            # the sum, as it is and by each op's share of the time
            plain = global_add_pool(x, batch.batch) / 8
            shared = global_add_pool(x * batch.x[:, -1:], batch.batch)
            return self.head(torch.cat([plain, shared, batch.whole], dim=1))[:, 0]

    return Network()
