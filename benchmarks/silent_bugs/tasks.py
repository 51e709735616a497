"""Data of the suite, and healthy loops of every family; a case changes one thing of such a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.silent_bugs.loops import Loop
from benchmarks.silent_bugs.small_models import (
    AutoEncoder,
    Embedder,
    MaskedEncoder,
    Segmenter,
    SequenceRegressor,
    TextClassifier,
    TokenDecoder,
    TwoHeads,
)
from benchmarks.zoo.models import Captioner, convolutional, mlp

BATCHES = 32
PAD, MASK = 0, 1
Step = Callable[[nn.Module, Any], Tensor]


def adamw(model: nn.Module, lr: float = 2e-3, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def sgd(model: nn.Module, lr: float = 0.05, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **{"momentum": 0.9, **options})


def sequences(rows: int = 16, length: int = 16, vocab: int = 32, first: int = 2) -> Tensor:
    """Counting up by 1 to 3 from a random token, with some noise; tokens below `first` do not occur."""
    start, pace = torch.randint(0, vocab, (rows, 1)), torch.randint(1, 4, (rows, 1))
    tokens = (start + pace * torch.arange(length)) % (vocab - first) + first
    noise = torch.randint(first, vocab, tokens.shape)
    return torch.where(torch.rand(tokens.shape) < 0.1, noise, tokens)


def padded(tokens: Tensor, *, shortest: int = 4) -> tuple[Tensor, Tensor]:
    """The same tokens with an end of random length cut off, and the mask of what is left."""
    lengths = torch.randint(shortest, tokens.shape[1] + 1, (len(tokens), 1))
    mask = torch.arange(tokens.shape[1]) < lengths
    return torch.where(mask, tokens, torch.tensor(PAD)), mask


def images(rows: int = 24, classes: int = 10, size: int = 8, *, seed: int = 5) -> tuple[Tensor, Tensor]:
    """A pattern for each class, with noise."""
    patterns = torch.randn(classes, 1, size, size, generator=torch.Generator().manual_seed(seed))
    labels = torch.randint(0, classes, (rows,))
    return patterns[labels] + 0.7 * torch.randn(rows, 1, size, size), labels


def table(rows: int = 32, features: int = 12) -> tuple[Tensor, Tensor]:
    """Features and a number that follows from them."""
    weights = torch.randn(features, generator=torch.Generator().manual_seed(3))
    x = torch.randn(rows, features)
    return x, torch.tanh(x @ weights / 2) + 0.1 * torch.randn(rows)


def waves(rows: int = 16, length: int = 20) -> Tensor:
    phase, pace = torch.rand(rows, 1) * 6.3, 0.2 + 0.4 * torch.rand(rows, 1)
    return torch.sin(phase + pace * torch.arange(length + 1))[..., None] + 0.02 * torch.randn(rows, length + 1, 1)


def next_token(outputs: Tensor, tokens: Tensor, **options: Any) -> Tensor:
    """The loss of predicting each token from those before."""
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), **options)


def make(
    model: nn.Module, batches: list[Any], step_fn: Step, optimizer: Optimizer | None = None, **options: Any
) -> Loop:
    return Loop(model, optimizer or adamw(model), batches, step_fn, **options)


def several(batch: Callable[[], Any]) -> list[Any]:
    return [batch() for _ in range(BATCHES)]


# -- healthy loops


def decoder_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    return make(model or TokenDecoder(), several(sequences), lambda m, b: next_token(m(b), b), **options)


def image_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return make(model or convolutional(), several(images), step_fn, **options)


def regression_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])

    return make(model or mlp([12, 32, 32, 1], nn.ReLU), several(table), step_fn, **options)


def caption_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    """Images of 12 by 12 whose brightest corner starts a counting caption."""

    def batch() -> tuple[Tensor, Tensor]:
        corner = torch.randint(0, 4, (16,))
        image = 0.3 * torch.randn(16, 3, 12, 12)
        for i, c in enumerate(corner.tolist()):
            image[i, :, 6 * (c // 2) : 6 * (c // 2) + 6, 6 * (c % 2) : 6 * (c % 2) + 6] += 1.0
        pace = torch.randint(1, 3, (16, 1))
        return image, (3 * corner[:, None] + pace * torch.arange(9)) % 14 + 2

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        return next_token(model(*batch), batch[1])

    return make(model or Captioner(), several(batch), step_fn, **options)


def autoencoder_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    mixing = torch.randn(6, 48, generator=torch.Generator().manual_seed(9)) / 2

    def batch() -> Tensor:
        return torch.tanh(torch.randn(24, 6) @ mixing)

    return make(model or AutoEncoder(), several(batch), lambda m, x: F.mse_loss(m(x), x), **options)


def recurrent_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    def step_fn(model: nn.Module, x: Any) -> Tensor:
        return F.mse_loss(model(x[:, :-1]), x[:, 1:])

    return make(model or SequenceRegressor(), several(waves), step_fn, **options)


def two_views() -> tuple[Tensor, Tensor]:
    x, _ = images(24)
    return x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)


def info_nce(a: Tensor, b: Tensor, temperature: float = 0.2) -> Tensor:
    logits = a @ b.T / temperature
    targets = torch.arange(len(a))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def contrastive_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    def step_fn(model: nn.Module, views: Any) -> Tensor:
        return info_nce(model(views[0]), model(views[1]))

    return make(model or Embedder(), several(two_views), step_fn, **options)


def masked_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens with a fifth masked, labels there, and the mask of padding."""
    tokens, mask = padded(sequences(16, 14, 24), shortest=8)
    chosen = (torch.rand(tokens.shape) < 0.2) & mask
    return tokens.masked_fill(chosen, MASK), torch.where(chosen, tokens, -100), mask


def masked_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        tokens, labels, mask = batch
        return F.cross_entropy(model(tokens, mask).transpose(1, 2), labels)

    return make(model or MaskedEncoder(), several(masked_tokens), step_fn, **options)


def text_batch() -> dict[str, Tensor]:
    """Texts of three topics, padded."""
    labels = torch.randint(0, 3, (24,))
    tokens = torch.randint(2, 40, (24, 12))
    topic = 2 + 12 * labels[:, None] + torch.randint(0, 12, (24, 12))
    tokens, mask = padded(torch.where(torch.rand(24, 12) < 0.4, topic, tokens))
    return {"tokens": tokens, "mask": mask, "labels": labels}


def text_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["tokens"], batch["mask"]), batch["labels"])

    return make(model or TextClassifier(), several(text_batch), step_fn, **options)


def two_head_batch() -> tuple[Tensor, Tensor, Tensor]:
    x, size = table(32, 12)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), size


def two_head_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        kind, size = model(batch[0])
        return F.cross_entropy(kind, batch[1]) + F.mse_loss(size, batch[2])

    return make(model or TwoHeads(), several(two_head_batch), step_fn, **options)


def pixel_batch() -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 3, (8, 1, 4, 4)).float()
    labels = F.interpolate(labels, scale_factor=3)[:, 0].long()
    return labels[:, None].float() - 1 + 0.5 * torch.randn(8, 1, 12, 12), labels


def segmentation_loop(model: nn.Module | None = None, **options: Any) -> Loop:
    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return make(model or Segmenter(), several(pixel_batch), step_fn, **options)
