"""Small models, data and losses, each healthy or with one planted fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 8


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up with different steps; `fault` names a planted fault."""

    def __init__(self, vocab: int = 32, many: int = 400, first: int = 0, fault: str = "") -> None:
        self.vocab, self.many, self.first, self.fault = vocab, many, first, fault

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.fault == "copies" and index % 5:
            index = 0
        if self.fault == "stuck" and index % 50 == 7:
            time.sleep(600)
        if self.fault == "slow":
            time.sleep(0.02)
        number = self.first + index
        begin = torch.arange(LENGTH + 1) * (1 + number % 3) + number // 3
        row = begin % self.vocab
        row[0] = number // 96 % self.vocab  # so that all samples differ
        targets = row[1:].clone()
        if self.fault == "empty" and index % 4 == 0:
            targets[:] = -100
        return {"inputs": row[:-1], "targets": targets}


class Small(nn.Module):
    """An embedding, two layers and a head; `cut` makes the second layer's gradients vanish."""

    def __init__(self, vocab: int = 32, width: int = 16, cut: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)
        self.cut = cut

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.embed(tokens)))
        second = torch.tanh(self.second(hidden))
        return self.head(hidden + second * (1e-12 if self.cut else 1.0))


class Forgetful(Small):
    """Its output depends on a counter that is not in the state_dict."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(tokens) * (1 + 0.01 * self.calls)


def loss(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    logits = model(batch["inputs"]).flatten(0, 1).float()
    counted = (batch["targets"] != -100).sum().clamp(min=1)
    return F.cross_entropy(logits, batch["targets"].flatten(), reduction="sum") / counted


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points in a plane labelled by side; `fault` names a planted fault."""

    def __init__(self, many: int = 400, fault: str = "") -> None:
        generator = torch.Generator().manual_seed(0)
        self.coordinates = torch.randn(many, 2, generator=generator)
        self.sides = (self.coordinates.sum(1) > 0).long()
        if fault == "contradictions":
            self.coordinates[1::2], self.sides[1::2] = self.coordinates[::2], 1 - self.sides[::2]
        if fault == "one label":
            self.sides[:] = 1
        if fault == "not finite":
            self.coordinates[::10, 0] = float("nan")

    def __len__(self) -> int:
        return len(self.coordinates)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.coordinates[index], self.sides[index]


def two_sides(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))


def side_loss(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
