"""Guarded training on two ranks with a fault on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_training import build, full_tensor_of, micro_batch, sum_loss
from torch.distributed.tensor import DTensor

import surefoot
from surefoot import parallel


def train_with_nan(
    world: parallel.World, strategy: str, optimizer_class: type[torch.optim.Optimizer], run_dir: Path
) -> dict[str, Any]:
    """One micro-batch of rank 1 has a NaN loss; both ranks must refuse the update."""
    unwrapped, make_optimizer = build(optimizer_class)
    model = parallel.wrap_model(unwrapped, strategy, world)
    optimizer = parallel.shard_optimizer(make_optimizer(model), strategy, world)
    policy = surefoot.Policy(warmup=2)
    unchanged = False
    with surefoot.attach(model, optimizer, run_dir=run_dir, policy=policy, snapshot_memory=False) as guard:
        for step in range(5):
            before = [full_tensor_of(p).clone() for p in model.parameters()]
            for number in range(2):
                inputs, targets = micro_batch(2 * step + number, world.rank)
                with parallel.grad_sync(model, sync=number == 1):
                    loss = sum_loss(model, inputs, targets) / 16
                    if (step, number, world.rank) == (3, 0, 1):
                        loss = loss * float("nan")
                    guard.watch(loss, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                unchanged = all(
                    torch.equal(a, full_tensor_of(b)) for a, b in zip(before, model.parameters(), strict=True)
                )
    dist.barrier()
    run = surefoot.read(run_dir)
    return {"unchanged": unchanged, "verdicts": run.scalars["verdict"].tolist(), "rank": run.scalars["rank"].tolist()}


def train_with_overflow(world: parallel.World, strategy: str, run_dir: Path) -> dict[str, Any]:
    """float16 with loss scaling; in the last update one gradient of rank 0 overflows."""
    unwrapped, make_optimizer = build()
    model = parallel.wrap_model(unwrapped, strategy, world, compute_dtype=torch.float16)
    optimizer = parallel.shard_optimizer(make_optimizer(model), strategy, world)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses: list[float] = []
    with surefoot.attach(model, optimizer, run_dir=run_dir, scaler=scaler, snapshot_memory=False) as guard:
        for step in range(2):
            inputs, targets = micro_batch(step, world.rank)
            with torch.autocast("cpu", torch.float16, enabled=strategy == "data"):
                loss = sum_loss(model, inputs, targets) / 16
            scaler.scale(guard.watch(loss, inputs)).backward()
            if step == 1 and (world.is_main or strategy == "data"):
                gradient = next(p.grad for p in model.parameters() if p.grad is not None)
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = float("inf")
            before = [full_tensor_of(p).clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    unchanged = all(torch.equal(a, full_tensor_of(b)) for a, b in zip(before, model.parameters(), strict=True))
    return {"losses": losses, "unchanged": unchanged, "scale": scaler.get_scale()}
