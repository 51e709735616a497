"""Trainings on two processes under the guard, with trouble on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small import build, micro_batch, summed, whole
from torch.distributed.tensor import DTensor

import surefoot
from surefoot import parallel


def refused(world: parallel.World, how: str, kind: type[torch.optim.Optimizer], where: Path) -> dict[str, Any]:
    """One micro-batch of rank 1 is not a number: what attach makes of it."""
    bare, make = build(kind)
    model = parallel.wrap_model(bare, how, world)
    optimizer = parallel.shard_optimizer(make(model), how, world)
    policy = surefoot.Policy(warmup=2)
    held = False
    with surefoot.attach(model, optimizer, run_dir=where, policy=policy, snapshot_memory=False) as guard:
        for step in range(5):
            before = [whole(p).clone() for p in model.parameters()]
            for number in range(2):
                inputs, targets = micro_batch(2 * step + number, world.rank)
                with parallel.grad_sync(model, sync=number == 1):
                    loss = summed(model, inputs, targets) / 16
                    if (step, number, world.rank) == (3, 0, 1):
                        loss = loss * float("nan")
                    guard.watch(loss, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                held = all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    dist.barrier()
    run = surefoot.read(where)
    return {"held": held, "verdicts": run.scalars["verdict"].tolist(), "rank": run.scalars["rank"].tolist()}


def scaled(world: parallel.World, how: str, where: Path) -> dict[str, Any]:
    """float16 with loss scaling; in the last update one value, on the first process alone, overflows."""
    bare, make = build()
    model = parallel.wrap_model(bare, how, world, compute_dtype=torch.float16)
    optimizer = parallel.shard_optimizer(make(model), how, world)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses: list[float] = []
    with surefoot.attach(model, optimizer, run_dir=where, scaler=scaler, snapshot_memory=False) as guard:
        for step in range(2):
            inputs, targets = micro_batch(step, world.rank)
            with torch.autocast("cpu", torch.float16, enabled=how == "data"):
                loss = summed(model, inputs, targets) / 16
            scaler.scale(guard.watch(loss, inputs)).backward()
            if step == 1 and (world.is_main or how == "data"):
                gradient = next(p.grad for p in model.parameters() if p.grad is not None)
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = float("inf")
            before = [whole(p).clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    held = all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    return {"losses": losses, "held": held, "scale": scaler.get_scale()}
