"""The small models of the zoo; parameter names are part of recorded runs."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Attention written out, so that a fault can hook its logits and its mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.logits = nn.Identity()
        """Hook point: the logits before the mask."""
        self.masked = nn.Identity()
        """Hook point: the logits after the mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        logits = self.logits(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5)
        weights = self.masked(logits.masked_fill(~mask, float("-inf"))).float().softmax(-1).type_as(v)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = PlainAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens in, logits for every position out; `prefix` is put before the token embeddings."""

    def __init__(self, vocab: int, classes: int, length: int, *, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, 2) for _ in range(layers))
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


def causal_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Captioner(nn.Module):
    """Image to vector to tokens: `vision`, `projector`, `language`."""

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
        prefix = self.projector(self.vision(image).relu())[:, None]
        return self.language(caption, causal_mask(caption.shape[1] + 1), prefix)[:, 1:]


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


class RecurrentModel(nn.Module):
    """A recurrent network with one output value per time step."""

    def __init__(self, cell: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.cell = cell(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def convolutional() -> nn.Module:
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


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        ResidualBlock(8),
        ResidualBlock(8),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(72, 10),
    )


def mlp(widths: list[int], between: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layer = nn.Linear(a, b)
        nn.init.xavier_normal_(layer.weight, gain=1.4 if between is nn.ReLU else 1.2)
        nn.init.zeros_(layer.bias)
        layers += [layer, between()]
    return nn.Sequential(*layers[:-1])
