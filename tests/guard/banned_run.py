"""A run over a data set with one broken row; as a script it is killed after so many batches."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import surefoot
from surefoot.data import make_loader

ROWS, BATCH = 400, 4


class Rows(Dataset[Any]):
    """Rows of a table, of which some hold NaN."""

    def __init__(self, broken: tuple[int, ...] = (), *, rows: int = ROWS) -> None:
        self._x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(2))
        self._x[list(broken), 1] = float("nan")

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        return self._x[index], self._x[index].nan_to_num().sum(0, keepdim=True)

    def source_of(self, index: int) -> str:
        return f"table.csv:{index + 1}"


def step_fn(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(
    run_dir: Path,
    broken: tuple[int, ...],
    batches: int,
    *,
    kill: bool = False,
    rows: int = ROWS,
    listener: Any = None,
    num_workers: int = 0,
    **options: Any,
) -> list[int]:
    """Train on so many batches, and return the samples that came."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = make_loader(Rows(broken, rows=rows), BATCH, seed=3, num_workers=num_workers)
    options = {"resume": True, "step_fn": step_fn, "policy": surefoot.Policy(save_every=10)} | options
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, loader=loader, **options)
    if listener is not None:
        guard.on_event(listener)
    seen: list[int] = []
    count = 0
    while count < batches:
        for batch in guard.batches(loader):
            seen += loader.last_samples
            guard.watch(step_fn(model, batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if count >= batches:
                break
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    guard.close()
    return seen


def order(epochs: int = 1, *, rows: int = ROWS) -> list[int]:
    """The samples in the order in which a run without bans gets them."""
    loader = make_loader(list(range(rows)), BATCH, seed=3)  # pyright: ignore[reportArgumentType]
    return [sample for _ in range(epochs) for batch in loader for sample in batch.tolist()]


if __name__ == "__main__":
    train(Path(sys.argv[1]), (int(sys.argv[2]),), int(sys.argv[3]), kill=True)
