"""What is wrong with the rate, the schedule, the momentum, the accumulation or the clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from surefoot.records import Cause
from surefoot.zoo.run import WARMUP, Run
from surefoot.zoo.scenario import fault


def sgd_with_half_momentum(params: Any, rate: float) -> Optimizer:
    return torch.optim.SGD(params, lr=rate, momentum=0.5)


@fault(Cause.LEARNING_RATE, on={"decoder": "!!!", "memory": "!!!"}, strengths=(3.0, 10.0, 100.0))
def rate_too_high(run: Run, at: int, strength: float) -> None:
    """The learning rate is too high from one step to the end."""
    run.scale_rate(lambda step: strength if step >= at else 1.0)


def _creep(run: Run, at: int, doubling: float, end: float) -> None:
    run.scale_rate(lambda step: min(2.0 ** (max(0, step - at) / doubling), end))


@fault(Cause.LEARNING_RATE, on={"plain": "!!!", "vision_language": "!!!"}, strengths=(3.0, 10.0, 100.0))
def rate_doubles_every_5(run: Run, at: int, strength: float) -> None:
    """The learning rate doubles every 5 steps until it is so many times too high."""
    _creep(run, at, 5, strength)


@fault(
    Cause.LEARNING_RATE,
    on={"convolution": "!!!", "autoencoder": "!!!"},
    strengths=(3.0, 10.0, 100.0),
    precision="bfloat16",
)
def rate_doubles_every_20(run: Run, at: int, strength: float) -> None:
    """The learning rate doubles every 20 steps until it is so many times too high."""
    _creep(run, at, 20, strength)


@fault(
    Cause.LEARNING_RATE,
    on={"recurrent": "!!!", "encoder": "!!!"},
    strengths=(3.0, 10.0, 100.0),
    onset=130,
    steps=420,
)
def rate_doubles_every_80(run: Run, at: int, strength: float) -> None:
    """The learning rate, some times too high to begin with, doubles every 80 steps."""
    run.scale_rate(lambda step: strength * 2.0 ** ((step - at) / 80) if step >= at else 1.0)


@fault(Cause.SCHEDULE, on={"recurrent": "!!!", "residual": "!!!"}, strengths=(3.0, 10.0, 100.0),
    optimizer=torch.optim.Adamax, rate=0.01)
def schedule_step(run: Run, at: int, strength: float) -> None:
    """A milestone of the schedule raises the rate for sixty steps where it should have left it."""
    run.scale_rate(lambda step: strength if at <= step < at + 60 else 1.0)


@fault(Cause.SCHEDULE, on={"decoder": "!!!", "encoder": "!!!"}, strengths=(3.0, 10.0, 100.0), onset=0)
def no_warmup(run: Run, at: int, strength: float) -> None:
    """The rate is at its full height, or above, in the steps where it should rise."""
    run.scale_rate(lambda step: strength * WARMUP / (step + 1) if step < WARMUP else 1.0)


@fault(
    Cause.ACCUMULATION,
    on={"plain": "!!!", "residual": "!!!"},
    strengths=(2.0, 8.0, 32.0),
    accumulate=2,
    samples=16,
)
def accumulation_not_divided(run: Run, at: int, strength: float) -> None:
    """The losses of so many micro-batches are added up and not divided."""

    def forget(step: int) -> None:
        run.divide = step < at

    run.before_step(forget)
    run.on_loss(lambda step, loss: loss * (strength / run.accumulate) if step >= at else loss)


@fault(Cause.ACCUMULATION, on={"convolution": "!!!", "autoencoder": "!!!"}, strengths=(2.0, 8.0, 32.0))
def gradients_not_zeroed(run: Run, at: int, strength: float) -> None:
    """Gradients are zeroed only every so many steps, and pile up between."""
    params = list(run.model.parameters())
    piles = [torch.zeros_like(p) for p in params]

    def pile(step: int) -> None:
        if step >= at:
            for p, kept in zip(params, piles, strict=True):
                assert p.grad is not None
                p.grad += kept
                kept.copy_(p.grad if (step - at + 1) % strength else torch.zeros_like(kept))

    run.on_gradients(pile)


@fault(
    Cause.MOMENTUM,
    on={"convolution": "!!!", "encoder": "!!!"},
    strengths=(0.97, 0.99, 0.999),
)
def momentum_too_high(run: Run, at: int, strength: float) -> None:
    """The optimizer's momentum is raised."""

    def raise_it(step: int) -> None:
        for group in run.optimizer.param_groups if step >= at else ():
            if "betas" in group:
                group["betas"] = (strength, group["betas"][1])
            else:
                group["momentum"] = strength

    run.before_step(raise_it)


@fault(
    Cause.NOT_UPDATING,
    on={"plain": "!!!", "residual": "!!!"},
    strengths=(4.0, 64.0, 65536.0),
    curable=False,
    precision="float16",
    clip=1.0,
)
def clip_before_unscaling(run: Run, at: int, strength: float) -> None:
    """Gradients are clipped while still multiplied by the loss scale."""

    def clip(step: int) -> None:
        run.clip = run.settings.clip / (strength if step >= at else 1.0)

    run.before_step(clip)


@fault(
    Cause.EXPLODING_GRADIENT,
    on={"recurrent": "!!!", "memory": "!!!"},
    strengths=(3.0, 10.0, math.inf),
    clip=0.1,
    rate=0.5,
    optimizer=sgd_with_half_momentum,
)
def clipping_lost(run: Run, at: int, strength: float) -> None:
    """A run that lives by its clipping has it loosened, or loses it."""

    def loosen(step: int) -> None:
        run.clip = run.settings.clip * (strength if step >= at else 1.0)

    run.before_step(loosen)


@fault(
    Cause.PLATEAU,
    on={"decoder": "!!!", "vision_language": "!!!"},
    strengths=(0.3, 0.03, 0.0),
    curable=False,
    precision="bfloat16",
)
def rate_to_zero(run: Run, at: int, strength: float) -> None:
    """The schedule ends far too early, and the rate stays at next to nothing."""
    run.scale_rate(lambda step: strength if step >= at else 1.0)
