"""surefoot in Lightning's Trainer, with automatic or manual optimization, and in loops on Fabric.

    trainer = lightning.Trainer(..., callbacks=[SurefootCallback(run_dir="runs/a")])
    guard = attach_fabric(fabric, model, optimizer, run_dir="runs/a")

Lightning's step counts, schedules and place in the data stay together and only go forward: a refused update counts as a
step of Lightning's, and after a rewind the model goes on with the batches that come next.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.actions.stop import TrainingStopped
from surefoot.guard.attach import attach
from surefoot.guard.guard import Guard
from surefoot.guard.validate import Misuse
from surefoot.integrations.doubted import TrainerCheckpoints
from surefoot.integrations.module_step_fn import ModuleStepFn
from surefoot.integrations.trainer_options import Replaced, check_trainer_options, saves_wait
from surefoot.integrations.watched_backward import WatchedBackward

log = logging.getLogger("surefoot")
_FILLED_IN = ("scheduler", "scaler", "loader", "step", "on_stop")
_HOW_TO_RESUME = 'trainer.fit(model, ckpt_path="last")'
_DEEPSPEED = (
    "SurefootCallback: DeepSpeed clips and steps inside its own engine, where no update can be refused. Use FSDP, or "
    "leave the callback out."
)
MAX_WAIT = 200
"""Updates for which a checkpoint waits at most until the run is healthy."""


class LightningCallback(pl.Callback):
    """Guards each `fit()` of a Trainer; exported as `SurefootCallback`.

    Args:
        run_dir: Directory for the journal of this run.
        eval_loss: The name under which the module logs its loss on held-out data.
        options: Options of `surefoot.attach`, such as `policy` or `clip`. `step_fn` is supplied where it is sound: from
            the module's `training_step`, with automatic optimization; `step_fn=None` turns trials off.
    """

    def __init__(self, run_dir: str | Path, *, eval_loss: str = "val_loss", **options: Any) -> None:
        check_trainer_options("SurefootCallback", "Lightning", _HOW_TO_RESUME, options, filled_in=_FILLED_IN)
        self._run_dir, self._eval_loss, self._options = run_dir, eval_loss, options
        self.guard: Guard | None = None
        """The guard of the current `fit()`, or of the last one."""
        self.stop_reason: str | None = None
        """Why surefoot ended the last `fit()`; None where it did not."""
        self._trainer: Any = None
        self._replaced = Replaced()
        self._batch: dict[str, Any] | None = None
        self._checkpoints = TrainerCheckpoints()
        self._loaded: str | None = None
        """The guard's state from the checkpoint that is resumed."""
        self._unhealthy_since: int | None = None

    # -- begin and end

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        if "DeepSpeed" in type(trainer.strategy).__name__:
            raise Misuse(_DEEPSPEED)
        self._trainer, self.stop_reason, self._unhealthy_since = trainer, None, None
        self._checkpoints = TrainerCheckpoints()
        precision = trainer.precision_plugin
        self.guard = attach(
            trainer.strategy.model or pl_module,
            trainer.optimizers,
            run_dir=self._run_dir,
            scaler=precision.scaler if isinstance(precision, MixedPrecision) else None,
            step=trainer.global_step,
            on_stop=self._stop,
            **{"step_fn": ModuleStepFn.of(trainer, pl_module), **self._options},
        )
        if self._loaded is not None:
            self.guard.load_state_dict(json.loads(self._loaded))
            self._loaded = None
        self.guard.on_rewind(self._rewound)
        self._replaced.set(trainer, "save_checkpoint", self._recording(trainer.save_checkpoint))
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                skip = self._skipping(callback._should_skip_saving_checkpoint)
                self._replaced.set(callback, "_should_skip_saving_checkpoint", skip)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # ModelCheckpoint comes after all other callbacks, and may save here for the last time.
        self._replaced.undo()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._replaced.undo()
        if self.guard is not None:
            self.guard.close()
        self._trainer = self._batch = None

    # -- each step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = {"batch": batch, "batch_idx": batch_idx}

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self.guard is not None:
            self.guard.watch(loss, self._batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        value = trainer.callback_metrics.get(self._eval_loss)
        if self.guard is not None and value is not None and not trainer.sanity_checking:
            self.guard.report(eval_loss=float(value))

    # -- the trainer's checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What Lightning's checkpoints hold: the guard's state as JSON."""
        return {} if self.guard is None else {"guard": json.dumps(self.guard.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict.get("guard")

    def _recording(self, save_checkpoint: Any) -> Any:
        @functools.wraps(save_checkpoint)
        def call(filepath: Any, *args: Any, **kwargs: Any) -> None:
            save_checkpoint(filepath, *args, **kwargs)
            if self.guard is not None:
                self._checkpoints.add(filepath, self.guard)

        return call

    def _skipping(self, should_skip: Any) -> Any:
        """A ModelCheckpoint's own decision; while the run is not healthy it waits, but not at the end or for long."""

        @functools.wraps(should_skip)
        def call(trainer: pl.Trainer) -> bool:
            if self.guard is None or not saves_wait(self.guard, self._options) or trainer.should_stop:
                self._unhealthy_since = None
                return should_skip(trainer)
            if self._unhealthy_since is None:
                self._unhealthy_since = trainer.global_step
            waits = trainer.global_step - self._unhealthy_since < MAX_WAIT and not _is_over(trainer)
            return waits or should_skip(trainer)

        return call

    # -- what surefoot does

    def _rewound(self, step: int, attempt: int) -> None:
        trainer = self._trainer
        log.warning(
            "surefoot: the model is as after %d applied updates; Lightning's step count (%d), its schedules and its "
            "place in the data cannot go back with it and go on from where they are",
            step,
            trainer.global_step,
        )
        doubted = self._checkpoints.doubt_after(attempt, rename=trainer.is_global_zero)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                _forget(callback, doubted)

    def _stop(self, reason: TrainingStopped) -> None:
        self.stop_reason = str(reason)
        self._trainer.should_stop = True


def _is_over(trainer: pl.Trainer) -> bool:
    """Whether this is the last moment to save."""
    last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 >= trainer.max_epochs > 0
    return (last_epoch and trainer.is_last_batch) or (0 <= trainer.max_steps <= trainer.global_step)


def _forget(callback: ModelCheckpoint, doubted: Sequence[Path]) -> None:
    """Let it choose the best checkpoint from those that are left."""
    names = {str(path) for path in doubted}
    for name in names & callback.best_k_models.keys():
        del callback.best_k_models[name]
    best, kth = (min, max) if callback.mode == "min" else (max, min)
    left: dict[str, Any] = callback.best_k_models
    if callback.best_model_path in names:
        callback.best_model_path = best(left, key=lambda name: left[name]) if left else ""
        callback.best_model_score = left.get(callback.best_model_path)
    if callback.kth_best_model_path in names:
        callback.kth_best_model_path = kth(left, key=lambda name: left[name]) if left else ""
    if callback.last_model_path in names:
        callback.last_model_path = ""


SurefootCallback = LightningCallback


def attach_fabric(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **options: Any
) -> Guard:
    """`surefoot.attach` for a loop on Fabric, after `fabric.setup`: the loss is watched in `fabric.backward`.

    `fabric.clip_gradients` then does not raise on gradients that are not finite: their update is refused. Call
    `guard.watch(loss, batch)` before `fabric.backward` where the batch should be known, as for `step_fn`.
    """
    precision = fabric._precision
    scaler = precision.scaler if isinstance(precision, FabricMixedPrecision) else None
    guard = attach(model, optimizer, **{"scaler": scaler, **options})
    replaced = WatchedBackward(guard, fabric, "backward").replaced
    replaced.set(fabric, "clip_gradients", functools.partial(fabric.clip_gradients, error_if_nonfinite=False))
    return guard
