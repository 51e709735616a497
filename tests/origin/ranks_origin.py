"""Two processes under DistributedDataParallel; the batch of the second makes gradients non-finite in backward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import surefoot


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).pow(2).sum(1).sqrt()


def step_fn(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch) - 1).square().mean()


def main(run_dir: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Norms())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, step_fn=step_fn)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for k in range(14):
        batch = torch.randn(8, 4, generator=generator)
        if k == 6 and dist.get_rank() == 1:
            batch[3] = 0.0
        guard.watch(step_fn(model, batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
