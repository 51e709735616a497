"""The kinds of model the zoo trains, each with an endless made task that has a floor: no model gets to zero loss.

Small enough that a step takes a few milliseconds on one core. Families used for tuning and families used for
reporting are different ones; `split` says which is which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer


class Split(StrEnum):
    """Rules are tuned on one part of the zoo and reported on the other."""

    TUNING = "tuning"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: inputs (numbers or token ids), labels, and for two of the families a second input."""

    x: Tensor
    y: Tensor
    more: Tensor | None = None
    """Padding mask of the encoder (True where a token is real); caption so far of the vision-language model."""

    def with_(self, **changes: Tensor) -> Batch:
        return replace(self, **changes)

    def head(self, samples: int) -> Batch:
        """Only the first samples."""
        return Batch(self.x[:samples], self.y[:samples], None if self.more is None else self.more[:samples])


@dataclass(frozen=True, slots=True)
class Family:
    """A model, its task and the settings it trains well with."""

    name: str
    split: Split
    traits: frozenset[str]
    """What faults can rely on: numbers or tokens as input, attention, batch_norm, layer_norm, recurrent, deep."""
    build: Callable[[], nn.Module]
    sample: Callable[[Generator, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Iterable[Any], float], Optimizer]
    rate: float
    samples: int = 16


# -- tasks


def _chain(rng: Generator, samples: int, length: int, vocab: int) -> Tensor:
    """Token sequences: half the tokens follow from the one before, three in ten repeat the third before, the rest is
    chance."""
    tokens = torch.randint(0, vocab, (samples, length), generator=rng)
    kind = torch.rand(samples, length, generator=rng)
    columns = list(tokens.unbind(1))
    for t in range(3, length):
        told = torch.where(kind[:, t] < 0.5, (5 * columns[t - 1] + 1) % vocab, columns[t - 3])
        columns[t] = torch.where(kind[:, t] < 0.8, told, columns[t])
    return torch.stack(columns, dim=1)


_PATTERNS = torch.Generator().manual_seed(2026)
IMAGES = F.interpolate(torch.randn(10, 3, 4, 4, generator=_PATTERNS), size=12, mode="bilinear")
"""What the ten classes of picture look like without their noise."""
_MIXING = torch.randn(6, 24, generator=_PATTERNS)
_TEACHER = torch.randn(16, 4, generator=_PATTERNS) / 4


def _pictures(rng: Generator, samples: int, channels: int) -> Batch:
    """Noisy pictures; one label in six is chance."""
    labels = torch.randint(0, 10, (samples,), generator=rng)
    clean = IMAGES[labels, :channels]
    return Batch(clean + torch.randn(clean.shape, generator=rng), _some_wrong(rng, labels, 10))


def _some_wrong(rng: Generator, labels: Tensor, classes: int) -> Tensor:
    wrong = torch.rand(labels.shape, generator=rng) < 1 / 6
    return torch.where(wrong, torch.randint(0, classes, labels.shape, generator=rng), labels)


def _text(rng: Generator, samples: int) -> Batch:
    tokens = _chain(rng, samples, 17, 24)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def _tags(rng: Generator, samples: int) -> Batch:
    """A token's tag follows from itself and from the first of its sequence; one in six is chance. Sequences end at
    different places."""
    x = torch.randint(1, 20, (samples, 16), generator=rng)
    real = torch.arange(16)[None] < torch.randint(8, 17, (samples, 1), generator=rng)
    y = _some_wrong(rng, (x + 4 * (x[:, :1] % 2)) % 8, 8)
    return Batch(x.where(real, 0), y.where(real, -100), real)


def _captions(rng: Generator, samples: int) -> Batch:
    """A picture, and a sentence that begins with its class and goes on as a chain."""
    picture = _pictures(rng, samples, 3)
    words = _chain(rng, samples, 9, 16)
    words[:, 0] = picture.y
    words[:, 3] = picture.y
    caption = torch.cat([torch.zeros(samples, 1, dtype=torch.int64), words], dim=1)
    return Batch(picture.x, caption[:, 1:], caption[:, :-1])


def _waves(rng: Generator, samples: int) -> Batch:
    """Noisy sums of two waves; the label is the next value at every moment."""
    t = torch.arange(21.0)
    speed = 0.2 + 0.6 * torch.rand(samples, 2, 1, generator=rng)
    start = 6.28 * torch.rand(samples, 2, 1, generator=rng)
    wave = torch.sin(speed * t + start).sum(1) + 0.2 * torch.randn(samples, 21, generator=rng)
    return Batch(wave[:, :-1, None], wave[:, 1:, None])


def _teacher(rng: Generator, samples: int) -> Batch:
    x = torch.randn(samples, 16, generator=rng)
    y = torch.sin(2 * x @ _TEACHER) + 0.3 * torch.randn(samples, 4, generator=rng)
    return Batch(x, y)


