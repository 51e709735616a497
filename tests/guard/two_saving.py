"""Run by torchrun with two ranks: saved with a batch to replay, NaN on rank 1 only, and resumed."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import surefoot
from surefoot.checkpoint.store import CheckpointStore
from surefoot.data import make_loader
from surefoot.journal.reader import read


def step(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).pow(2).mean()


def train(run: Path, kind: str, batches: int, poison: int = 1 << 60) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 6))
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model: Any = nn.parallel.DistributedDataParallel(net) if kind == "ddp" else fully_shard(net)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = make_loader(torch.randn(64, 6, generator=torch.Generator().manual_seed(3)), 4, seed=3)
    guard = surefoot.attach(
        model,
        optimizer,
        run_dir=run,
        resume=True,
        loader=loader,
        step_fn=step,
        extra={"ema": ema} if kind == "ddp" else {},
        policy=surefoot.Policy(save_every=15, snapshot_every=5, healthy_steps_to_trust=5, max_failed_actions=50),
    )
    begun, count = guard.step, 0
    while count < batches:
        for x in loader:
            count += 1
            if count == poison - 3:
                _saved_since(run, begun)
            bad = count > poison and dist.get_rank() == 1
            guard.watch(step(model, x * float("nan") if bad else x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "ddp":
                ema.update_parameters(net)
            if count == batches:
                break
    results = {"begun": begun, "step": guard.step}
    guard.close()
    dist.barrier()
    events = read(run).events
    proofs = [e for e in events if e.get("name") in ("proved", "unproven")]
    kept = CheckpointStore(run / "checkpoints").all()
    return results | {
        "proofs": [[e["name"], e["values"]["state"], e["values"]["probe"]] for e in proofs],
        "failed": [e["detail"] for e in events if e.get("name") == "failed"],
        "kinds": {str(checkpoint.step): [checkpoint.kind, checkpoint.health] for checkpoint in kept},
        "size": max(checkpoint.size for checkpoint in kept),
        "ema": _owners(kept[0].folder, "extra.ema"),
    }


def _saved_since(run: Path, step: int) -> None:
    """Wait for the save in progress, so that the fault begins when the disk is free, however slow it is."""
    while not any(checkpoint.step > step for checkpoint in CheckpointStore(run / "checkpoints").all()):
        time.sleep(0.01)
    dist.barrier()


def evaluated(run: Path) -> dict[str, Any]:
    """Rank 1 alone gets a signal in the middle of an evaluation on both ranks."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = surefoot.attach(model, optimizer, run_dir=run, resume=True)
    calls, code = 0, None
    try:
        with guard:
            for _ in range(20):
                guard.watch(step(model, torch.randn(4, 6)), None).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for calls in range(2000):
                    if calls == 5 and dist.get_rank() == 1:
                        signal.raise_signal(signal.SIGTERM)
                    model.module(torch.ones(2, 6))
                    model(torch.ones(2, 6))
                    time.sleep(0.005)
    except SystemExit as end:
        code = end.code
    dist.barrier()
    kept = CheckpointStore(run / "checkpoints").all()
    return {"calls": calls, "code": code, "kept": [[checkpoint.step, checkpoint.kind] for checkpoint in kept]}


def _owners(folder: Path, what: str) -> list[list[str]]:
    """The weights of an extra model that each rank wrote to its own file."""
    states = [json.loads(file.read_text()) for file in sorted(folder.glob("state-*.json"))]
    return [[n for n in state["own"] if n.startswith(what) and n.endswith("weight")] for state in states]


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for kind in ("ddp", "fsdp"):
        run = out / kind
        first = train(run, kind, 40)
        results[kind] = {"first": first, "second": train(run, kind, 45, poison=25), "third": train(run, kind, 5)}
    results["evaluated"] = evaluated(out / "evaluated")
    (out / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
