"""FLOPs of one sample, forward and backward: by formula for language models, and counted by torch on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from surefoot.plan.fake_step import fake_mode, loss_function_of, make_fake_model, mean_loss
from surefoot.plan.model_size import ModelSize
from surefoot.plan.plan_error import PlanError
from surefoot.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one sample without recomputation, and where the number comes from."""

    per_sample: float
    how: str
    counted: float
    """The same, counted operation by operation."""


def flops_of(recipe: Recipe, facts: ModelSize, make_batch: Callable[[], Any], samples: int) -> Flops:
    """By formula where tokens and layers are known, else counted; `samples` is the size of the batch."""
    counted = _count(recipe, facts, make_batch) / samples
    width, tokens, layers = recipe.model.arguments.get("width"), recipe.data.context, sum(facts.stack_blocks)
    if facts.task != "language" or recipe.data.kind == "own" or not isinstance(width, int):
        return Flops(counted, "counted by torch's FlopCounterMode on fake tensors", counted)
    multiplied = facts.parameters - facts.embedding
    formula = 6.0 * multiplied * tokens + 12.0 * layers * width * tokens**2
    how = f"6 x {multiplied:,} weights x {tokens:,} tokens + 12 x {layers} layers x width {width:,} x {tokens:,}^2"
    return Flops(formula, how, counted)


def _count(recipe: Recipe, facts: ModelSize, make_batch: Callable[[], Any]) -> float:
    """Of short models, from which the whole follows: every block of a stack costs the same."""
    short = [min(2, blocks) for blocks in facts.stack_blocks]
    try:
        base = _count_lengths(recipe, make_batch, short)
    except PlanError:  # some models count on all their blocks
        short, base = facts.stack_blocks, _count_lengths(recipe, make_batch, facts.stack_blocks)
    total = base
    for number, blocks in enumerate(facts.stack_blocks):
        if blocks > short[number]:
            longer = [length + (index == number) for index, length in enumerate(short)]
            total += (blocks - short[number]) * (_count_lengths(recipe, make_batch, longer) - base)
    return total


def _count_lengths(recipe: Recipe, make_batch: Callable[[], Any], lengths: list[int]) -> float:
    with fake_mode(), sdpa_kernel(SDPBackend.MATH):
        fake = make_fake_model(recipe)
        for stack, length in zip(fake.stacks, lengths, strict=True):
            stack.shorten(length)
        with FlopCounterMode(display=False) as counter:
            mean_loss(loss_function_of(recipe), fake.model, make_batch()).backward()
        return float(counter.get_total_flops())
