"""A user's own loop that runs out of memory once; as a program, without a context manager: RUN PLACE END."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot
from surefoot.data import make_loader

STEPS, FAILS_AT = 16, 9


class Loop:
    def __init__(self, run: Path, place: str = "", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 6))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.place = place
        self.loader = make_loader(torch.randn(64, 6), 4, seed=3)
        options = {"resume": True, "loader": self.loader, "policy": surefoot.Policy(save_every=10_000), **options}
        self.guard = surefoot.attach(self.model, self.optimizer, run_dir=run, **options)
        self.fails_in_step = False
        self.optimizer.register_step_pre_hook(self._within_step)  # after the guard's

    def train(self) -> None:
        step = self.guard.step
        while True:
            for x in self.guard.batches(self.loader):
                self.fails_in_step = self.place == "step" and step == FAILS_AT
                self._backward(x, fails=step == FAILS_AT)
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                if step == STEPS:
                    return

    def _within_step(self, *_: object) -> None:
        """Change a weight, and run out of memory."""
        if self.fails_in_step:
            next(self.model.parameters()).data += 1.0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    def _backward(self, x: Tensor, *, fails: bool) -> None:
        loss = self.guard.watch((self.model(x) - x).pow(2).mean(), x)
        if fails and self.place == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        if fails and self.place == "host":
            torch.empty(1 << 50)
        loss.backward()


def main(run: Path, place: str, end: str) -> None:
    loop = Loop(run, place)
    if end == "exit":
        loop.train()
    try:
        loop.train()
    finally:
        loop.guard.close()


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the tests: with more, sums have other last bits
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
