"""One rank of the demo: a Lightning DDP job that dpro tunes, then a sweep that judges dpro's plan in the same job.

Started by ``benchmarks.demo`` on every host. Rank 0 writes the figures to the file named by ``--out``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.model import Images, Net
from benchmarks.sweep import Options, Sweep, format_rows, rewrap, uniform_arms
from dpro_integrations.lightning import DproCallback
from dpro_integrations.torch_rewrap import plan_arguments

if TYPE_CHECKING:
    pass

BATCH = 12
TUNED = "dpro's plan"


class Job(L.LightningModule):
    """Classification of noise; ``net`` is what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Judge(L.Callback):
    """After dpro's verdict: default buckets, uniform caps and dpro's plan, interleaved; then the job ends.

    Args:
        dpro: the callback that tunes; it stands before this one.
        budget_s: time for the sweep.
    """

    def __init__(self, dpro: Any, budget_s: float) -> None:
        self._dpro, self._budget_s = dpro, budget_s
        self.sweep: Sweep | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        outcome = self._dpro.outcome
        if outcome is None:
            return
        if self.sweep is None:
            if outcome.plan is None or self._budget_s <= 0:  # nothing to judge
                trainer.should_stop = True
                return
            arms = uniform_arms() | {TUNED: plan_arguments(outcome.plan)}

            def switch(options: Options) -> None:
                trainer.strategy.model = rewrap(trainer.strategy.model, **options)

            self.sweep = Sweep(arms, switch, rounds=2, steps=4, budget_s=self._budget_s)
            if trainer.is_global_zero:
                print(
                    f"demo: now {len(arms)} settings in turn, in the same job, at most {self._budget_s:.0f} s",
                    flush=True,
                )
        if not self.sweep.boundary():
            trainer.should_stop = True


def results(outcome: Any, sweep: Sweep | None, parameters: int) -> dict[str, Any]:
    """The demo's JSON."""
    found: dict[str, Any] = {
        "parameters_mb": round(parameters * 4 / 1e6, 1),
        "verdict": outcome.verdict.name,
        "reason": outcome.reason,
        "baseline_ms": outcome.baseline_ms,
        "replayed_ms": outcome.replayed_ms,
        "predicted_ms": outcome.predicted_ms,
        "measured_ms": outcome.measured_ms,
        "capture_overhead_pct": outcome.capture_overhead_pct,
        "plan": outcome.plan.settings() if outcome.plan else None,
    }
    if sweep is not None:
        medians_ms = {row.arm: row.median_ms for row in sweep.rows()}
        uniform = min((arm for arm in medians_ms if arm not in ("default", TUNED)), key=medians_ms.__getitem__)
        found |= {
            "sweep_ms": sweep.times_ms,
            "best_uniform": uniform,
            "tuned_vs_default": round(medians_ms["default"] / medians_ms[TUNED], 4),
            "tuned_vs_best_uniform": round(medians_ms[uniform] / medians_ms[TUNED], 4),
        }
    return found


def describe(found: dict[str, Any], sweep: Sweep) -> str:
    """The sweep as a table and a sentence."""
    tuned, uniform = found["tuned_vs_default"], found["tuned_vs_best_uniform"]
    return (
        f"\n{format_rows(sweep.rows())}\n"
        f"{TUNED}: {tuned:.3f}x DDP's default, {uniform:.3f}x the best uniform cap ({found['best_uniform']})"
    )


def main() -> int:
    """Train, be tuned, be judged."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_job", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep-s", type=float, required=True)
    parser.add_argument("--runs-dir", required=True)
    parser.add_argument("--batch", type=int, default=BATCH)
    args = parser.parse_args()

    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dpro = DproCallback(runs_dir=args.runs_dir)
    judge = Judge(dpro, args.sweep_s)
    trainer = L.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        callbacks=[dpro, judge],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    job = Job()
    trainer.fit(job, DataLoader(Images(1 << 16), batch_size=args.batch))
    if dpro.outcome is None:
        print("demo: dpro came to no verdict", file=sys.stderr)
        return 1
    if trainer.is_global_zero:
        found = results(dpro.outcome, judge.sweep, sum(p.numel() for p in job.parameters()))
        args.out.write_text(json.dumps(found))
        if judge.sweep is not None:
            print(describe(found, judge.sweep), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
