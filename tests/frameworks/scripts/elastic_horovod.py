"""An elastic Horovod job that knows nothing of dpro: it begins with two workers and goes on with three.

Rank 0 offers the third slot in the file that the discovery script prints (argv[1]), once a few steps are trained.
"""

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

STEPS, OFFER_AT, GIVE_UP_S = 30, 10, 40.0

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
sizes: list[int] = []


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    sizes.append(hvd.size())
    deadline = time.monotonic() + GIVE_UP_S
    # to the end, but not before there are three: the launcher looks for new hosts once a second
    while state.step < STEPS or (hvd.size() < 3 and time.monotonic() < deadline):
        optimizer.zero_grad()
        net(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        state.step += 1
        if hvd.rank() == 0 and state.step == OFFER_AT:
            Path(sys.argv[1]).write_text("localhost:3\n")
        time.sleep(0.05)
        state.commit()


train(hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0))
total = sum(float(p.detach().sum()) for p in net.parameters())
print(f"trained by {sizes} workers, at the end {hvd.size()}, sum {total:.6f}", flush=True)
