"""Small Lightning jobs on two CPU processes; each function is what one rank does (see ``torch_ddp/jobs.py``)."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.patches import patch
from tests.frameworks.torch_ddp.jobs import WIDTH, decide, digest, force_plans, mlp, settle

#: What a validation costs: far more than a training step.
VALIDATION_S = 1.0


def data(batches: int = 60) -> DataLoader[Any]:
    inputs = torch.randn(2 * 8 * batches, WIDTH, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs), batch_size=8)


def make_net(lightning: Any, fail_at: int = -1) -> Any:
    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == fail_at:
                raise ArithmeticError("the user's own mistake")
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(VALIDATION_S)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    return Net()


def make_logger(lightning: Any) -> Any:
    base = importlib.import_module(lightning.__name__ + ".loggers.logger").DummyLogger

    class Memory(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[dict[str, float]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.seen.append(dict(metrics))

    return Memory()


def make_counter(lightning: Any, stop_at: int) -> Any:
    class Counter(lightning.Callback):  # type: ignore[misc]
        """Another callback: counts batches, ends training early."""

        batches = 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.batches += 1
            trainer.should_stop = self.batches == stop_at

    return Counter()


def make_strategy(lightning: Any) -> Any:
    base = importlib.import_module(lightning.__name__ + ".strategies").DDPStrategy

    class OtherDDP(DDP):
        """Somebody's own wrapper: not what dpro knows."""

    class OtherStrategy(base):  # type: ignore[misc]
        def _setup_model(self, model: torch.nn.Module) -> DDP:
            return OtherDDP(module=model, **self._ddp_kwargs)

    return OtherStrategy()


def fit(
    lightning: str,
    tune: str,
    steps: int = 50,
    kept: bool = True,
    validate: bool = False,
    stop_at: int = -1,
    fail_at: int = -1,
    other_strategy: bool = False,
    checkpoint: str = "",
    resume: str = "",
    callback_arguments: dict[str, Any] | None = None,
    **trainer_arguments: Any,
) -> dict[str, Any]:
    """``tune``: "" no dpro, "search" the callback; ``checkpoint``: where to save at the end."""
    torch.set_num_threads(1)
    name, module = lightning, importlib.import_module(lightning)
    decide(kept)
    force_plans()
    counter, logger = make_counter(module, stop_at), make_logger(module)
    callbacks = [counter]
    if tune:
        from dpro_integrations.lightning import DproCallback

        assert issubclass(DproCallback, module.Callback)
        callbacks.append(DproCallback(**(callback_arguments or {})))
    trainer = module.Trainer(
        strategy=make_strategy(module) if other_strategy else "ddp",
        devices=2,
        accelerator="cpu",
        max_steps=steps,
        logger=logger,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        limit_val_batches=1 if validate else 0,
        **({"val_check_interval": 12} if validate else {}),
        **trainer_arguments,
    )
    net = make_net(module, fail_at)
    error = ""
    try:
        trainer.fit(net, data(), data(2) if validate else None, ckpt_path=resume or None)
    except ArithmeticError as raised:
        error = str(raised)
    if checkpoint:
        trainer.save_checkpoint(checkpoint)
    settle()
    if dist.is_initialized():
        dist.destroy_process_group()
    outcome = callbacks[-1].outcome if tune else None
    return {
        "name": name,
        "weights": digest(net.net),
        "compiled": [name for name, part in net.named_modules() if "_compiled_call_impl" in vars(part)],
        "error": error,
        "batches": counter.batches,
        "verdict": outcome.verdict.name if outcome else "",
        "reason": outcome.reason if outcome else "",
        "steps": outcome.steps if outcome else 0,
        "slowest_ms": max((ms for arm in outcome.arms for ms in arm.times_ms()), default=0.0) if outcome else 0.0,
        "metrics": [metrics for metrics in logger.seen if any(key.startswith("dpro/") for key in metrics)],
    }


