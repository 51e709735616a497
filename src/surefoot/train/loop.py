"""The training loop: one page, top to bottom. What it is made of is made in `build`, each technique in its own file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from surefoot import parallel
from surefoot.checkpoint.side_effect_free import side_effect_free
from surefoot.guard.attach import Guard
from surefoot.train import speed
from surefoot.train.accumulation import Group, Groups, share_of_sum
from surefoot.train.batches import check_alone, check_loss, count_of, to_device
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
    counts = [count_of(batch) for batch in group]
    known = [count for count in counts if count is not None]
    counted = parallel.total(world, sum(known)) if len(known) == len(counts) else None
    for number, batch in enumerate(group):
        batch = to_device(batch, world.device)
        with parallel.exchanging(parts.model, number == len(group) - 1):
            loss, count = _loss(parts, batch)
            if count is None:
                share = 1.0 / len(group)
            else:
                if counted is None:
                    check_alone(parts.recipe, alone=world.size == 1)
                share = count * share_of_sum(count if counted is None else counted, ranks=world.size)
            loss = guard.watch(loss if count is None else loss / max(count, 1), batch) * share
            (loss if scaler is None else scaler.scale(loss)).backward()
    return counted


def _loss(parts: Parts, batch: Any) -> tuple[Tensor, int | None]:
    with parts.precision.forward():
        return check_loss(parts.loss(parts.forward, batch), parts.recipe.loss.factory)


@torch.no_grad()
def evaluate(parts: Parts) -> float | None:
    """The mean loss on held-out data, over all processes; None without such data."""
    if parts.data.held_out is None:
        return None
    losses, counts = [], 0
    with side_effect_free(parts.model):
        for number, batch in enumerate(parts.data.held_out):
            if number == parts.recipe.evaluation.batches:
                break
            loss, count = _loss(parts, to_device(batch, parts.world.device))
            losses.append(loss.double())
            counts += 1 if count is None else count
    summed = float(torch.stack(losses).sum()) if losses else 0.0
    summed, counts = parallel.total(parts.world, summed), parallel.total(parts.world, counts)
    return summed / counts if counts else None
