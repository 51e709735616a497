"""Operations that make non-finite values for marked samples, to be put behind a module of a healthy model.

Those in `TUNING` were used to write the rules, those in `REPORT` were not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor, Tensor], Tensor]
"""Takes a module's output and, in a shape that fits it, 1 for each marked sample and 0 for the others."""


@dataclass(frozen=True, slots=True)
class PlantedOp:
    """An operation, and what it is called."""

    name: str
    function: Function
    operations: tuple[str, ...]
    """Names that are right for it."""
    backward: bool = False
    needs_features: bool = False
    """With a single feature it goes wrong for every sample."""


def softmax_masked(x: Tensor, mark: Tensor) -> Tensor:
    scores = x.masked_fill(mark > 0, -math.inf)
    return x + 0.01 * torch.softmax(scores, dim=-1)


def log_of_zero(x: Tensor, mark: Tensor) -> Tensor:
    p = x.sigmoid() * (1 - mark)
    return x + 0.01 * torch.log(p)


def division_by_zero(x: Tensor, mark: Tensor) -> Tensor:
    length = (1 - mark) * (1 + x.abs())
    return x / length


def exp_overflow(x: Tensor, mark: Tensor) -> Tensor:
    return x + 0.01 * torch.exp(x.tanh() + 200 * mark)


def square_overflow(x: Tensor, mark: Tensor) -> Tensor:
    large = x + 1e25 * mark
    return x + 0.01 * large**2


def float16_overflow(x: Tensor, mark: Tensor) -> Tensor:
    large = x * (1 + 1e7 * mark) + 1e6 * mark
    return large.half().float()


def layer_norm_without_variance(x: Tensor, mark: Tensor) -> Tensor:
    flat = x * (1 - mark)
    return x + 0.01 * F.layer_norm(flat, flat.shape[-1:], eps=0.0)


def sqrt_at_zero(x: Tensor, mark: Tensor) -> Tensor:
    squared = x.pow(2) * (1 - mark)
    return x + 0.01 * torch.sqrt(squared)


def root_in_unused_branch(x: Tensor, mark: Tensor) -> Tensor:
    size = x.abs() * (1 - mark)
    return x + 0.01 * torch.where(size > 0, size**0.5, 0.0)


def log_in_unused_branch(x: Tensor, mark: Tensor) -> Tensor:
    p = x.sigmoid() * (1 - mark)
    return x + 0.01 * torch.where(p > 0, torch.log(p), 0.0)


def cosine_at_its_edge(x: Tensor, mark: Tensor) -> Tensor:
    cosine = x.tanh() * 0.9 * (1 - mark) + mark * (1 + 0 * x)
    return x + 0.01 * torch.acos(cosine)


def attention_all_masked(x: Tensor, mark: Tensor) -> Tensor:
    logits = x - x.amax(-1, keepdim=True)
    logits = torch.where(mark > 0, torch.full_like(logits, -math.inf), logits)
    return x + F.softmax(logits, -1) * 0.01


def entropy(x: Tensor, mark: Tensor) -> Tensor:
    p = (x.tanh() * 0.4 + 0.5) * (1 - mark)
    return x - 0.01 * p.log()


def mean_of_tokens(x: Tensor, mark: Tensor) -> Tensor:
    real = (1 - mark).expand_as(x)
    return x + 0.01 * (x * real).sum(-1, keepdim=True) / real.sum(-1, keepdim=True)


def log_of_negative(x: Tensor, mark: Tensor) -> Tensor:
    return x + 0.01 * (x.abs() + 0.5 - 100 * mark * (1 + x.abs())).log()


def softplus_by_hand(x: Tensor, mark: Tensor) -> Tensor:
    grown = (x.tanh() + 1e3 * mark).exp()
    return x + 0.01 * (1 + grown).log()


def energy(x: Tensor, mark: Tensor) -> Tensor:
    return x + (x.tanh() + mark * 3e20).square() * 0.01


def to_float16(x: Tensor, mark: Tensor) -> Tensor:
    return (x + mark * 7e4 * (1 + x.abs())).to(torch.float16).to(x.dtype)


