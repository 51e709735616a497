"""Run by torchrun with two processes: adapters on frozen weights; both go back to a state that both can trust."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from adapted import Adapted, inputs
from scripted import script

import surefoot
from surefoot.records import Action


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Adapted(64)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(dist.get_rank())
    return model, torch.optim.AdamW(trained, lr=0.01)


def base_of(model: nn.Module) -> Tensor:
    (weight,) = [p for name, p in model.named_parameters() if name.endswith("base.weight")]
    return mine(weight)


def mine(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, optimizer: torch.optim.Optimizer, i: int, watch: Any, factor: float = 1.0) -> None:
    x = inputs(2 * i + dist.get_rank(), 64)
    watch((model(x) - x).square().mean() * factor, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [*model.parameters(), *model.buffers()]
    held += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [mine(t).detach().clone() for t in held]


def trial(kind: str, moved: bool, out: Path) -> dict[str, Any]:
    """Back at the end of attempt 11: to the state of attempt 7, or of 3 where one process cannot trust the newer."""
    model, optimizer = build(kind)
    guard = surefoot.attach(
        model, optimizer, run_dir=out / f"{kind}-{moved}", policy=surefoot.Policy(snapshot_every=4), resume=False
    )
    judge = script(guard, {9: {"action": Action.REWIND}})
    back = 3 if moved else 7
    for i in range(12):
        if moved and dist.get_rank() == 1 and i == 5:
            base_of(model).data.mul_(1.25)
        train(model, optimizer, i, guard.watch, 1.0 if i < 8 else 30.0)
    ring: Any = guard._recovery.ring  # type: ignore[attr-defined]
    whole = sum(mine(p).nbytes for p in model.parameters() if not p.requires_grad)
    once = ring.base_nbytes <= whole and len(ring.snapshots) > 1
    for i in range(12, 16):
        train(model, optimizer, i, guard.watch)
    twin = build(kind)
    for i in [*range(back + 1), *range(12, 16)]:
        train(*twin, i, lambda loss, _: loss)
    on = all(a.equal(b) for a, b in zip(contents(*twin), contents(model, optimizer), strict=True))
    told = {"rewinds": judge.rewinds, "on": on, "lost": guard.disabled, "once": once}
    guard.close()
    return told


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    told = {kind: trial(kind, False, out) for kind in ("ddp", "fsdp2")}
    told |= {f"{kind} moved": trial(kind, True, out) for kind in ("ddp", "fsdp2")}
    (out / f"told-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
