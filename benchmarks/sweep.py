"""Compare bucket settings of one running DDP job, interleaved, so that a drifting machine treats all of them alike.

Knows how to re-wrap a module with other buckets and when to do so; it does not know the training loop, which only
says where its steps end. Independent of dpro on purpose: it is the judge of dpro's plan.

``python -m benchmarks.testbed run --pin -- python -m benchmarks.sweep`` measures the demo's net.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

UNIFORM_MIB = (1, 2, 4, 8, 16, 25, 50)
Options = dict[str, Any]  # of DistributedDataParallel's constructor


def uniform_arms() -> dict[str, Options]:
    """DDP's default and the uniform caps: label to constructor options."""
    return {"default": {}} | {f"{cap} MiB": {"bucket_cap_mb": cap} for cap in UNIFORM_MIB}


def rewrap(ddp: DistributedDataParallel, **options: Any) -> DistributedDataParallel:
    """A fresh wrapper of the same module with ``options`` and else DDP's defaults; don't use ``ddp`` any more.

    The old reducer has to be gone before the new one exists: its hooks sit on the same parameters.
    """
    module, group = ddp.module, ddp.process_group
    ddp.reducer._remove_autograd_hooks()
    del ddp.reducer, ddp.logger
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the typed list of caps takes fractions
        return DistributedDataParallel(module, process_group=group, init_sync=False, **options)


@dataclass(frozen=True)
class Row:
    """Step times of one arm: median and the middle half, in ms."""

    arm: str
    median_ms: float
    low_ms: float
    high_ms: float
    steps: int


class Sweep:
    """Cycles a job through the arms; call :meth:`boundary` once before the first step and after every step.

    Rounds run the arms forwards and backwards in turn (A B C, C B A, …): a steady drift cancels out. The steps that
    follow a switch are not counted: the first uses the order of registration, the second allocates its buckets.

    Args:
        arms: what to compare, label to options.
        switch: puts the options of an arm in force, between two steps.
        rounds: visits to each arm at most.
        steps: counted steps per visit.
        settle: steps after a switch that are not counted.
        budget_s: no new round that would end later than this (one is always run); rank 0's clock decides for all.
    """

    def __init__(
        self,
        arms: Mapping[str, Options],
        switch: Callable[[Options], None],
        rounds: int = 3,
        steps: int = 2,
        settle: int = 2,
        budget_s: float = float("inf"),
    ) -> None:
        self._arms, self._switch = dict(arms), switch
        self._rounds, self._steps, self._settle, self._budget_s = rounds, steps, settle, budget_s
        self._plan = self._schedule()
        self._left = 0
        self._label = ""
        self._begin_s = self._mark_s = time.perf_counter()
        self.rounds_done = 0
        self.times_ms: dict[str, list[float]] = {arm: [] for arm in arms}

    def _schedule(self) -> Iterator[str]:
        for index in range(self._rounds):
            yield from list(self._arms)[:: -1 if index % 2 else 1]
            self.rounds_done += 1
            if self._out_of_time():
                return

    def _out_of_time(self) -> bool:
        spent_s = time.perf_counter() - self._begin_s
        over = torch.tensor([spent_s * (self.rounds_done + 1) / self.rounds_done > self._budget_s], dtype=torch.int32)
        dist.broadcast(over, src=0)
        return bool(over.item())

    def boundary(self) -> bool:
        """Note the step that ended; switch where it is time. False when the sweep is over."""
        now_s = time.perf_counter()
        if self._label and self._left <= self._steps:
            self.times_ms[self._label].append((now_s - self._mark_s) * 1e3)
        self._left -= 1
        if self._left <= 0:
            label = next(self._plan, None)
            if label is None:
                return False
            self._label, self._left = label, self._steps + self._settle
            self._switch(self._arms[label])
        self._mark_s = time.perf_counter()
        return True

    def rows(self) -> list[Row]:
        """One row per arm, in the order of the arms; times are this rank's."""
        return [_row(arm, times) for arm, times in self.times_ms.items() if times]


def _row(arm: str, times_ms: list[float]) -> Row:
    low, median, high = statistics.quantiles(times_ms, n=4) if len(times_ms) > 1 else times_ms * 3
    return Row(arm, round(median, 2), round(low, 2), round(high, 2), len(times_ms))


def format_rows(rows: list[Row], reference: str = "default") -> str:
    """A table for a terminal; the last column is the speed-up over ``reference``."""
    base_ms = next(row.median_ms for row in rows if row.arm == reference)
    lines = [f"{'buckets':16} {'ms/step':>9} {'middle half':>19} {'steps':>6} {'vs ' + reference:>11}"]
    lines += [
        f"{row.arm:16} {row.median_ms:9.1f} {row.low_ms:9.1f}-{row.high_ms:<9.1f} {row.steps:>6} "
        f"{base_ms / row.median_ms:10.3f}x"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Sweep the demo's net; run once per host."""
    from benchmarks.model import CLASSES, Net

    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--caps", type=float, nargs="*", action="append", default=[], help="one more arm: a list of caps, MiB"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(args.batch, 3, 64, 64), torch.randint(CLASSES, (args.batch,))

    def switch(options: Options) -> None:
        nonlocal ddp
        ddp = rewrap(ddp, **options)

    arms = uniform_arms() | {str(caps): {"bucket_cap_mb_list": caps} for caps in args.caps}
    sweep = Sweep(arms, switch, rounds=args.rounds, steps=args.steps)
    while sweep.boundary():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(json.dumps(sweep.times_ms) if args.json else format_rows(sweep.rows()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
