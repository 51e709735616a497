"""Run by torchrun with two ranks: a NaN on rank 1 only, both rewind to the same snapshot and continue."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rewind_runs import Run, batch, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from surefoot.checkpoint.snapshots import SnapshotRing
from surefoot.checkpoint.train_state import TrainState

KINDS = ("ddp", "ddp compiled", "fsdp2", "fsdp2 fused", "zero")


def build(kind: str) -> Run:
    run = Run()
    run.model = nn.Sequential(run.model, nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    if kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(run.model[0], mesh=mesh)
        fully_shard(run.model, mesh=mesh)
    else:
        run.model = nn.parallel.DistributedDataParallel(run.model)
    run.forward = torch.compile(run.model, backend="eager") if "compiled" in kind else run.model  # pyright: ignore
    if kind == "zero":
        run.optimizer = ZeroRedundancyOptimizer(run.model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    else:
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01, fused="fused" in kind)
    run.schedulers = [torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.8)]
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    return run


def contents(run: Run) -> Any:
    """State of the run; of a sharded optimizer the local part."""
    outer = run.optimizer
    run.optimizer = getattr(outer, "optim", outer)
    state = run.contents()
    run.optimizer = outer
    return state


def trial(kind: str) -> dict[str, Any]:
    rank = dist.get_rank()
    undisturbed = build(kind)
    for i in range(5):
        undisturbed.train(2 * i + rank)
    run = build(kind)
    ring = SnapshotRing(TrainState(run.model, run.optimizer, scheduler=run.schedulers), size=2)
    for i in range(3):
        run.train(2 * i + rank)
        if i != 1:
            ring.take(attempt=i, step=i)
    before, addresses = contents(run), run.addresses()
    ring.mark_good(2)
    run.train(21 + rank)
    run.train(23 + rank, math.nan if rank == 1 else 1.0)
    nonfinite = not all(bool(p.isfinite().all()) for p in (q.detach() for q in run.model.parameters()))
    run.model.eval()
    with torch.no_grad():
        run.model(batch(0)[0])  # leaves the root's weights gathered under FSDP2
    run.model.train()
    state = ring.newest_good()
    assert state is not None
    ring.rewind(state)
    restored = same(before, contents(run))
    in_place = run.addresses() == addresses
    getattr(run.optimizer, "optim", run.optimizer).state.clear()
    ring.rewind(state)
    recreated = same(before, contents(run))
    for i in range(3, 5):
        run.train(2 * i + rank)
    continues = same(contents(undisturbed), contents(run))
    return {
        "attempt": state.attempt,
        "nonfinite": nonfinite,
        "restored": restored,
        "in place": in_place,
        "recreated": recreated,
        "continues": continues,
    }


def placements() -> bool:
    """Capture and restore DTensors of every placement, some of them uneven."""
    mesh = init_device_mesh("cpu", (2,))
    kinds = [[Shard(0)], [Shard(1)], [Replicate()]]
    weights = [nn.Parameter(distribute_tensor(torch.arange(15.0).view(5, 3), mesh, kind)) for kind in kinds]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    train_state = TrainState(nn.ParameterList(weights), optimizer)

    def step() -> list[Any]:
        for w in weights:
            w.grad = torch.ones_like(w)
        optimizer.step()
        tensors = [t for w in weights for t in (w, optimizer.state[w]["momentum_buffer"])]
        return [t.to_local().detach().clone() for t in tensors if isinstance(t, DTensor)]

    step()
    copy = train_state.capture()
    first = step()
    train_state.restore(copy)
    second = step()
    optimizer.state.clear()
    train_state.restore(copy)
    return len(first) == 6 and same(first, second) and same(first, step())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {kind: trial(kind) for kind in KINDS}
    results["placements"] = placements()
    (Path(sys.argv[1]) / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
