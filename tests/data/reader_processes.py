"""Processes that only read batches; they record the batches and the loader's position."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from surefoot.data import make_loader

LENGTH, BATCH = 103, 4


class Numbers(Dataset[int]):
    """Samples equal to their index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def noisy(sample: int, generator: torch.Generator) -> list[float]:
    return [sample, torch.rand((), generator=generator).item()]


def noisy_loader(num_workers: int) -> Any:
    return make_loader(Numbers(LENGTH), BATCH, seed=11, num_workers=num_workers, augment=noisy, collate_fn=list)


def read(file: Path, num_workers: int, epochs: int, die_at: int | None) -> None:
    """Resume from the file; with `die_at`, SIGKILL while recording that step."""
    loader, seen = noisy_loader(num_workers), []
    if file.exists():
        saved = json.loads(file.read_text())
        seen = saved["seen"]
        loader.load_state_dict(saved["state"])
    for _ in range(loader.epoch, epochs):
        for batch in loader:
            seen.append(batch)
            draft = file.with_suffix(".draft")
            draft.write_text(json.dumps({"seen": seen, "state": loader.state_dict()}))
            if len(seen) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            os.replace(draft, file)


def read_on_two_ranks(folder: Path, rank: int) -> None:
    """One rank of two: a few steps, then the rest of an epoch that a single process began."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    loader = make_loader(Numbers(LENGTH), 3, seed=11, num_workers=1)  # rank and world size from the process group
    loop = iter(loader)
    results = {"first": [next(loop).tolist() for _ in range(5)], "state": loader.state_dict()}
    resumed = make_loader(Numbers(LENGTH), 4, seed=11)
    resumed.load_state_dict(json.loads((folder / "begun.json").read_text()))
    results["rest"] = [batch.tolist() for batch in resumed]
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
