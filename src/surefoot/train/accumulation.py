"""Gradient accumulation: groups micro-batches into updates, and weighs each by the number of targets it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from surefoot.train.recipe.errors import RecipeError
from surefoot.train.recipe.schema import Recipe

B = TypeVar("B")
_LOSS_FORMAT = "return a tensor with one value, or a sum and the number of its terms as (sum, count)"


class MicroBatches(list[B]):
    """The micro-batches of one update; `partial` if the data ended before the group was full."""

    def __init__(self, batches: Iterable[B], size: int) -> None:
        super().__init__(batches)
        self.partial = len(self) < size


class MicroBatchGroups(Iterator[MicroBatches[B]]):
    """The batches of an iterator in groups of `size`; no batch is fetched before its group is requested."""

    def __init__(self, batches: Iterable[B], size: int) -> None:
        if size < 1:
            raise ValueError(f"batch.accumulate: expected 1 micro-batch or more, got {size}")
        self._batches = iter(batches)
        self._size = size

    def __next__(self) -> MicroBatches[B]:
        # One by one: fetching beyond the group would put the saved data position ahead of the training.
        batches: list[B] = []
        for batch in self._batches:
            batches.append(batch)
            if len(batches) == self._size:
                break
        if not batches:
            raise StopIteration
        return MicroBatches(batches, self._size)


def sum_weight(total: int, *, ranks: int = 1) -> float:
    """The factor for a summed loss that makes a group count as one batch with `total` targets.

    It contains the number of ranks because gradients are averaged over them. A group without targets gets weight 0.
    """
    return ranks / total if total else 0.0


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a nested batch to the device; pinned memory is copied without waiting."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def target_count(batch: Any) -> int | None:
    """The batch's own `count`, None without one. Call it while the batch is on the host, where reading is free."""
    count = batch.get("count") if isinstance(batch, Mapping) else None
    return int(count.sum()) if isinstance(count, Tensor) else count


def check_loss(value: Any, factory: str) -> tuple[Tensor, int | None]:
    """The value of a loss function as (mean, None) or (sum, count); anything else is refused."""
    loss, count = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of {loss.numel()} values" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RecipeError(f"loss.factory: {factory} returned {kind}; {_LOSS_FORMAT}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise RecipeError(
            f"loss.factory: {factory} returned a loss that does not depend on the weights, so nothing can be learned. "
            "Compute it from the model's output, without .item(), .detach() or no_grad"
        )
    if isinstance(value, tuple) and (not isinstance(count, int) or count < 0):
        raise RecipeError(
            f"loss.factory: {factory} returned a count that is a {type(count).__name__}, {count!r:.60}; return a plain "
            'int, 0 or more, that is known on the host, such as batch["count"]'
        )
    return loss.reshape(()), count


def check_single_batch(recipe: Recipe, *, single_rank: bool) -> None:
    """Without counts in the batches, (sum, count) works only if one batch on one rank makes the whole update."""
    if recipe.batch.accumulate > 1 or not single_rank:
        raise RecipeError(
            f'loss.factory: {recipe.loss.factory} returned (sum, count), but the batches have no "count", and the '
            "weight of each batch must be known before its loss is computed. Let data.collate return dicts with a "
            "count, or return a mean"
        )
