"""Faults in learning rate, schedule, momentum, accumulation or clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.zoo.scenario import fault
from benchmarks.zoo.training import WARMUP, ZooRun
from surefoot.records import Cause

# -- learning rate


@fault(
    Cause.LEARNING_RATE,
    on={"decoder": ".!!", "memory": ".!!"},
    strengths={"decoder": (8, 40, 100), "memory": (4, 30, 100)},
    also=(Cause.SCHEDULE,),
)
def rate_too_high(run: ZooRun, at: int, strength: float) -> None:
    """The learning rate is too high from one step to the end."""
    run.scale_lr(lambda step: strength if step >= at else 1.0)


@fault(
    Cause.LEARNING_RATE,
    on={
        "plain": ".!!",
        "decoder": ".!!",
        "convolution": ".!!",
        "recurrent": ".!!",
        "residual": ".!!",
        "memory": ".!!",
        "autoencoder": ".!!",
        "encoder": ".!!",
    },
    strengths={
        "plain": (3, 10, 100),
        "decoder": (10, 100, 1000),
        "convolution": (10, 100, 1000),
        "recurrent": (30, 300, 3000),
        "residual": (3, 100, 1000),
        "memory": (10, 200, 1000),
        "autoencoder": (3, 100, 1000),
        "encoder": (2, 10, 100),
    },
    also=(Cause.SCHEDULE,),
    onset=0,
)
def rate_too_high_from_start(run: ZooRun, at: int, strength: float) -> None:
    """The learning rate is too high from the first step to the last, warmup included."""
    run.scale_lr(lambda step: strength if step >= at else 1.0)


def _creep(run: ZooRun, at: int, doubling: int, limit: float) -> None:
    run.scale_lr(lambda step: min(2.0 ** (max(0, step - at) / doubling), limit))


@fault(
    Cause.LEARNING_RATE,
    on={"plain": ".!!", "vision_language": ".!!"},
    strengths={"plain": (4, 30, 100), "vision_language": (8, 30, 100)},
)
def rate_doubles_every_5(run: ZooRun, at: int, strength: float) -> None:
    """The learning rate doubles every 5 steps up to a limit."""
    _creep(run, at, 5, strength)


@fault(
    Cause.LEARNING_RATE,
    on={"convolution": ".!!", "autoencoder": ".!!"},
    strengths={"convolution": (2, 60, 200), "autoencoder": (4, 15, 100)},
    precision="bfloat16",
)
def rate_doubles_every_20(run: ZooRun, at: int, strength: float) -> None:
    """The learning rate doubles every 20 steps up to a limit."""
    _creep(run, at, 20, strength)


@fault(
    Cause.LEARNING_RATE,
    on={"recurrent": ".!!", "encoder": "!!!"},
    strengths={"recurrent": (3, 15, 40), "encoder": (2.5, 4, 10)},
    onset=130,
    steps=420,
)
def rate_doubles_every_80(run: ZooRun, at: int, strength: float) -> None:
    """The learning rate, already several times too high, doubles every 80 steps."""
    run.scale_lr(lambda step: strength * 2.0 ** ((step - at) / 80) if step >= at else 1.0)


@fault(
    Cause.PLATEAU,
    on={"plain": ".!!", "vision_language": ".!!"},
    strengths={"plain": (0.9, 0.02, 0.0), "vision_language": (0.8, 0.02, 0.0)},
    curable=False,
)
def rate_to_zero(run: ZooRun, at: int, strength: float) -> None:
    """The schedule ends far too early, with a learning rate close to zero."""
    run.scale_lr(lambda step: strength if step >= at else 1.0)


# -- the schedule


@fault(
    Cause.SCHEDULE,
    on={"recurrent": ".!!", "residual": ".!!"},
    strengths={"recurrent": (10, 150, 500), "residual": (3, 60, 200)},
    also=(Cause.LEARNING_RATE,),
    optimizer=torch.optim.Adamax,
    lr=0.01,
)
def schedule_step(run: ZooRun, at: int, strength: float) -> None:
    """A wrong milestone in the schedule multiplies the learning rate for sixty steps."""
    run.scale_lr(lambda step: strength if at <= step < at + 60 else 1.0)


@fault(
    Cause.SCHEDULE,
    on={"decoder": ".!!", "residual": ".!!"},
    strengths={"decoder": (3, 40, 100), "residual": (3, 20, 100)},
    onset=0,
)
def no_warmup(run: ZooRun, at: int, strength: float) -> None:
    """There is no warmup: the learning rate is high from the first step on."""
    run.scale_lr(lambda step: strength * WARMUP / (step + 1) if at <= step < WARMUP else 1.0)


# -- accumulation


@fault(
    Cause.ACCUMULATION,
    on={"plain": ".!!", "residual": ".!!"},
    strengths={"plain": (4, 16, 64), "residual": (2, 32, 128)},
    accumulate=2,
    samples=16,
)
def accumulation_not_divided(run: ZooRun, at: int, strength: float) -> None:
    """The loss is no longer divided by the number of micro-batches."""

    def stop_dividing(step: int) -> None:
        run.divide_loss = step < at

    run.before_step(stop_dividing)
    run.on_loss(lambda step, loss: loss * (strength / run.accumulate) if step >= at else loss)


@fault(
    Cause.ACCUMULATION,
    on={"convolution": ".!!", "autoencoder": ".!!"},
    strengths={"convolution": (2, 12, 300), "autoencoder": (8, 100, 300)},
    precision="bfloat16",
)
def gradients_not_zeroed(run: ZooRun, at: int, strength: float) -> None:
    """Gradients are zeroed only every few steps and accumulate in between."""
    grads: dict[Tensor, Tensor] = {}

    def restore(step: int) -> None:
        if step > at and (step - at) % strength:
            for param, grad in grads.items():
                param.grad = grad

    def save(step: int) -> None:
        if step >= at:
            grads.update((p, p.grad.clone()) for p in run.model.parameters() if p.grad is not None)

    run.before_step(restore)
    run.on_gradients(save)


# -- momentum and clipping


@fault(
    Cause.MOMENTUM,
    on={"convolution": ".!!", "encoder": ".!!"},
    strengths={"convolution": (0.95, 1.005, 1.02), "encoder": (0.93, 0.99, 0.999)},
    steps=420,
)
def momentum_too_high(run: ZooRun, at: int, strength: float) -> None:
    """The optimizer's momentum is raised."""

    def raise_momentum(step: int) -> None:
        for group in run.optimizer.param_groups if step >= at else ():
            if "betas" in group:
                group["betas"] = (strength, group["betas"][1])
            else:
                group["momentum"] = strength

    run.before_step(raise_momentum)


def _clip_at(run: ZooRun, at: int, norm: float) -> None:
    def change(step: int) -> None:
        run.clip = norm if step >= at else run.settings.clip

    run.before_step(change)


@fault(
    Cause.NOT_UPDATING,
    on={"plain": ".!!", "residual": ".!!"},
    strengths={"plain": (2, 64, 65536), "residual": (4, 64, 65536)},
    curable=False,
    precision="float16",
    clip=1.0,
)
def clip_before_unscaling(run: ZooRun, at: int, strength: float) -> None:
    """Gradients are clipped while still multiplied by the loss scale, which makes them tiny."""
    _clip_at(run, at, run.settings.clip / strength)


def sgd_with_half_momentum(params: Any, lr: float) -> Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.5)


@fault(
    Cause.EXPLODING_GRADIENT,
    on={"recurrent": ".!!", "memory": ".!!"},
    strengths=(1.3, 20, math.inf),
    optimizer=sgd_with_half_momentum,
    lr=3.0,
    clip=0.1,
)
def clipping_lost(run: ZooRun, at: int, strength: float) -> None:
    """A run that depends on clipping has it loosened or removed."""
    _clip_at(run, at, run.settings.clip * strength)
