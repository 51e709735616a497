"""Run by torchrun with two ranks: a small model trained with every strategy, compared with a single process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from guarded_training import train_with_nan, train_with_overflow
from small_training import build, full_tensor_of, micro_batch, sum_loss
from torch import Tensor

from surefoot import parallel
from surefoot.parallel.sharding import SHARDABLE, STRATEGIES

BATCHES, ACCUMULATE = 10, 4
"""Two full groups of micro-batches and one of two."""


def train_single(optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[list[float], list[Tensor]]:
    """The same training in a single process; a group of micro-batches is one batch."""
    model, make_optimizer = build(optimizer_class)
    optimizer = make_optimizer(model)
    losses: list[float] = []
    for first in range(0, BATCHES, ACCUMULATE):
        group = [micro_batch(i, r) for i in range(first, min(first + ACCUMULATE, BATCHES)) for r in range(2)]
        inputs, targets = (torch.cat(part) for part in zip(*group, strict=True))
        loss = sum_loss(model, inputs, targets) / int((targets >= 0).sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def train_two_ranks(
    world: parallel.World,
    strategy: str,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    compute: torch.dtype = torch.float32,
    compiled: bool = False,
    keep: bool = False,
) -> tuple[list[float], list[Tensor]]:
    """The same training on two ranks in micro-batches."""
    unwrapped, make_optimizer = build(optimizer_class)
    if compiled and strategy in ("zero2", "zero3"):
        for block in parallel.find_blocks(unwrapped):
            block.compile(backend="eager")
    float32_modules = [unwrapped.get_submodule("blocks.0.mlp"), unwrapped.get_submodule("norm")] if keep else []
    model: Any = parallel.wrap_model(unwrapped, strategy, world, compute_dtype=compute, keep_float32=float32_modules)
    if compiled and strategy in ("data", "zero1"):
        model = torch.compile(model, backend="eager")
    optimizer = parallel.shard_optimizer(make_optimizer(model), strategy, world)
    losses: list[float] = []
    for first in range(0, BATCHES, ACCUMULATE):
        group = [micro_batch(i, world.rank) for i in range(first, min(first + ACCUMULATE, BATCHES))]
        count = parallel.all_reduce_sum(world, sum(int((targets >= 0).sum()) for _, targets in group))
        local_loss = 0.0
        for number, (inputs, targets) in enumerate(group):
            with parallel.grad_sync(model, sync=number == len(group) - 1):
                loss = sum_loss(model, inputs, targets) / count
                (loss * world.size).backward()
            local_loss += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parallel.all_reduce_sum(world, local_loss))
    return losses, [full_tensor_of(p) for p in model.parameters()]


def max_difference(first: Sequence[Any], second: Sequence[Any]) -> float:
    """The largest absolute difference."""
    pairs = zip(first, second, strict=True)
    return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in pairs)


def compare_strategies(world: parallel.World) -> dict[str, Any]:
    """Differences of every strategy to the single process."""
    results: dict[str, Any] = {}
    losses, weights = train_single()
    for strategy in STRATEGIES:
        two_rank_losses, two_rank_weights = train_two_ranks(world, strategy)
        results[strategy] = {
            "losses": max_difference(losses, two_rank_losses),
            "weights": max_difference(weights, two_rank_weights),
            "steps": len(two_rank_losses),
        }
    for strategy in ("data", "zero3"):
        two_rank_losses, two_rank_weights = train_two_ranks(world, strategy, compiled=True)
        results[f"{strategy} compiled"] = {
            "losses": max_difference(losses, two_rank_losses),
            "weights": max_difference(weights, two_rank_weights),
        }
    for strategy in ("zero2", "zero3"):
        two_rank_losses, _ = train_two_ranks(world, strategy, compute=torch.bfloat16)
        results[f"{strategy} bfloat16"] = {
            "losses": max_difference(losses, two_rank_losses),
            "steps": len(two_rank_losses),
        }
    two_rank_losses, _ = train_two_ranks(world, "zero3", compute=torch.bfloat16, keep=True)
    results["zero3 bfloat16 kept"] = {"losses": max_difference(losses, two_rank_losses), "steps": len(two_rank_losses)}
    for optimizer_class in SHARDABLE:
        losses, weights = train_single(optimizer_class)
        two_rank_losses, two_rank_weights = train_two_ranks(world, "zero1", optimizer_class)
        results[f"zero1 {optimizer_class.__name__}"] = {
            "losses": max_difference(losses, two_rank_losses),
            "weights": max_difference(weights, two_rank_weights),
        }
    return results


def grads_unsynchronised(world: parallel.World, strategy: str) -> bool:
    """Whether gradients still differ between ranks after a micro-batch that is not the last of its group."""
    unwrapped, _ = build()
    model = parallel.wrap_model(unwrapped, strategy, world)
    with parallel.grad_sync(model, sync=False):
        sum_loss(model, *micro_batch(0, world.rank)).backward()
    if strategy in ("zero2", "zero3"):
        return all(p.grad is None for p in model.parameters())  # FSDP keeps the unsharded gradients elsewhere
    local = sum(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None)
    return parallel.all_reduce_sum(world, local) != 2 * local


def shut_down_after_failure(world: parallel.World) -> bool:
    """Rank 0 fails while rank 1 waits for it; both shut down and neither hangs."""
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
    world = parallel.init_distributed("cpu", timeout=60)  # a sweep does this once per run
    results: dict[str, Any] = compare_strategies(world)
    results["refused"] = {
        f"{strategy} {optimizer_class.__name__}": train_with_nan(
            world, strategy, optimizer_class, out / f"{strategy}-{optimizer_class.__name__}"
        )
        for strategy in STRATEGIES
        for optimizer_class in (SHARDABLE if strategy == "zero1" else (torch.optim.AdamW,))
    }
    results["scaled"] = {
        strategy: train_with_overflow(world, strategy, out / f"{strategy}-scaled") for strategy in ("data", "zero3")
    }
    results["unsynchronised"] = {strategy: grads_unsynchronised(world, strategy) for strategy in STRATEGIES}
    results["total"] = [parallel.all_reduce_sum(world, 2 + world.rank), parallel.all_reduce_sum(world, 0.25)]
    results["first"] = parallel.broadcast(world, {"rank": world.rank})
    results["version_notes"] = parallel.check_versions(world)
    results["shut_down"] = shut_down_after_failure(world)
    (out / f"results-{world.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
