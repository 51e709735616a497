"""The model families of the zoo, each with an endless synthetic task whose loss cannot reach zero.

Small enough that a step takes a few milliseconds on one core. Tuning and reporting use different families; `split`
says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from benchmarks.zoo.models import Captioner, RecurrentModel, Transformer, causal_mask, convolutional, mlp, residual


class Split(StrEnum):
    """Rules are tuned on one split of the zoo and reported on the other."""

    TUNING = "tuning"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs (numbers or token ids), labels, and for two of the families a second input."""

    x: Tensor
    y: Tensor
    extra: Tensor | None = None
    """The encoder's padding mask (True where a token is real), or the vision-language model's caption so far."""

    def replace(self, **changes: Tensor) -> MicroBatch:
        return replace(self, **changes)

    def head(self, samples: int) -> MicroBatch:
        """Only the first samples."""
        return MicroBatch(self.x[:samples], self.y[:samples], None if self.extra is None else self.extra[:samples])


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model, its task, and the settings with which it trains well."""

    name: str
    split: Split
    traits: frozenset[str]
    """What faults can rely on: numbers or tokens as input, attention, batch_norm, layer_norm, recurrent, deep."""
    build: Callable[[], nn.Module]
    sample: Callable[[Generator, int], MicroBatch]
    loss: Callable[[nn.Module, MicroBatch], Tensor]
    optimizer: Callable[[Iterable[Any], float], Optimizer]
    lr: float
    samples: int = 16


# -- tasks


def _markov_tokens(rng: Generator, samples: int, length: int, vocab: int) -> Tensor:
    """Token sequences: 50 % of tokens follow from the previous one, 30 % repeat the third before, 20 % are random."""
    tokens = torch.randint(0, vocab, (samples, length), generator=rng)
    kind = torch.rand(samples, length, generator=rng)
    columns = list(tokens.unbind(1))
    for t in range(3, length):
        predicted = torch.where(kind[:, t] < 0.5, (5 * columns[t - 1] + 1) % vocab, columns[t - 3])
        columns[t] = torch.where(kind[:, t] < 0.8, predicted, columns[t])
    return torch.stack(columns, dim=1)


_PATTERNS = torch.Generator().manual_seed(2026)
IMAGES = F.interpolate(torch.randn(10, 3, 4, 4, generator=_PATTERNS), size=12, mode="bilinear")
"""The ten image classes without noise."""
_MIXING = torch.randn(6, 24, generator=_PATTERNS)
_TEACHER = torch.randn(16, 4, generator=_PATTERNS) / 4


def _images(rng: Generator, samples: int, channels: int) -> MicroBatch:
    """Noisy images; one label in six is random."""
    labels = torch.randint(0, 10, (samples,), generator=rng)
    clean = IMAGES[labels, :channels]
    return MicroBatch(clean + torch.randn(clean.shape, generator=rng), _with_label_noise(rng, labels, 10))


def _with_label_noise(rng: Generator, labels: Tensor, classes: int) -> Tensor:
    wrong = torch.rand(labels.shape, generator=rng) < 1 / 6
    return torch.where(wrong, torch.randint(0, classes, labels.shape, generator=rng), labels)


def _text(rng: Generator, samples: int) -> MicroBatch:
    tokens = _markov_tokens(rng, samples, 17, 24)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:])


def _tags(rng: Generator, samples: int) -> MicroBatch:
    """A token's tag follows from the token and the first one of its sequence; one in six is random. Lengths vary."""
    x = torch.randint(1, 20, (samples, 16), generator=rng)
    real = torch.arange(16)[None] < torch.randint(8, 17, (samples, 1), generator=rng)
    y = _with_label_noise(rng, (x + 4 * (x[:, :1] % 2)) % 8, 8)
    return MicroBatch(x.where(real, 0), y.where(real, -100), real)


def _captions(rng: Generator, samples: int) -> MicroBatch:
    """An image, and a token sequence that begins with its class."""
    picture = _images(rng, samples, 3)
    tokens = _markov_tokens(rng, samples, 9, 16)
    tokens[:, 0] = picture.y
    tokens[:, 3] = picture.y
    caption = torch.cat([torch.zeros(samples, 1, dtype=torch.int64), tokens], dim=1)
    return MicroBatch(picture.x, caption[:, 1:], caption[:, :-1])


