"""A plain Horovod loop, tuned: ``horovodrun --gloo -np 2 -H localhost:2 python examples/horovod_torch.py``."""

import horovod.torch as hvd
import torch
from torch import nn

from dpro_integrations.horovod_torch import autotune


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    tuner = autotune(optimizer)
    torch.manual_seed(hvd.rank())
    for _ in range(120):
        optimizer.zero_grad()
        net(torch.randn(32, 512)).square().mean().backward()
        optimizer.step()
    if tuner is not None and tuner.outcome is not None and hvd.rank() == 0:
        print(tuner.outcome.verdict.value, tuner.outcome.reason)


if __name__ == "__main__":
    main()
