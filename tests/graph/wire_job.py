"""A small real DDP job on gloo, profiled, its socket calls traced; a trace per rank. Run by test_real_wire.py."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from dpro.trace import kineto, wire

LAYERS, WIDTH, STEPS = 4, 1024, 3


def epoch_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # 4 MiB a layer, a bucket each
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=4)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(32, WIDTH)).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, wire.capture() as seen:
        for number in range(STEPS):
            with record_function(f"ProfilerStep#{number}"):
                step()
    rank = dist.get_rank()
    path = folder / f"rank{rank}.json"
    profiler.export_chrome_trace(str(path))
    trace = kineto.read(path)
    path.unlink()
    trace.shift(-epoch_ns())
    trace.meta.clock, trace.meta.host = "monotonic", "one"
    trace = wire.append(trace, seen.events)
    trace.save(folder / f"rank{rank}.npz")
    dist.destroy_process_group()
