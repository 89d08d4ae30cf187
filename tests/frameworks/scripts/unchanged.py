"""A user's script that has never heard of dpro; it prints what it trained to."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    torch.manual_seed(dist.get_rank())
    for _ in range(50):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(f"rank {dist.get_rank()} trained to {hashlib.sha256(bits).hexdigest()}", flush=True)
    torch.distributed.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
