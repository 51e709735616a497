"""The eval loss on held-out data, computed without side effects on the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import parallel
from surefoot.checkpoint.side_effect_free import side_effect_free
from surefoot.train.accumulation import check_loss, to_device
from surefoot.train.build import RunParts


def compute_loss(parts: RunParts, batch: Any) -> tuple[Tensor, int | None]:
    """Forward pass and loss in the recipe's precision, as (mean, None) or (sum, count)."""
    with parts.precision.forward():
        return check_loss(parts.loss(parts.forward, batch), parts.recipe.loss.factory)


def step_fn_of(parts: RunParts) -> Callable[[nn.Module, Any], Tensor]:
    """The loss of a batch that the loop has watched, for the guard to compute again."""

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        loss, count = compute_loss(parts, batch)
        return loss if count is None else loss / max(count, 1)

    return step_fn


@torch.no_grad()
def evaluate(parts: RunParts) -> float | None:
    """The mean loss on held-out data over all ranks; None without such data."""
    if parts.data.eval_loader is None:
        return None
    losses, counts = [], 0
    with side_effect_free(parts.model):
        for number, batch in enumerate(parts.data.eval_loader):
            if number == parts.recipe.evaluation.batches:
                break
            loss, count = compute_loss(parts, to_device(batch, parts.world.device))
            losses.append(loss.double())
            counts += 1 if count is None else count
    total_loss = float(torch.stack(losses).sum()) if losses else 0.0
    total_loss, counts = parallel.all_reduce_sum(parts.world, total_loss), parallel.all_reduce_sum(parts.world, counts)
    return total_loss / counts if counts else None
