"""A small decoder language model: pre-norm blocks, rotary positions, attention by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder; `width` must be a multiple of twice `heads`."""

    vocab: int
    width: int
    layers: int
    heads: int
    context: int
    hidden: int = 4
    """Width of the MLP as a multiple of `width`."""
    dropout: float = 0.0
    tied: bool = True
    """Share the weights of the embedding with the output layer."""

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 x heads, so that rotary positions can pair the values of a head; "
                f"got width {self.width} and heads {self.heads}: try width {2 * self.heads * 16}"
            )


SIZES = {
    "tiny": DecoderConfig(vocab=256, width=128, layers=5, heads=4, context=256),
    "10m": DecoderConfig(vocab=256, width=384, layers=6, heads=6, context=512),
    "124m": DecoderConfig(vocab=50304, width=768, layers=12, heads=12, context=1024),
    "350m": DecoderConfig(vocab=50304, width=1024, layers=24, heads=16, context=1024),
    "1.3b": DecoderConfig(vocab=50304, width=2048, layers=24, heads=16, context=1024),
}
"""Named shapes, by their number of parameters; "tiny" has about one million. The small two read bytes."""


def rotary_angles(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, [length, size / 2]; float32 whatever the precision of the model."""
    frequency = 10_000.0 ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of values in the last axis by the angle of its position."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)


class CausalSelfAttention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Turned while they lie as they came, [batch, length, heads, size]: the compiler then writes nothing twice.
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        cos, sin = cos[:, None], sin[:, None]
        q, k, v = (each.transpose(1, 2) for each in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class DecoderBlock(nn.Module):
    """Attention, then an MLP; each reads a normalised stream and adds to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.hidden * config.width, bias=False),
            nn.GELU(),
            nn.Linear(config.hidden * config.width, config.width, bias=False),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Tokens [batch, length] in, logits [batch, length, vocab] out; with targets the sum of their losses instead."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_initialise)
        for block in self.blocks:  # what is added to the stream grows with depth: start it smaller
            for layer in (cast(DecoderBlock, block).attention.out, cast(DecoderBlock, block).mlp[-1]):
                nn.init.normal_(cast(nn.Linear, layer).weight, std=0.02 / (2 * config.layers) ** 0.5)
        if config.tied:
            self.head.weight = self.embed.weight
        self._turn(torch.get_default_device())

    def _turn(self, device: torch.device) -> None:
        """Keep the rotary angles on this device.

        Else the compiler computes them anew for every value of every layer, a quarter of a step of 124 M. They are no
        buffers: nothing changes them, so nothing has to look after them, and they stay in float32.
        """
        if device.type != "meta":
            cos, sin = rotary_angles(self.config.context, self.config.width // self.config.heads, torch.device("cpu"))
            self.cos, self.sin = cos.to(device), sin.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._turn(self.embed.weight.device)
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"got {length} tokens, the model reads at most {self.config.context} at a time")
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        logits = self.head(self.norm(x))
        return logits if targets is None else cross_entropy_sum(logits, targets)


def decoder(
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    context: int,
    hidden: int = 4,
    dropout: float = 0.0,
    tied: bool = True,
) -> Decoder:
    """The decoder of a recipe."""
    return Decoder(DecoderConfig(vocab, width, layers, heads, context, hidden, dropout, tied))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def count_parameters(model: nn.Module) -> int:
    """The number of trained values; shared weights count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of all targets that are not -100, summed in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")


def next_token(model: Callable[..., Tensor], batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The loss of a recipe's batch as (sum, count): computed inside the model, where the compiler sees all of it."""
    return model(batch["inputs"], batch["targets"]), batch["count"]


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in float32, of each token of [batch, length + 1] given those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
