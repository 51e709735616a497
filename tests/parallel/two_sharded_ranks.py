"""Run by torchrun with two processes: one small model trained in every way, beside one plain process's way."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from guarded import refused, scaled
from small import build, micro_batch, summed, whole
from torch import Tensor

from surefoot import parallel
from surefoot.parallel.sharding import SHARDABLE, STRATEGIES

BATCHES, ACCUMULATE = 10, 4
"""Two full groups of micro-batches and one of two."""


def plain(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[list[float], list[Tensor]]:
    """The same training in one process that holds everything: a group is one batch."""
    model, make = build(kind)
    optimizer = make(model)
    losses: list[float] = []
    for first in range(0, BATCHES, ACCUMULATE):
        group = [micro_batch(i, r) for i in range(first, min(first + ACCUMULATE, BATCHES)) for r in range(2)]
        inputs, targets = (torch.cat(part) for part in zip(*group, strict=True))
        loss = summed(model, inputs, targets) / int((targets >= 0).sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def trained(
    world: parallel.World,
    how: str,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    compute: torch.dtype = torch.float32,
    compiled: bool = False,
    keep: bool = False,
) -> tuple[list[float], list[Tensor]]:
    """The same on two processes, in micro-batches."""
    bare, make = build(kind)
    if compiled and how in ("zero2", "zero3"):
        for block in parallel.find_blocks(bare):
            block.compile(backend="eager")
    kept = [bare.get_submodule("blocks.0.mlp"), bare.get_submodule("norm")] if keep else []
    model: Any = parallel.wrap_model(bare, how, world, compute_dtype=compute, keep_float32=kept)
    if compiled and how in ("data", "zero1"):
        model = torch.compile(model, backend="eager")
    optimizer = parallel.shard_optimizer(make(model), how, world)
    losses: list[float] = []
    for first in range(0, BATCHES, ACCUMULATE):
        group = [micro_batch(i, world.rank) for i in range(first, min(first + ACCUMULATE, BATCHES))]
        count = parallel.all_reduce_sum(world, sum(int((targets >= 0).sum()) for _, targets in group))
        mine = 0.0
        for number, (inputs, targets) in enumerate(group):
            with parallel.grad_sync(model, sync=number == len(group) - 1):
                loss = summed(model, inputs, targets) / count
                (loss * world.size).backward()
            mine += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parallel.all_reduce_sum(world, mine))
    return losses, [whole(p) for p in model.parameters()]


def apart(one: Sequence[Any], other: Sequence[Any]) -> float:
    """The largest difference, whatever it is of."""
    pairs = zip(one, other, strict=True)
    return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in pairs)


def compared(world: parallel.World) -> dict[str, Any]:
    """How far every way is from one plain process."""
    told: dict[str, Any] = {}
    losses, weights = plain()
    for how in STRATEGIES:
        there, moved = trained(world, how)
        told[how] = {"losses": apart(losses, there), "weights": apart(weights, moved), "steps": len(there)}
    for how in ("data", "zero3"):
        there, moved = trained(world, how, compiled=True)
        told[f"{how} compiled"] = {"losses": apart(losses, there), "weights": apart(weights, moved)}
    for how in ("zero2", "zero3"):
        there, _ = trained(world, how, compute=torch.bfloat16)
        told[f"{how} bfloat16"] = {"losses": apart(losses, there), "steps": len(there)}
    there, _ = trained(world, "zero3", compute=torch.bfloat16, keep=True)
    told["zero3 bfloat16 kept"] = {"losses": apart(losses, there), "steps": len(there)}
    for kind in SHARDABLE:
        losses, weights = plain(kind)
        there, moved = trained(world, "zero1", kind)
        told[f"zero1 {kind.__name__}"] = {"losses": apart(losses, there), "weights": apart(weights, moved)}
    return told


def quiet(world: parallel.World, how: str) -> bool:
    """Whether a micro-batch that is not the last of its group leaves each process with gradients of its own."""
    bare, _ = build()
    model = parallel.wrap_model(bare, how, world)
    with parallel.grad_sync(model, sync=False):
        summed(model, *micro_batch(0, world.rank)).backward()
    if how in ("zero2", "zero3"):
        return all(p.grad is None for p in model.parameters())  # kept whole, beside the shards
    mine = sum(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None)
    return parallel.all_reduce_sum(world, mine) != 2 * mine


def left(world: parallel.World) -> bool:
    """The first process fails while the other waits for it: both leave, and neither hangs."""
    try:
        if world.is_main:
            raise RuntimeError("planted")
        parallel.all_reduce_sum(world, 1)
    except RuntimeError:
        parallel.shutdown(world, failed=True)
    return not dist.is_initialized()


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    parallel.shutdown(parallel.init_distributed("cpu", timeout=60))
    world = parallel.init_distributed("cpu", timeout=60)  # as a sweep does, once for every run
    told: dict[str, Any] = compared(world)
    told["refused"] = {
        f"{how} {kind.__name__}": refused(world, how, kind, out / f"{how}-{kind.__name__}")
        for how in STRATEGIES
        for kind in (SHARDABLE if how == "zero1" else (torch.optim.AdamW,))
    }
    told["scaled"] = {how: scaled(world, how, out / f"{how}-scaled") for how in ("data", "zero3")}
    told["quiet"] = {how: quiet(world, how) for how in STRATEGIES}
    told["total"] = [parallel.all_reduce_sum(world, 2 + world.rank), parallel.all_reduce_sum(world, 0.25)]
    told["first"] = parallel.broadcast(world, {"rank": world.rank})
    told["odd"] = parallel.check_versions(world)
    told["left"] = left(world)
    (out / f"told-{world.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
