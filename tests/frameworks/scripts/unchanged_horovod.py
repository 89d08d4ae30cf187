"""A user's Horovod script that has never heard of dpro; it prints what it trained to."""

import hashlib
import sys

import horovod.torch as hvd
import torch
from torch import nn


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(hvd.rank())
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    for step in range(60):
        optimizer.zero_grad()
        loss = net(torch.randn(samples, 64)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            hvd.allreduce(loss.detach(), name="loss")
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(f"rank {hvd.rank()} trained to {hashlib.sha256(bits).hexdigest()}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
