"""A model, data and losses such as users write, and some that are wrong; named in recipes as custom_parts:name."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def points(count: int = 90) -> TensorDataset:
    """Points in a plane, in three classes that a small model can separate."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, 0].gt(0).long() + x[:, 1].gt(0).long())


def points_with_one_nan(count: int = 90) -> TensorDataset:
    """The same points, one of them NaN: the update of its batch is refused."""
    x, y = points(count).tensors
    x[count // 2] = float("nan")
    return TensorDataset(x, y)


def with_count(samples: list[Any]) -> dict[str, Any]:
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return {"x": x, "y": y, "count": len(y)}


def classifier(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 3))


class Noisy(nn.Module):
    """Draws random numbers and changes a buffer in every forward pass, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x + 0.01 * self.calls + 0.1 * torch.randn_like(x))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
    return F.cross_entropy(model(x), y)


def sum_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def noisy_loss(model: nn.Module, batch: Any) -> Tensor:
    return mean_loss(model, batch) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())


def failing(at: int, how: str, folder: str) -> Any:
    """A language model's loss with a failure at call `at`; failures that end the process happen only once."""
    calls = 0

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        nonlocal calls
        calls += torch.is_grad_enabled()  # evaluations do not count
        value = model(batch["inputs"], batch["targets"])
        if calls >= at and how == "nan":
            value = value * torch.nan
        elif calls == at:
            FAILURES[how](Path(folder))
        return value, batch["count"]

    return loss


def _kill_last_rank(folder: Path) -> None:
    """Kill the last rank once a checkpoint exists."""
    mark = folder / "killed"
    if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1) and not mark.exists():
        while not list(folder.glob("run/checkpoints/step-*/manifest.json")):
            time.sleep(0.01)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _send_sigterm(folder: Path) -> None:
    if not (folder / "signalled").exists():
        (folder / "signalled").touch()
        os.kill(os.getpid(), signal.SIGTERM)


FAILURES = {
    "kill": _kill_last_rank,
    "signal": _send_sigterm,
    "memory": lambda _: torch.empty(1 << 50),
    "error": lambda _: 1 // 0,
}


def no_loss(model: nn.Module, batch: Any) -> str:
    return "a loss"


def loss_and_logits(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    logits = model(batch["inputs"])
    return logits.mean(), logits


def broken() -> nn.Module:
    raise KeyError("embedding")


def huge() -> nn.Module:
    return nn.Linear(1 << 20, 1 << 20)


def reads_numbers() -> nn.Module:
    """Reads a tensor value while building, as many models do; fails on the meta device."""
    return classifier(int(torch.linspace(0, 16, 2)[1].item()))


def nothing() -> TensorDataset:
    return points(0)


class Holes(TensorDataset):
    """Some samples cannot be read."""

    def __init__(self, holes: int) -> None:
        super().__init__(*points().tensors)
        self._holes = holes

    def __getitem__(self, index: int) -> Any:
        if index % 10 == 0 and index < 10 * self._holes:
            raise OSError(f"disk sector {index} is gone")
        return super().__getitem__(index)


def nan_loss(model: nn.Module, batch: Any) -> Tensor:
    return mean_loss(model, batch) * float("nan")
