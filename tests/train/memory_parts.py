"""Losses for runs that run out of memory: one is killed while it recovers, one meets a real limit of its process."""

from __future__ import annotations

import os
import resource
import signal
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.planted_memory import PLANT, sum_loss

ACTIVATIONS: list[weakref.ref[Tensor]] = []
"""What each forward pass kept in memory."""


def killed_in_recovery(folder: str) -> Any:
    """Kills the process once, in the first forward pass after it has run out of memory."""
    mark = Path(folder) / "killed"

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        if PLANT.hits and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sum_loss(model, batch)

    return loss


def watched(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Remembers, without keeping it, a tensor that the graph keeps."""
    kept = torch.ones(1000, requires_grad=True) * 2
    ACTIVATIONS.append(weakref.ref(kept))
    loss, count = sum_loss(model, batch)
    return loss + 0 * kept.square().sum(), count


def limited(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Needs 100 MB a sample; from update 4 on, the address space of the process has room for 450 MB more."""
    if torch.is_grad_enabled() and PLANT.updates >= 4 and resource.getrlimit(resource.RLIMIT_AS)[0] < 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 450_000_000, -1))
    loss, count = sum_loss(model, batch)
    needed = torch.empty(len(batch["inputs"]), 25_000_000)
    return loss + 0 * needed[:, 0].nan_to_num(0.0, 0.0, 0.0).sum(), count


def collate_without_samples(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """A batch with a tensor that has no row for each sample."""
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return x, y, torch.ones(3)


def table_loss(model: nn.Module, batch: Any) -> Tensor:
    from benchmarks.planted_memory import mean_loss

    return mean_loss(model, batch[:2])
