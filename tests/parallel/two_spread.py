"""Run by torchrun with two processes: one small model trained in every way, beside one plain process's way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import surefoot
from surefoot import parallel
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.parallel.optimizer import SHARDABLE
from surefoot.parallel.spreading import WAYS

SIZE = DecoderConfig(vocab=32, width=16, layers=2, heads=2, context=8)
BATCHES, ACCUMULATE, SAMPLES = 10, 4, 2
"""Two full groups of micro-batches and one of two."""


def micro_batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which some do not count; how many differs from batch to batch and from rank to rank."""
    chance = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(0, SIZE.vocab, (SAMPLES, 9), generator=chance)
    targets = tokens[:, 1:].clone()
    targets[0, : int(torch.randint(0, 8, (), generator=chance))] = -100
    return tokens[:, :-1], targets


def summed(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def build(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    torch.manual_seed(0)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        return kind(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 0.01, **options
        )

    return Decoder(SIZE), optimizer


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
        for block in parallel.blocks_of(bare):
            block.compile(backend="eager")
    kept = [bare.get_submodule("blocks.0.mlp"), bare.get_submodule("norm")] if keep else []
    model: Any = parallel.spread(bare, how, world, compute=compute, keep_float32=kept)
    if compiled and how in ("data", "zero1"):
        model = torch.compile(model, backend="eager")
    optimizer = parallel.optimizer_for(make(model), how, world)
    losses: list[float] = []
    for first in range(0, BATCHES, ACCUMULATE):
        group = [micro_batch(i, world.rank) for i in range(first, min(first + ACCUMULATE, BATCHES))]
        count = parallel.total(world, sum(int((targets >= 0).sum()) for _, targets in group))
        mine = 0.0
        for number, (inputs, targets) in enumerate(group):
            with parallel.exchanging(model, last=number == len(group) - 1):
                loss = summed(model, inputs, targets) / count
                (loss * world.size).backward()
            mine += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parallel.total(world, mine))
    return losses, [whole(p) for p in model.parameters()]


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def apart(one: Sequence[Any], other: Sequence[Any]) -> float:
    """The largest difference, whatever it is of."""
    pairs = zip(one, other, strict=True)
    return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in pairs)


def compared(world: parallel.World) -> dict[str, Any]:
    """How far every way is from one plain process."""
    told: dict[str, Any] = {}
    losses, weights = plain()
    for how in WAYS:
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
    model = parallel.spread(bare, how, world)
    with parallel.exchanging(model, last=False):
        summed(model, *micro_batch(0, world.rank)).backward()
    if how in ("zero2", "zero3"):
        return all(p.grad is None for p in model.parameters())  # kept whole, beside the shards
    mine = sum(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None)
    return parallel.total(world, mine) != 2 * mine


def refused(world: parallel.World, how: str, kind: type[torch.optim.Optimizer], where: Path) -> dict[str, Any]:
    """One micro-batch of rank 1 is not a number: what attach makes of it."""
    bare, make = build(kind)
    model = parallel.spread(bare, how, world)
    optimizer = parallel.optimizer_for(make(model), how, world)
    policy = surefoot.Policy(warmup=2)
    held = False
    with surefoot.attach(model, optimizer, run_dir=where, policy=policy, ring=False) as guard:
        for step in range(5):
            before = [whole(p).clone() for p in model.parameters()]
            for number in range(2):
                inputs, targets = micro_batch(2 * step + number, world.rank)
                with parallel.exchanging(model, last=number == 1):
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
    model = parallel.spread(bare, how, world, compute=torch.float16)
    optimizer = parallel.optimizer_for(make(model), how, world)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses: list[float] = []
    with surefoot.attach(model, optimizer, run_dir=where, scaler=scaler, ring=False) as guard:
        for step in range(2):
            inputs, targets = micro_batch(step, world.rank)
            with torch.autocast("cpu", torch.float16, enabled=how == "data"):
                loss = summed(model, inputs, targets) / 16
            scaler.scale(guard.watch(loss, inputs)).backward()
            if step == 1 and (world.first or how == "data"):
                gradient = next(p.grad for p in model.parameters() if p.grad is not None)
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = float("inf")
            before = [whole(p).clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    held = all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    return {"losses": losses, "held": held, "scale": scaler.get_scale()}


def left(world: parallel.World) -> bool:
    """The first process fails while the other waits for it: both leave, and neither hangs."""
    try:
        if world.first:
            raise RuntimeError("planted")
        parallel.total(world, 1)
    except RuntimeError:
        parallel.end(world, failed=True)
    return not dist.is_initialized()


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    world = parallel.start("cpu", timeout=60)
    told: dict[str, Any] = compared(world)
    told["refused"] = {
        f"{how} {kind.__name__}": refused(world, how, kind, out / f"{how}-{kind.__name__}")
        for how in WAYS
        for kind in (SHARDABLE if how == "zero1" else (torch.optim.AdamW,))
    }
    told["scaled"] = {how: scaled(world, how, out / f"{how}-scaled") for how in ("data", "zero3")}
    told["quiet"] = {how: quiet(world, how) for how in WAYS}
    told["total"] = [parallel.total(world, 2 + world.rank), parallel.total(world, 0.25)]
    told["first"] = parallel.from_first(world, {"rank": world.rank})
    told["odd"] = parallel.same_everywhere(world)
    told["left"] = left(world)
    (out / f"told-{world.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
