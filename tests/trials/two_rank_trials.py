"""Run by torchrun with two ranks: trials of runs with DDP and FSDP2, with faults and without."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import surefoot
from surefoot.guard import rank_barrier
from surefoot.guard.attached import AttachedGuard
from surefoot.records import Action, Decision

STEPS, ONSET = 140, 120
TRY_AT, SHORT = 60, 80
POLICY = surefoot.Policy(snapshot_every=10, weights_every=10)
TEACHER = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
Batch = tuple[Tensor, Tensor]
Damage = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def batch_of(step: int) -> Batch:
    """Noisy samples whose class follows from their inputs, others on each rank."""
    rng = torch.Generator().manual_seed(1000 + 2 * step + dist.get_rank())
    x = torch.randn(32, 16, generator=rng)
    return x, (x @ TEACHER + 0.5 * torch.randn(32, 8, generator=rng)).argmax(1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Net(nn.Module):
    """Layers in a list, dropout, and a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 64)])
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(nn.functional.gelu(block(x)), 0.02, self.training)
        return self.head(self.norm(x))


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def no_damage(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def enlarge_weights(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == ONSET:
        with torch.no_grad():
            local(next(p for name, p in model.named_parameters() if name.endswith("head.weight"))).mul_(30.0)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class Run:
    """A training loop on all ranks with places for a fault and for a trial of our own."""

    kind: str
    damage: Damage = no_damage
    step_fn: Callable[[nn.Module, Any], Tensor] | None = loss_of
    loses_rank: bool = False
    """Rank 1 loses its protection in the very step after which the others run a trial."""

    def train(self, run_dir: Path | None) -> dict[str, Any]:
        """Train with damage; without, run a trial of which the run must show no trace."""
        healthy = self.damage is no_damage
        model = wrapped(self.kind)
        torch.manual_seed(100 + dist.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        guard: AttachedGuard | None = None
        if run_dir is not None:
            attached = surefoot.attach(model, optimizer, run_dir=run_dir, policy=POLICY, step_fn=self.step_fn)
            assert isinstance(attached, AttachedGuard)
            guard = attached
            if self.loses_rank and dist.get_rank() == 1:
                fail_after(guard, TRY_AT)
        for step in range(SHORT if healthy else STEPS):
            self.damage(step, model, optimizer)
            batch = batch_of(step)
            loss = loss_of(model, batch)
            (loss if guard is None else guard.watch(loss, batch)).backward()
            optimizer.step()
            if healthy and step == TRY_AT and guard is not None and not guard.disabled:
                try_without_need(guard)
            optimizer.zero_grad()
        result: dict[str, Any] = {}
        if guard is not None and run_dir is not None:
            result = {"lost": guard.disabled}
            guard.close()
            dist.barrier()
            result |= {"step": guard.step, "events": surefoot.read(run_dir).events}
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        tensors = [*model.state_dict().values(), *state]
        return result | {
            "equal": equal_on_all_ranks(list(model.parameters())),
            "loss": eval_loss(model),
            "bits": [local(t).double().sum().item().hex() for t in tensors],
            "rng": torch.rand(2).tolist(),
        }


def try_without_need(guard: AttachedGuard) -> None:
    """A trial as a suspicion would start it."""
    recovery = guard._recovery
    assert recovery.trials is not None
    assert recovery.ring is not None
    row = recovery._reader.latest
    assert row is not None
    suspicion = Decision(
        step=row.step,
        attempt=row.attempt,
        rank=0,
        action=Action.REWIND,
        reason="asked for",
        max_attempt=row.attempt - 5,
    )
    assert recovery.trials.consider(suspicion, recovery.ring, row, recovery.pipeline.attempt) is not None
    recovery.trials._record({})


def fail_after(guard: AttachedGuard, attempt: int) -> None:
    """An error inside surefoot at the end of a step."""
    recovery, ended = guard._recovery, guard._recovery.iteration_ended

    def iteration_ended() -> None:
        if recovery.pipeline.attempt == attempt:
            raise RuntimeError("planted")
        ended()

    recovery.iteration_ended = iteration_ended


def equal_on_all_ranks(params: list[nn.Parameter]) -> bool:
    """Whether all ranks hold the same whole weights."""
    whole = torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in params])
    gathered = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, whole)
    return all(torch.equal(other, gathered[0]) for other in gathered) and bool(whole.isfinite().all())


@torch.no_grad()
def eval_loss(model: nn.Module) -> float:
    model.eval()
    total = torch.tensor(sum(float(loss_of(model, batch_of(-1 - n))) for n in range(8)) / 8)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


CALLS = {"count": 0}


def broken_on_one_rank(model: nn.Module, batch: Batch) -> Tensor:
    """Fails on rank 1 in the middle of the third pass it is called for."""
    CALLS["count"] += 1
    if dist.get_rank() == 1 and CALLS["count"] == 3:
        raise KeyError("labels")
    return loss_of(model, batch)


def communicating(model: nn.Module, batch: Batch) -> Tensor:
    count = torch.tensor(float(len(batch[0])))
    dist.all_reduce(count)
    return loss_of(model, batch) * (len(batch[0]) * dist.get_world_size() / count)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    out = Path(sys.argv[1])
    results: dict[str, Any] = {}
    for kind in ("ddp", "fsdp"):
        results[f"{kind} fault-free"] = Run(kind).train(None)
        results[f"{kind} healthy"] = Run(kind).train(out / f"{kind}-healthy")
        results[f"{kind} weights"] = Run(kind, enlarge_weights).train(out / f"{kind}-weights")
        CALLS["count"] = 0
        results[f"{kind} broken"] = Run(kind, enlarge_weights, broken_on_one_rank).train(out / f"{kind}-broken")
    rank_barrier.BARRIER_SECONDS = 1.0
    results["ddp lost"] = Run("ddp", loses_rank=True).train(out / "ddp-lost")
    results["ddp communicating"] = Run("ddp", step_fn=communicating).train(out / "ddp-communicating")
    (out / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
