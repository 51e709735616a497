"""Run by torchrun with two ranks: adapters on frozen weights; both rewind to a snapshot that is valid on both."""

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
from frozen_models import AdapterModel, inputs
from scripted_judge import script

import surefoot
from surefoot.records import Action


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = AdapterModel(64)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(dist.get_rank())
    return model, torch.optim.AdamW(trained, lr=0.01)


def base_of(model: nn.Module) -> Tensor:
    (weight,) = [p for name, p in model.named_parameters() if name.endswith("base.weight")]
    return to_local(weight)


def to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, optimizer: torch.optim.Optimizer, i: int, watch: Any, factor: float = 1.0) -> None:
    x = inputs(2 * i + dist.get_rank(), 64)
    watch((model(x) - x).square().mean() * factor, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [to_local(t).detach().clone() for t in tensors]


def trial(kind: str, moved: bool, out: Path) -> dict[str, Any]:
    """Rewind at the end of attempt 11: to the snapshot of attempt 7, or of 3 where the newer is invalid on one rank."""
    model, optimizer = build(kind)
    guard = surefoot.attach(
        model, optimizer, run_dir=out / f"{kind}-{moved}", policy=surefoot.Policy(snapshot_every=4), resume=False
    )
    judge = script(guard, {9: {"action": Action.REWIND}})
    rewound_to = 3 if moved else 7
    for i in range(12):
        if moved and dist.get_rank() == 1 and i == 5:
            base_of(model).data.mul_(1.25)
        train(model, optimizer, i, guard.watch, 1.0 if i < 8 else 30.0)
    ring: Any = guard._recovery.ring  # type: ignore[attr-defined]
    frozen_nbytes = sum(to_local(p).nbytes for p in model.parameters() if not p.requires_grad)
    stored_once = ring.base_nbytes <= frozen_nbytes and len(ring.snapshots) > 1
    for i in range(12, 16):
        train(model, optimizer, i, guard.watch)
    twin = build(kind)
    for i in [*range(rewound_to + 1), *range(12, 16)]:
        train(*twin, i, lambda loss, _: loss)
    continues = all(a.equal(b) for a, b in zip(contents(*twin), contents(model, optimizer), strict=True))
    results = {"rewinds": judge.rewinds, "on": continues, "lost": guard.disabled, "once": stored_once}
    guard.close()
    return results


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    results = {kind: trial(kind, False, out) for kind in ("ddp", "fsdp2")}
    results |= {f"{kind} moved": trial(kind, True, out) for kind in ("ddp", "fsdp2")}
    (out / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
