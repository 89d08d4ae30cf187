"""A small real DDP job on gloo under torch.profiler; run by test_real_gloo.py, one Kineto file per rank."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

LAYERS, WIDTH, STEPS = 6, 256, 3

if __name__ == "__main__":
    folder, view, closure = sys.argv[1], sys.argv[2] == "view", sys.argv[2] == "closure"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    # 257 KiB a layer: two layers fill a bucket
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)

    def passes() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(64, WIDTH)).sum().backward()

    def step() -> None:
        if closure:  # as Lightning does
            optimizer.step(passes)
        else:
            passes()
            optimizer.step()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(STEPS):
            with record_function(f"ProfilerStep#{number}"):
                step()
    profiler.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json")
    dist.destroy_process_group()