def _mixtures(rng: Generator, samples: int) -> Batch:
    """Points near a bent surface of six dimensions in twenty-four; the label is the point without its noise."""
    hidden = torch.randn(samples, 6, generator=rng)
    clean = torch.tanh(hidden @ _MIXING) + 0.1 * torch.randn(samples, 24, generator=rng)
    return Batch(clean + 0.3 * torch.randn(clean.shape, generator=rng), clean)


# -- models


class Attention(nn.Module):
    """Attention spelled out, so that a fault can reach its logits and its mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.logits = nn.Identity()
        """Sees the logits before the mask."""
        self.masked = nn.Identity()
        """Sees the logits after the mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        logits = self.logits(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5)
        weights = self.masked(logits.masked_fill(~mask, float("-inf"))).float().softmax(-1).type_as(v)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens in, logits for every place out; `prefix` puts further vectors before them."""

    def __init__(self, vocab: int, classes: int, length: int, *, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, mask: Tensor, prefix: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        if prefix is not None:
            x = torch.cat([prefix, x], dim=1)
        x = x + self.place[: x.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Captioner(nn.Module):
    """Picture to vector to words: `vision`, `projector`, `language`."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 32),
        )
        self.projector = nn.Linear(32, 32)
        self.language = Transformer(16, 16, 10)

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        seen = self.projector(self.vision(image).relu())[:, None]
        return self.language(caption, _causal(caption.shape[1] + 1), seen)[:, 1:]


class Residual(nn.Module):
    """Two convolutions around which the input may pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


class Reader(nn.Module):
    """A recurrent network with a value out at every moment."""

    def __init__(self, cell: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.cell = cell(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Residual(8),
        Residual(8),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(72, 10),
    )


def _plain(widths: list[int], between: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layer = nn.Linear(a, b)
        nn.init.xavier_normal_(layer.weight, gain=1.4 if between is nn.ReLU else 1.2)
        nn.init.zeros_(layer.bias)
        layers += [layer, between()]
    return nn.Sequential(*layers[:-1])


# -- losses


def _words(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def _classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.x).float(), batch.y)


def _values(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch.x).float(), batch.y)


def _adamw(params: Iterable[Any], rate: float) -> Optimizer:
    return torch.optim.AdamW(params, lr=rate, weight_decay=0.01, fused=True)


def _sgd(params: Iterable[Any], rate: float) -> Optimizer:
    return torch.optim.SGD(params, lr=rate, momentum=0.9, nesterov=True, fused=True)


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "decoder",
            Split.TUNING,
            frozenset({"tokens", "attention", "layer_norm"}),
            lambda: Transformer(24, 24, 16),
            _text,
            lambda model, batch: _words(model(batch.x, _causal(batch.x.shape[1])), batch.y),
            _adamw,
            3e-3,
        ),
        Family(
            "convolution",
            Split.TUNING,
            frozenset({"numbers", "batch_norm"}),
            _convolution,
            lambda rng, n: _pictures(rng, n, 1),
            _classes,
            _sgd,
            0.03,
            samples=32,
        ),
        Family(
            "recurrent",
            Split.TUNING,
            frozenset({"numbers", "recurrent"}),
            lambda: Reader(nn.GRU),
            _waves,
            _values,
            lambda params, rate: torch.optim.Adam(params, lr=rate, foreach=True),
            5e-3,
        ),
        Family(
            "plain",
            Split.TUNING,
            frozenset({"numbers", "deep"}),
            lambda: _plain([16, *[32] * 7, 4], nn.ReLU),
            _teacher,
            _values,
            lambda params, rate: torch.optim.SGD(params, lr=rate, momentum=0.9),
            0.03,
            samples=64,
        ),
        Family(
            "encoder",
            Split.REPORT,
            frozenset({"tokens", "attention", "layer_norm", "padding"}),
            lambda: Transformer(20, 8, 16),
            _tags,
            lambda model, batch: _words(model(batch.x, batch.more[:, None, None]), batch.y),  # pyright: ignore
            _adamw,
            5e-3,
        ),
        Family(
            "residual",
            Split.REPORT,
            frozenset({"numbers", "batch_norm"}),
            _residual,
            lambda rng, n: _pictures(rng, n, 3),
            _classes,
            _sgd,
            0.02,
        ),
        Family(
            "memory",
            Split.REPORT,
            frozenset({"numbers", "recurrent"}),
            lambda: Reader(nn.LSTM),
            _waves,
            _values,
            lambda params, rate: torch.optim.NAdam(params, lr=rate),
            5e-3,
        ),
        Family(
            "autoencoder",
            Split.REPORT,
            frozenset({"numbers", "deep"}),
            lambda: _plain([24, 48, 24, 8, 24, 48, 24], nn.Tanh),
            _mixtures,
            _values,
            lambda params, rate: torch.optim.RMSprop(params, lr=rate),
            2e-3,
            samples=32,
        ),
        Family(
            "vision_language",
            Split.REPORT,
            frozenset({"numbers", "attention", "layer_norm", "vision_language"}),
            Captioner,
            _captions,
            lambda model, batch: _words(model(batch.x, batch.more), batch.y),
            _adamw,
            3e-3,
        ),
    )
}
