"""Runs that only read, each in a process of its own: they write down what they saw and where they stand."""

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
    """Samples that are their own number."""

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
    """Go on from the file; killed with kill -9 in the middle of writing down step `die_at`."""
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


def read_in_company(folder: Path, rank: int) -> None:
    """As one of two: a few steps, then the rest of an epoch that one process alone began."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    begun = make_loader(Numbers(LENGTH), 3, seed=11, num_workers=1)  # rank and world size from the process group
    loop = iter(begun)
    told = {"first": [next(loop).tolist() for _ in range(5)], "state": begun.state_dict()}
    taken_up = make_loader(Numbers(LENGTH), 4, seed=11)
    taken_up.load_state_dict(json.loads((folder / "begun.json").read_text()))
    told["rest"] = [batch.tolist() for batch in taken_up]
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
