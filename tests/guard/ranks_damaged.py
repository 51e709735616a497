"""Run by torchrun: weights or optimizer state are damaged on all ranks or on one; models of few and many tensors."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import surefoot

TENSORS = (1, 2, 3, 7)
DAMAGES = ("none", "scaled on all", "nan on all", "scaled on one", "nan on one", "nudged on one", "state on one")
FEWER = ("nan on all", "scaled on one", "nudged on one")
"""With more than two ranks: damage seen by all ranks, by one, and by none."""
AT = 28
STEPS = 46
POLICY = surefoot.Policy(weights_every=8, snapshot_every=4, healthy_steps_to_trust=4, warmup=12)


def model_of(tensors: int) -> nn.Module:
    """A model with this many parameters: layers without biases."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k in range(tensors):
        layers += [nn.Linear(6, 6 if k < tensors - 1 else 1, bias=False), nn.Tanh()]
    return nn.parallel.DistributedDataParallel(nn.Sequential(*layers[:-1]))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 6, generator=generator)
    return x, torch.tanh(x[:, :1] - x[:, 1:2]) + 0.2 * torch.randn(32, 1, generator=generator)


def harm(damage: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kind, _, where = damage.partition(" on ")
    if where == "one" and dist.get_rank() != dist.get_world_size() - 1:
        return
    first = next(model.parameters())
    with torch.no_grad():
        if kind == "scaled":
            first.mul_(100.0)
        elif kind == "nan":
            first[0, 0] = float("nan")
        elif kind == "nudged":
            first[0, 0] += 1e-4
        elif kind == "state":
            optimizer.state[first]["exp_avg"].add_(0.05)


def equal_everywhere(model: nn.Module) -> bool:
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return all(torch.equal(other, gathered[0]) for other in gathered) and bool(gathered[0].isfinite().all())


def trial(tensors: int, damage: str, where: Path) -> dict[str, Any]:
    model = model_of(tensors)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    guard = surefoot.attach(model, optimizer, run_dir=where, policy=POLICY)
    events: list[dict[str, Any]] = []
    guard.on_event(lambda event: events.append(event.as_json()))
    stopped = False
    for step in range(STEPS):
        x, y = batch_of(step, dist.get_rank())
        loss = guard.watch(nn.functional.mse_loss(model(x), y), (x, y))
        loss.backward()
        try:
            optimizer.step()
        except surefoot.TrainingStopped:
            stopped = True
            break
        optimizer.zero_grad()
        if step == AT:
            harm(damage, model, optimizer)
    lost, step_count = guard.disabled, guard.step
    guard.close()
    findings = [e for e in events if e["kind"] == "finding" and e["detector"] == "replicas"]
    return {
        "stopped": stopped,
        "lost": lost,
        "step": step_count,
        "equal": equal_everywhere(model),
        "rewound": [e["values"] for e in events if e["kind"] == "note" and e["name"] == "rewound"],
        "decided": [[e["action"], e["cause"], e["attempt"]] for e in events if e["kind"] == "decision"],
        "apart": [e["evidence"]["culprit_rank"] for e in findings if not e["evidence"]["equal"]],
        "again": sum(e["evidence"]["equal"] for e in findings),
        "details": [e["detail"] for e in findings],
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    out = Path(sys.argv[1])
    results = {
        f"{tensors} tensors, {damage}": trial(tensors, damage, out / f"{tensors}-{damage}")
        for tensors in TENSORS
        for damage in (DAMAGES if dist.get_world_size() == 2 else FEWER if tensors < 7 else ("none", *FEWER))
    }
    (out / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
