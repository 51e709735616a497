"""The training loop: one page, top to bottom. What it is made of is made in `build`, each technique in its own file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot import parallel
from surefoot.guard import Guard
from surefoot.train import speed
from surefoot.train.accumulation import Group, Groups, share_of_sum
from surefoot.train.build import Parts
from surefoot.train.telling import Listener


def train(parts: Parts, guard: Guard, telling: Listener) -> None:
    """Train until all updates are made; the guard refuses, rewinds, saves and stops as it sees fit."""
    recipe = parts.recipe
    scaler = parts.precision.scaler
    parts.model.train()
    with speed.attention(recipe.speed):
        for group in _groups(parts):
            tokens = _backward(parts, guard, group)
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
            telling.updated(guard, tokens)
            if recipe.evaluation.every and (parts.step % recipe.evaluation.every == 0 or parts.step == parts.total):
                telling.evaluated(guard, parts.step, evaluate(parts))


def _groups(parts: Parts) -> Iterator[Group[Any]]:
    """The micro-batches of one update after the other, epoch after epoch, until the run is over."""
    while parts.step < parts.total:
        for group in Groups(parts.data.train, parts.recipe.batch.accumulate):
            yield group
            if parts.step >= parts.total:
                return


def _backward(parts: Parts, guard: Guard, group: Group[Any]) -> int | None:
    """Gradients of the mean over all that counts in the group, on all processes; what counted is returned."""
    world, scaler = parts.world, parts.precision.scaler
    counts = [batch.get("count") if isinstance(batch, Mapping) else None for batch in group]
    known = [count for count in counts if count is not None]
    counted = parallel.total(world, sum(known)) if len(known) == len(counts) else None
    for number, batch in enumerate(group):
        batch = to_device(batch, world.device)
        with parallel.exchanging(parts.model, number == len(group) - 1):
            with parts.precision.forward():
                loss, count = _told(parts.loss(parts.forward, batch))
            if count is None or counted is None:
                share = 1.0 / len(group)
            else:
                share = count * share_of_sum(counted, ranks=world.size)
            loss = guard.watch(loss if count is None else loss / max(count, 1), batch) * share
            (loss if scaler is None else scaler.scale(loss)).backward()
    return counted


@torch.no_grad()
def evaluate(parts: Parts) -> float | None:
    """The mean loss on held-out data, over all processes; None without such data."""
    if parts.data.held_out is None:
        return None
    parts.model.eval()
    losses, counts = [], 0
    for number, batch in enumerate(parts.data.held_out):
        if number == parts.recipe.evaluation.batches:
            break
        with parts.precision.forward():
            loss, count = _told(parts.loss(parts.forward, to_device(batch, parts.world.device)))
        losses.append(loss.double())
        counts += 1 if count is None else count
    parts.model.train()
    summed = float(torch.stack(losses).sum())
    return parallel.total(parts.world, summed) / max(1, parallel.total(parts.world, counts))


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch where the model is; pinned memory goes there without a wait."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _told(found: Tensor | tuple[Tensor, int]) -> tuple[Tensor, int | None]:
    """A loss as (mean, None) or (sum, count)."""
    return found if isinstance(found, tuple) else (found, None)