def scaled_by_zero_root(x: Tensor, mark: Tensor) -> Tensor:
    mean_square = (x.pow(2) + 0.01).mean(-1, keepdim=True) * (1 - mark).amax(-1, keepdim=True)
    return x + 0.01 * mean_square.rsqrt()


def standardised(x: Tensor, mark: Tensor) -> Tensor:
    flat = x * (1 - mark)
    return x + 0.01 * (flat - flat.mean(-1, keepdim=True)) / flat.std(-1, keepdim=True)


def distance_of_equals(x: Tensor, mark: Tensor) -> Tensor:
    gap = (x - x.detach() + x.detach() * 0.5) * (1 - mark)
    return x + 0.01 * gap.square().sum(-1, keepdim=True).sqrt()


def fractional_power(x: Tensor, mark: Tensor) -> Tensor:
    size = (x.abs() + 0.1) * (1 - mark)
    return x + 0.01 * size.pow(0.3)


def masked_logarithm(x: Tensor, mark: Tensor) -> Tensor:
    p = (x.tanh() + 1.5) * (1 - mark)
    return x + 0.01 * p.log().masked_fill(mark > 0, 0.0)


def ratio_in_unused_branch(x: Tensor, mark: Tensor) -> Tensor:
    below = (x.abs() + 0.1) * (1 - mark)
    return x + 0.01 * torch.where(below > 0, x / below, x)


def angle(x: Tensor, mark: Tensor) -> Tensor:
    sine = x.tanh() * 0.9 * (1 - mark) + mark * (1 + 0 * x)
    return x + 0.01 * sine.asin()


def least_of_the_batch(x: Tensor, mark: Tensor) -> Tensor:
    """Its result has no rows by sample: the batch has to be bisected."""
    least = ((x.tanh() + 1.5) * (1 - mark)).amin(0, keepdim=True)
    return x + 0.01 * least.log()


TUNING = (
    PlantedOp("softmax of a masked row", softmax_masked, ("softmax",)),
    PlantedOp("log of 0", log_of_zero, ("log",)),
    PlantedOp("division by 0", division_by_zero, ("div",)),
    PlantedOp("exp overflow", exp_overflow, ("exp",)),
    PlantedOp("square overflow", square_overflow, ("pow",)),
    PlantedOp("float16 overflow", float16_overflow, ("half",)),
    PlantedOp("layer norm of equal values", layer_norm_without_variance, ("layer_norm",), needs_features=True),
    PlantedOp("sqrt at 0", sqrt_at_zero, ("sqrt",), backward=True),
    PlantedOp("root in a branch not taken", root_in_unused_branch, ("pow",), backward=True),
    PlantedOp("log in a branch not taken", log_in_unused_branch, ("log",), backward=True),
    PlantedOp("acos at 1", cosine_at_its_edge, ("acos",), backward=True),
)
REPORT = (
    PlantedOp("softmax of a masked row", attention_all_masked, ("softmax",)),
    PlantedOp("log of 0", entropy, ("log",)),
    PlantedOp("mean over no token", mean_of_tokens, ("div",)),
    PlantedOp("log of a negative value", log_of_negative, ("log",)),
    PlantedOp("exp overflow", softplus_by_hand, ("exp",)),
    PlantedOp("square overflow", energy, ("square",)),
    PlantedOp("float16 overflow", to_float16, ("to",)),
    PlantedOp("rsqrt at 0", scaled_by_zero_root, ("rsqrt",)),
    PlantedOp("division by no deviation", standardised, ("div",), needs_features=True),
    PlantedOp("sqrt of a sum at 0", distance_of_equals, ("sqrt",), backward=True),
    PlantedOp("power of 0.3 at 0", fractional_power, ("pow",), backward=True),
    PlantedOp("log, masked afterwards", masked_logarithm, ("log",), backward=True),
    PlantedOp("ratio in a branch not taken", ratio_in_unused_branch, ("div",), backward=True),
    PlantedOp("asin at 1", angle, ("asin",), backward=True),
    PlantedOp("log of the least of the batch", least_of_the_batch, ("log",)),
)
