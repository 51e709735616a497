"""A small decoder-only transformer (pre-norm, rotary positions, torch's attention), its losses, and generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Share the embedding weights with the output layer."""

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
"""Named configurations by number of parameters; "tiny" has about one million. The smallest two read bytes."""


def rotary_angles(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, [length, size / 2]; always float32."""
    frequency = 10_000.0 ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of values in the last axis by the angle of its position."""
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
        # Rotated before the transpose, as [batch, length, heads, size]: the compiler then needs no extra copy.
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        cos, sin = cos[:, None], sin[:, None]
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class DecoderBlock(nn.Module):
    """Attention, then an MLP, each pre-normalised and residual."""

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
    """Maps tokens [batch, length] to logits [batch, length, vocab], or with targets to the sum of their losses."""

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
        for block in self.blocks:  # the residual stream grows with depth: start smaller
            for layer in (cast(DecoderBlock, block).attention.out, cast(DecoderBlock, block).mlp[-1]):
                nn.init.normal_(cast(nn.Linear, layer).weight, std=0.02 / (2 * config.layers) ** 0.5)
        if config.tied:
            self.head.weight = self.embed.weight
        self._set_rotary_angles(torch.get_default_device())

    def _set_rotary_angles(self, device: torch.device) -> None:
        """Precompute the rotary angles on this device.

        Otherwise the compiler recomputes them for every value of every layer, a quarter of the step time at 124 M. They
        are not buffers: they never change, need not be saved, and must stay in float32.
        """
        if device.type != "meta":
            cos, sin = rotary_angles(self.config.context, self.config.width // self.config.heads, torch.device("cpu"))
            self.cos, self.sin = cos.to(device), sin.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._set_rotary_angles(self.embed.weight.device)
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"got {length} tokens, but the model's context is {self.config.context}")
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
    """Make a decoder; the factory that recipes name."""
    return Decoder(DecoderConfig(vocab, width, layers, heads, context, hidden, dropout, tied))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def count_parameters(model: nn.Module) -> int:
    """The number of trainable parameters; shared weights count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy of all targets except -100, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")


def next_token(model: Callable[..., Tensor], batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The loss of a recipe's batch as (sum, count), computed inside the model so that it is compiled too."""
    return model(batch["inputs"], batch["targets"]), batch["count"]


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in float32, of each token of [batch, length + 1] given those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context: int,
    device: torch.device,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """The prompt followed by sampled tokens; uses its own random generator, and temperature 0 takes the argmax.

    The whole context is read again for every token, which is slow for long texts but works with every model.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        inputs = torch.tensor([tokens[-context:]], dtype=torch.int64, device=device)
        logits = model(inputs)[0, -1].float()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return tokens
