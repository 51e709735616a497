"""A run without end; in a process of its own it ends with the number that `exits` gives it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import surefoot
from surefoot.train import exit_codes


def told(words: object) -> None:
    print(words, flush=True)


def main(run_dir: str | Path, tell: Callable[[object], object] = told) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with exit_codes.restartable():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with surefoot.attach(model, optimizer, run_dir=run_dir, resume=True) as guard:
            while True:
                x = torch.randn(16, 4)
                guard.watch((model(x)[:, 0] - x.sum(1)).square().mean(), x).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.002)
                if guard.step == 20:
                    tell("well on its way")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException as error:
        print(exit_codes.message_for(error))
        sys.exit(exit_codes.code_for(error))
