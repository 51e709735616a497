"""Batches and losses as a loop meets them, of ours and of users: moved, counted, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.train.recipe.mistakes import RecipeError
from surefoot.train.recipe.schema import Recipe

_EXPECTED = "a loss is a tensor with one number, or such a sum and how many made it, as (sum, count)"


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch where the model is; pinned memory goes there without a wait."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def count_of(batch: Any) -> int | None:
    """What a batch says that it holds; None when it says nothing. It is still on the host, so that nobody waits."""
    count = batch.get("count") if isinstance(batch, Mapping) else None
    return int(count.sum()) if isinstance(count, Tensor) else count


def check_loss(found: Any, factory: str) -> tuple[Tensor, int | None]:
    """What a loss function has returned as (mean, None) or (sum, count); anything else is refused."""
    loss, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of {loss.numel()} numbers" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RecipeError(f"loss.factory: {factory} gave {shape}; {_EXPECTED}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise RecipeError(
            f"loss.factory: {factory} gave a loss that does not depend on the weights: nothing can be learned from "
            "it. Is it computed from what the model returns, without .item(), .detach() or no_grad?"
        )
    if isinstance(found, tuple) and (not isinstance(count, int) or count < 0):
        raise RecipeError(
            f"loss.factory: {factory} gave a count that is a {type(count).__name__}, {count!r:.60}; it is a plain "
            'int, 0 or more, known without asking the device, such as batch["count"]'
        )
    return loss.reshape(()), count


def check_alone(recipe: Recipe, *, alone: bool) -> None:
    """Without counts of the batches, (sum, count) can be weighed only where a batch makes an update by itself."""
    if recipe.batch.accumulate > 1 or not alone:
        raise RecipeError(
            f'loss.factory: {recipe.loss.factory} gave (sum, count), but the batches have no "count": how much each '
            "weighs in its update must be known before it is computed. Let data.collate make dicts with a count, or "
            "return a mean"
        )
