"""The training loop, on one page. `build` makes its parts; each technique has its own module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefoot import parallel
from surefoot.guard.attach import Guard
from surefoot.train import speed
from surefoot.train.accumulation import (
    MicroBatches,
    MicroBatchGroups,
    check_single_batch,
    sum_weight,
    target_count,
    to_device,
)
from surefoot.train.build import RunParts
from surefoot.train.evaluate import compute_loss, evaluate
from surefoot.train.reporter import LoopListener


def train(parts: RunParts, guard: Guard, listener: LoopListener) -> None:
    """Train until all updates are made; the guard may refuse updates, rewind, save or stop."""
    recipe = parts.recipe
    scaler = parts.precision.scaler
    parts.model.train()
    with speed.attention(recipe.speed):
        for batches in _updates(parts):
            tokens = _backward(parts, guard, batches)
            for optimizer in parts.optimizers:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            for optimizer, schedule in zip(parts.optimizers, parts.schedules, strict=True):
                schedule.step()
                optimizer.zero_grad()
            listener.updated(guard, tokens)
            if recipe.evaluation.every and (parts.step % recipe.evaluation.every == 0 or parts.step == parts.total):
                listener.evaluated(guard, parts.step, evaluate(parts))


def _updates(parts: RunParts) -> Iterator[MicroBatches[Any]]:
    """The micro-batches of each update, epoch after epoch, until the run is complete."""
    while parts.step < parts.total:
        for batches in MicroBatchGroups(parts.data.train_loader, parts.recipe.batch.accumulate):
            yield batches
            if parts.step >= parts.total:
                return


def _backward(parts: RunParts, guard: Guard, batches: MicroBatches[Any]) -> int | None:
    """Accumulate gradients of the mean loss over all targets on all ranks; returns the number of targets if known."""
    world, scaler = parts.world, parts.precision.scaler
    counts = [target_count(batch) for batch in batches]
    known = [count for count in counts if count is not None]
    total_count = parallel.all_reduce_sum(world, sum(known)) if len(known) == len(counts) else None
    for number, batch in enumerate(batches):
        batch = to_device(batch, world.device)
        with parallel.grad_sync(parts.model, number == len(batches) - 1):
            loss, count = compute_loss(parts, batch)
            if count is None:
                weight = 1.0 / len(batches)
            else:
                if total_count is None:
                    check_single_batch(parts.recipe, single_rank=world.size == 1)
                weight = count * sum_weight(count if total_count is None else total_count, ranks=world.size)
            loss = guard.watch(loss if count is None else loss / max(count, 1), batch) * weight
            (loss if scaler is None else scaler.scale(loss)).backward()
    return total_count
