"""A small model, its data and loss, for the scripts that torchrun starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from surefoot.models.decoder import Decoder, DecoderConfig

SIZE = DecoderConfig(vocab=32, width=16, layers=2, heads=2, context=8)
SAMPLES = 2
EPS = 1e-3
"""Far above the rounding error of a gradient. With an optimizer's own eps of 1e-8 an element whose gradient cancels to
about zero gets a full update in the direction of its rounding error, which depends on the order of summation."""


def micro_batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which some are ignored; their number differs between batches and ranks."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(0, SIZE.vocab, (SAMPLES, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, : int(torch.randint(0, 8, (), generator=generator))] = -100
    return tokens[:, :-1], targets


def sum_loss(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def build(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    torch.manual_seed(0)
    options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {"eps": EPS}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        return optimizer_class(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 0.01, **options
        )

    return Decoder(SIZE), optimizer


def full_tensor_of(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()
