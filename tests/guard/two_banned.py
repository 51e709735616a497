"""Run by torchrun with two ranks over one data set: a broken row comes on one of them, and both ban it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from banned_run import BATCH, Rows, step_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import surefoot
from surefoot.data import make_loader


def main(out: Path, bad: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = make_loader(Rows((bad,)), BATCH, seed=3)
    guard = surefoot.attach(model, optimizer, run_dir=out / "run", loader=loader, resume=True, step_fn=step_fn)
    seen: list[list[int]] = []
    for _ in range(2):
        for batch in guard.batches(loader):
            seen.append(loader.last_samples)
            guard.watch(step_fn(model, batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    guard.close()
    results = {"seen": seen, "banned": list(loader.banned), "step": guard.step}
    (out / f"results-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), 123)
