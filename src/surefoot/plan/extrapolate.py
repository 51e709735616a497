"""The memory of a step of the whole model, from two short models per stack of equal blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefoot.plan.fake_step import FakeStepOptions, StepMemory, run_fake_step
from surefoot.plan.phase_tracker import Bytes, Phase
from surefoot.plan.plan_error import PlanError
from surefoot.train.recipe import Recipe

Kept = dict[Phase, int]
_MIN_BLOCKS = 2
"""A first and a last block; between them memory changes by the same amount from block to block."""


@dataclass(frozen=True, slots=True)
class StackLayers:
    """How many blocks a stack has, and the activations that all of them keep for backward."""

    name: str
    blocks: int
    kept: int
    kept_by_attention: int


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The peaks of the whole model, and what its layers keep."""

    step: StepMemory
    layers: list[StackLayers]
    measured_blocks: int
    """Blocks per stack of the largest model that was run."""


def short_length(blocks: int, every: int) -> int:
    """The shortest stack that ends at the same place of the recomputation pattern; the whole stack if it is short."""
    period = max(every, 1)
    length = period * 2 + (blocks - period * 2) % period
    return min(blocks, max(length, _MIN_BLOCKS))


def measure_model(
    recipe: Recipe, make_batch: Callable[[], Any], blocks: list[int], names: list[str], options: FakeStepOptions
) -> ModelMemory:
    """Run short models and extrapolate: every phase's bytes grow by the same amount with each block."""
    period = max(recipe.speed.checkpoint_activations, 1)
    short = [short_length(count, period) for count in blocks]

    def run(lengths: list[int]) -> StepMemory:
        return run_fake_step(recipe, make_batch, tuple(lengths), period, options)

    try:
        base = run(short)
    except PlanError:  # some models count on all their blocks
        if short == blocks:
            raise
        short, base = blocks, run(blocks)
    total = StepMemory({phase: dict(peak) for phase, peak in base.peaks.items()}, dict(base.states))
    total.kept, total.kept_by_attention = dict(base.kept), dict(base.kept_by_attention)
    longest = max(short, default=0)
    for number, count in enumerate(blocks):
        if count == short[number]:
            continue
        longer = [length + period * (index == number) for index, length in enumerate(short)]
        longest = max(longest, *longer)
        grown, times = run(longer), (count - short[number]) // period
        for phase, peak in total.peaks.items():
            _add_growth(peak, base.peaks[phase], grown.peaks[phase], times)
        _add_growth(total.states, base.states, grown.states, times)
        _add_kept(total.kept, base.kept, grown.kept, number, times)
        _add_kept(total.kept_by_attention, base.kept_by_attention, grown.kept_by_attention, number, times)
    layers = []
    for number, (name, count) in enumerate(zip(names, blocks, strict=True)):
        attention = _sum(total.kept_by_attention, number)
        layers.append(StackLayers(name, count, _sum(total.kept, number), attention))
    return ModelMemory(total, layers, longest)


def _add_growth(total: Bytes, short: Bytes, longer: Bytes, times: int) -> None:
    for kind in total:
        total[kind] += times * (longer[kind] - short[kind])


def _add_kept(total: Kept, short: Kept, longer: Kept, number: int, times: int) -> None:
    """Add what the blocks between the first and the last keep."""
    total["middle", str(number)] = times * (_sum(longer, number) - _sum(short, number))


def _sum(kept: Kept, number: int) -> int:
    """Bytes that all blocks of a stack keep."""
    return sum(size for label, size in kept.items() if label[1] == str(number))
