"""Run by torchrun with two ranks: the learning rate jumps; rank 0 alone can read the old cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from incident_run import FAULT, case, step_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import surefoot
from surefoot.cases.case_library import write_library


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    library = out / f"library-{rank}.jsonl"
    if rank == 0:
        write_library(library, [case(best="clip")])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    policy = surefoot.Policy(trial_seconds=600.0)
    guard = surefoot.attach(model, optimizer, run_dir=out / "run", policy=policy, step_fn=step_fn, cases=library)
    generator, weights = torch.Generator().manual_seed(rank), torch.linspace(-1, 1, 8)[:, None]
    for k in range(FAULT + 40):
        x = torch.randn(32, 8, generator=generator)
        batch = x, (x @ weights).sin()
        if k == FAULT:
            optimizer.param_groups[0]["lr"] = 5.0
        guard.watch(step_fn(model, batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    total = sum(float(p.detach().double().sum()) for p in net.parameters())
    (out / f"results-{rank}.json").write_text(json.dumps({"weights": total, "run": str(out / "run")}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
