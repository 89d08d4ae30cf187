"""Lightning: one callback, under either import name (``lightning``, ``pytorch_lightning``).

Knows Lightning's hooks; everything about DDP is in ``torch_ddp``. Example:
``examples/lightning_ddp.py``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dpro.errors import DproError
from dpro.plan import Plan
from dpro_integrations.base import step_aside

if TYPE_CHECKING:
    from dpro.outcome import Outcome
    from dpro.tuner import Tuner

_NAMES = ("lightning.pytorch", "pytorch_lightning")


class _Tuning:
    """Tune the job of a ``Trainer(strategy="ddp")``; put it last in the list of callbacks.

    Args:
        mode: ``"apply"`` (default), ``"suggest"`` (write a plan, change nothing) or ``"observe"``.
        plan: a plan file of an earlier run: verified at once, without profiling.
        settings: further fields of :class:`dpro.settings.Settings`.

    After training ``callback.outcome`` says what came of it. The plan that was kept is stored in
    checkpoints: a resumed job verifies it instead of profiling again.
    """

    def __init__(self, mode: str | None = None, plan: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.outcome: Outcome | None = None
        self._settings = {"mode": mode, **settings}
        self._plan: str | Plan | None = plan
        self._tuner: Tuner | None = None
        self._seen_steps = 0
        self._trainer: Any = None
        self._cutting: Any = None  # how batches are cut, and what undoes that
        self._whole: Any = None

    # -- start and end -------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fast_dev_run or trainer.world_size < 2:
            return
        from torch.nn.parallel import DistributedDataParallel

        from dpro_integrations.torch_ddp import make_tuner

        ddp = trainer.strategy.model
        if type(ddp) is not DistributedDataParallel:
            step_aside(f"strategy {type(trainer.strategy).__name__} is not DDP", trainer.global_rank)
            return
        self._trainer = trainer
        self._seen_steps = trainer.global_step
        try:
            self._tuner = make_tuner(ddp, on_done=self._done, plan=self._plan, **self._settings)
            if self._tuner is not None and self._tuner.settings.memory_bytes:
                self._let_cut(trainer, pl_module, ddp)
        except Exception as error:  # the job comes first
            step_aside(error, trainer.global_rank)

    def _let_cut(self, trainer: Any, pl_module: Any, ddp: Any) -> None:
        """Have batches cut where a plan says so; they are not before."""
        from dpro_integrations.torch_lightning import cut_training_step, why_whole
        from dpro_integrations.torch_micro import cutting

        if not why_whole(trainer, pl_module):
            self._cutting = cutting(ddp)
            self._whole = cut_training_step(pl_module, self._cutting)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    # -- steps -----------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # global_step counts optimizer steps: accumulation micro-batches are not iterations
        if self._tuner is not None and trainer.global_step != self._seen_steps:
            self._seen_steps = trainer.global_step
            self._tuner.step()
            if self._tuner.outcome is not None:
                self._close(over=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._skip()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._skip()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._skip()

    # -- checkpoints -----------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._skip()

    def state_dict(self) -> dict[str, Any]:
        plan = self._plan  # one that is still to be verified again, or
        if self.outcome is not None:
            plan = self.outcome.plan if self.outcome.verdict.name == "KEPT" else None
        return {"plan": plan.dumps()} if isinstance(plan, Plan) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._plan is None and "plan" in state_dict:
            try:
                self._plan = Plan.loads(state_dict["plan"])
            except DproError:
                self._plan = None  # written by another version: profile again

    # -- parts -----------------------------------------------------------------------------------

    def _skip(self) -> None:
        if self._tuner is not None:
            self._tuner.skip()

    def _close(self, over: bool = True) -> None:
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            tuner.close()
        if self._cutting is not None and (over or self._cutting.parts == 1):
            self._cutting = None
            self._whole()

    def _done(self, outcome: Outcome) -> None:
        self.outcome = outcome
        trainer = self._trainer
        if trainer is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(outcome.metrics(), step=trainer.global_step)


def __getattr__(name: str) -> Any:
    """``DproCallback`` is made on first use, for the Lightning the job has imported."""
    if name != "DproCallback":
        raise AttributeError(name)
    loaded = [item for item in _NAMES if item in sys.modules]
    bases: list[type] = []
    for item in loaded or _NAMES:
        try:
            bases.append(importlib.import_module(item).Callback)
        except ImportError:
            continue
        if not loaded:
            break
    if not bases:
        raise ImportError("DproCallback needs Lightning: pip install lightning")
    made = type("DproCallback", (_Tuning, *bases), {"__doc__": _Tuning.__doc__, "__module__": __name__})
    globals()[name] = made
    return made
