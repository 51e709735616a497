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
from surefoot.train.memory_recovery import EvaluationDoesNotFit, MemoryRecovery
from surefoot.train.split_batch import Piece


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
def evaluate(parts: RunParts, memory: MemoryRecovery | None = None) -> float | None:
    """The mean loss on held-out data over all ranks; None without such data, or where it does not fit into memory."""
    if parts.data.eval_loader is None:
        return None
    totals: list[tuple[Tensor, float]] = []
    with side_effect_free(parts.model):
        for number, batch in enumerate(parts.data.eval_loader):
            if number == parts.recipe.evaluation.batches:
                break
            if memory is None:
                totals.append(_total(parts, Piece(batch)))
                continue
            try:
                totals += _in_pieces(parts, memory, batch)
            except EvaluationDoesNotFit:
                return None
    total_loss = float(torch.stack([loss for loss, _ in totals]).sum()) if totals else 0.0
    counts = sum(count for _, count in totals)
    total_loss, counts = parallel.all_reduce_sum(parts.world, total_loss), parallel.all_reduce_sum(parts.world, counts)
    return total_loss / counts if counts else None


def _in_pieces(parts: RunParts, memory: MemoryRecovery, batch: Any) -> list[tuple[Tensor, float]]:
    """Loss and count of each piece that the batch has to be computed in."""
    losses: list[tuple[Tensor, float]] = []
    for attempt in memory.eval_attempts(batch):
        with attempt:
            attempt.losses = [_total(parts, piece) for piece in attempt.pieces]
        losses = attempt.losses
    return losses


def _total(parts: RunParts, piece: Piece) -> tuple[Tensor, float]:
    """Sum and count, or a mean that counts as one with all pieces of its batch together."""
    loss, count = compute_loss(parts, to_device(piece.batch, parts.world.device))
    return (loss.double(), count) if count is not None else (loss.double() * piece.share, piece.share)
