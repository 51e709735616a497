"""The step_fn of a LightningModule: its own training_step, without what it logs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from surefoot.integrations.trainer_options import Replaced


class ModuleStepFn:
    """Computes the loss of a kept batch again."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, takes_index: bool) -> None:
        self._trainer, self._module, self._takes_index = trainer, module, takes_index

    @classmethod
    def of(cls, trainer: pl.Trainer, module: pl.LightningModule) -> ModuleStepFn | None:
        """None where `training_step` cannot be called again without consequences."""
        parameters = list(inspect.signature(module.training_step).parameters)
        if not module.automatic_optimization or trainer.world_size > 1 or "dataloader_iter" in parameters:
            return None
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is not None and any(isinstance(m, torchmetrics.Metric) for m in module.modules()):
            return None  # their sums would count the batch twice
        return cls(trainer, module, len(parameters) > 1)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        replaced = Replaced()
        for name in ("log", "log_dict"):
            replaced.set(self._module, name, lambda *args, **kwargs: None)
        arguments = (batch["batch"], batch["batch_idx"]) if self._takes_index else (batch["batch"],)
        try:
            with self._trainer.precision_plugin.train_step_context():
                output: Any = self._module.training_step(*arguments)
        finally:
            replaced.undo()
        return output["loss"] if isinstance(output, Mapping) else output