def _waves(rng: Generator, samples: int) -> MicroBatch:
    """Noisy sums of two sine waves; the label is the next value at every time step."""
    t = torch.arange(21.0)
    speed = 0.2 + 0.6 * torch.rand(samples, 2, 1, generator=rng)
    start = 6.28 * torch.rand(samples, 2, 1, generator=rng)
    wave = torch.sin(speed * t + start).sum(1) + 0.2 * torch.randn(samples, 21, generator=rng)
    return MicroBatch(wave[:, :-1, None], wave[:, 1:, None])


def _teacher(rng: Generator, samples: int) -> MicroBatch:
    x = torch.randn(samples, 16, generator=rng)
    y = torch.sin(2 * x @ _TEACHER) + 0.3 * torch.randn(samples, 4, generator=rng)
    return MicroBatch(x, y)


def _mixtures(rng: Generator, samples: int) -> MicroBatch:
    """Noisy points near a 6-dimensional manifold in 24 dimensions; the label is the point without its noise."""
    hidden = torch.randn(samples, 6, generator=rng)
    clean = torch.tanh(hidden @ _MIXING) + 0.1 * torch.randn(samples, 24, generator=rng)
    return MicroBatch(clean + 0.3 * torch.randn(clean.shape, generator=rng), clean)


# -- losses


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def _class_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    return F.cross_entropy(model(batch.x).float(), batch.y)


def _regression_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    return F.mse_loss(model(batch.x).float(), batch.y)


def _adamw(params: Iterable[Any], lr: float) -> Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.01, fused=True)


def _sgd(params: Iterable[Any], lr: float) -> Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, fused=True)


FAMILIES = {
    family.name: family
    for family in (
        ModelFamily(
            "decoder",
            Split.TUNING,
            frozenset({"tokens", "attention", "layer_norm"}),
            lambda: Transformer(24, 24, 16),
            _text,
            lambda model, batch: _token_loss(model(batch.x, causal_mask(batch.x.shape[1])), batch.y),
            _adamw,
            3e-3,
        ),
        ModelFamily(
            "convolution",
            Split.TUNING,
            frozenset({"numbers", "batch_norm"}),
            convolutional,
            lambda rng, n: _images(rng, n, 1),
            _class_loss,
            _sgd,
            0.03,
            samples=32,
        ),
        ModelFamily(
            "recurrent",
            Split.TUNING,
            frozenset({"numbers", "recurrent"}),
            lambda: RecurrentModel(nn.GRU),
            _waves,
            _regression_loss,
            lambda params, lr: torch.optim.Adam(params, lr=lr, foreach=True),
            5e-3,
        ),
        ModelFamily(
            "plain",
            Split.TUNING,
            frozenset({"numbers", "deep"}),
            lambda: mlp([16, *[32] * 7, 4], nn.ReLU),
            _teacher,
            _regression_loss,
            lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
            0.03,
            samples=64,
        ),
        ModelFamily(
            "encoder",
            Split.REPORT,
            frozenset({"tokens", "attention", "layer_norm", "padding"}),
            lambda: Transformer(20, 8, 16),
            _tags,
            lambda model, batch: _token_loss(model(batch.x, batch.extra[:, None, None]), batch.y),  # pyright: ignore
            _adamw,
            5e-3,
        ),
        ModelFamily(
            "residual",
            Split.REPORT,
            frozenset({"numbers", "batch_norm"}),
            residual,
            lambda rng, n: _images(rng, n, 3),
            _class_loss,
            _sgd,
            0.02,
        ),
        ModelFamily(
            "memory",
            Split.REPORT,
            frozenset({"numbers", "recurrent"}),
            lambda: RecurrentModel(nn.LSTM),
            _waves,
            _regression_loss,
            lambda params, lr: torch.optim.NAdam(params, lr=lr),
            5e-3,
        ),
        ModelFamily(
            "autoencoder",
            Split.REPORT,
            frozenset({"numbers", "deep"}),
            lambda: mlp([24, 48, 24, 8, 24, 48, 24], nn.Tanh),
            _mixtures,
            _regression_loss,
            lambda params, lr: torch.optim.RMSprop(params, lr=lr),
            2e-3,
            samples=32,
        ),
        ModelFamily(
            "vision_language",
            Split.REPORT,
            frozenset({"numbers", "attention", "layer_norm", "vision_language"}),
            Captioner,
            _captions,
            lambda model, batch: _token_loss(model(batch.x, batch.extra), batch.y),
            _adamw,
            3e-3,
        ),
    )
}
