"""Runs that send themselves a signal at a given moment, each in a process forked after torch was loaded.

Reads lines "RUN_DIR MOMENT FIRST SECOND" (two signal numbers, 0 for none) and prints the exit code for each.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed.checkpoint  # loaded before anything is forked

import surefoot
import surefoot.guard.checkpointer


class Late:
    """Sends a signal during interpreter shutdown."""

    def __init__(self, number: int) -> None:
        self._kill, self._pid, self._number = os.kill, os.getpid(), number

    def __del__(self) -> None:
        self._kill(self._pid, self._number)


def train(run: str, moment: str, first: int, second: int) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard: Any = surefoot.attach(model, optimizer, run_dir=run, resume=True)
    if moment == "late":
        sys.late = Late(second)  # type: ignore[attr-defined]

    def signalled(here: str, step: int = 5) -> None:
        if here == moment and guard.step + 2 >= step:
            os.kill(os.getpid(), first)
            if second and moment != "late":
                os.kill(os.getpid(), second)

    with guard:
        for step in range(guard.step, 30):
            signalled("fetched")
            x = torch.randn(3, 4)
            signalled("first", 0)
            loss = guard.watch(model(x).pow(2).mean(), x)
            loss.backward()
            signalled("backward")
            optimizer.step()
            optimizer.zero_grad()
            signalled("stepped")
            signalled("late")
            if step % 5 == 4:
                with torch.no_grad():
                    for _ in range(20):
                        signalled("evaluation", 6)
                        model(x)
        if moment == "closing":
            manager = guard._checkpointer._manager
            save = manager.save
            manager.save = lambda *args, **options: (os.kill(os.getpid(), first), save(*args, **options))


def main() -> None:
    torch.set_num_threads(1)
    for module in ("surefoot.guard.attach", "torch._dynamo", "torch.distributed.fsdp", "torch.onnx", "numpy.fft"):
        importlib.import_module(module)  # so that no fork has to load them
    for line in sys.stdin:
        run, moment, first, second = line.split()
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            train(run, moment, int(first), int(second))
            return  # and exits as the interpreter does
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
