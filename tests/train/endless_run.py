"""A run that trains until it is stopped; as a program it exits with the code of `exit_codes`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import surefoot
from surefoot.train import exit_codes


def print_flushed(message: object) -> None:
    print(message, flush=True)


def main(run_dir: str | Path, report: Callable[[object], object] = print_flushed) -> None:
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
                    report("reached step 20")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException as error:
        print(exit_codes.message_for(error))
        sys.exit(exit_codes.code_for(error))
