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
from surefoot.train.memory_recovery import MemoryRecovery
from surefoot.train.reporter import LoopListener
from surefoot.train.update_attempt import Phase, UpdateAttempt


def train(parts: RunParts, guard: Guard, listener: LoopListener, memory: MemoryRecovery | None = None) -> None:
    """Train until all updates are made; the guard may refuse updates, rewind, save or stop.

    Without `memory`, an update that does not fit into memory ends the run.
    """
    recipe = parts.recipe
    memory = memory or MemoryRecovery(parts, guard, enabled=False)
    parts.model.train()
    with speed.attention(recipe.speed):
        for batches in _updates(parts):
            tokens = _count_targets(parts, batches)
            for attempt in memory.attempts(batches):  # one, unless it runs out of memory
                with attempt:
                    _backward(parts, guard, attempt, tokens)
                    _step(parts, attempt)
            for optimizer, schedule in zip(parts.optimizers, parts.schedules, strict=True):
                schedule.step()
                optimizer.zero_grad()
            listener.updated(guard, tokens)
            if recipe.evaluation.every and (parts.step % recipe.evaluation.every == 0 or parts.step == parts.total):
                listener.evaluated(guard, parts.step, evaluate(parts, memory))


def _updates(parts: RunParts) -> Iterator[MicroBatches[Any]]:
    """The micro-batches of each update, epoch after epoch, until the run is complete."""
    while parts.step < parts.total:
        for batches in MicroBatchGroups(parts.data.train_loader, parts.recipe.batch.accumulate):
            yield batches
            if parts.step >= parts.total:
                return


def _count_targets(parts: RunParts, batches: MicroBatches[Any]) -> int | None:
    """The targets of an update on all ranks, if the batches know theirs."""
    counts = [target_count(batch) for batch in batches]
    known = [count for count in counts if count is not None]
    return parallel.all_reduce_sum(parts.world, sum(known)) if len(known) == len(counts) else None


def _backward(parts: RunParts, guard: Guard, attempt: UpdateAttempt, total_count: int | None) -> None:
    """Accumulate gradients of the mean loss over all targets on all ranks."""
    world, scaler = parts.world, parts.precision.scaler
    for number, piece in enumerate(attempt.pieces, 1):
        attempt.begin(number)
        batch = to_device(piece.batch, world.device)
        attempt.phase = Phase.FORWARD
        with parallel.grad_sync(parts.model, attempt.at_last):
            loss, count = compute_loss(parts, batch)
            if count is None:
                weight = piece.share / attempt.num_batches
            else:
                if total_count is None:
                    check_single_batch(parts.recipe, single_rank=world.size == 1)
                weight = count * sum_weight(count if total_count is None else total_count, ranks=world.size)
            loss = guard.watch(loss if count is None else loss / max(count, 1), batch) * weight
            attempt.phase = Phase.BACKWARD
            (loss if scaler is None else scaler.scale(loss)).backward()


def _step(parts: RunParts, attempt: UpdateAttempt) -> None:
    attempt.begin_step(parts.optimizers)
    scaler = parts.precision.scaler
    for optimizer in parts.optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