def resumed(lightning: str, place: str) -> list[dict[str, Any]]:
    """A job that keeps a plan and saves it, and one that goes on from there."""
    path = str(Path(place, "saved.ckpt"))
    first = fit(lightning, "search", steps=50, checkpoint=path)
    second = fit(lightning, "search", steps=100, resume=path, checkpoint=path)
    stored = torch.load(path, weights_only=True)["callbacks"]
    return [first, second, {key: list(value) for key, value in stored.items() if "Dpro" in key}]


def both_activations(lightning: str) -> dict[str, Any]:
    """The script has the callback, and DPRO is set."""
    import sys

    construct = DDP.__init__
    sys.modules.pop("dpro_integrations.autoload", None)
    importlib.import_module("dpro_integrations.autoload")
    patch(DDP, "__init__", DDP.__init__)  # back to the original for the next job, whatever happens
    found = fit(lightning, "search")
    return found | {"restored": DDP.__init__ is construct}


def over_budget(lightning: str, budget: int, steps: int = 26) -> dict[str, Any]:
    """A job whose activations are most of its memory, with nothing but micro-batches to choose. ``budget`` bytes."""
    from dpro.adapter import Knob
    from dpro_integrations.torch_ddp import TorchDDPAdapter

    offered = TorchDDPAdapter.capabilities
    patch(TorchDDPAdapter, "capabilities", lambda self: offered(self) - {Knob.RECOMPUTE})
    torch.set_num_threads(1)
    module = importlib.import_module(lightning)

    class Wide(module.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            loss = self.net(batch[0].repeat_interleave(256, 0)).square().mean()
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    from dpro_integrations.lightning import DproCallback

    callback = DproCallback(memory_bytes=budget)
    trainer = module.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_steps=steps, callbacks=[callback], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    net = Wide()
    trainer.fit(net, data(steps))
    settle()
    dist.destroy_process_group()
    left = sorted(set(vars(net)) & {"training_step", "optimizer_zero_grad", "log", "log_dict"})
    outcome = callback.outcome
    assert outcome is not None
    return {
        "values": [float(p.double().sum()) for p in net.parameters()],
        "left": left,
        "verdict": outcome.verdict.name,
        "reason": outcome.reason,
        "peak": outcome.planned.peak_bytes if outcome.planned else None,
        "plan": outcome.plan.settings() if outcome.plan else {},
        "measured": [arm.peak_bytes for arm in outcome.arms[1:]],
    }


def parts_without_loss(lightning: str, plan: str, steps: int = 50, skip_at: int = -1) -> dict[str, Any]:
    """A job whose training step gives None where no sample is usable: in every other batch one is, so that one of two
    parts has none. In batch ``skip_at`` none is. ``plan``: its file, "": no dpro."""
    torch.set_num_threads(1)
    decide(True)
    module = importlib.import_module(lightning)
    sizes: list[int] = []

    class Picky(module.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            samples, usable = batch
            sizes.append(len(samples))
            if not usable.any():
                return None
            loss: torch.Tensor = self.net(samples).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    rank = int(os.environ["RANK"])  # ranks skip parts of different batches
    inputs = torch.randn(8 * steps, WIDTH, generator=torch.Generator().manual_seed(rank))
    place, number = torch.arange(len(inputs)) % 8, torch.arange(len(inputs)) // 8
    usable = ((number % 2 == rank) | (place == (number // 2) % 8)) & (number != skip_at)
    callbacks = []
    if plan:
        from dpro_integrations.lightning import DproCallback

        callbacks = [DproCallback(plan=plan, memory_bytes=1 << 40)]
    trainer = module.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_steps=steps, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    net = Picky()
    error = ""
    try:
        trainer.fit(net, DataLoader(TensorDataset(inputs, usable), batch_size=8))
    except RuntimeError as raised:
        error = str(raised)
    settle()
    dist.destroy_process_group()
    outcome = callbacks[0].outcome if callbacks else None
    return {
        "values": [p.flatten().tolist() for p in net.parameters()],
        "sizes": sizes,
        "error": error,
        "left": sorted(set(vars(net)) & {"training_step", "optimizer_zero_grad"}),
        "verdict": outcome.verdict.name if outcome else "",
    }
