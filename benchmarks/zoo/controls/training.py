"""Healthy runs with unusual training: lr schedules, weights, losses, optimizers and precisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.zoo.controls.randomness import step_normal, step_rng
from benchmarks.zoo.families import MicroBatch
from benchmarks.zoo.scenario import ONSET, control
from benchmarks.zoo.training import ZooRun


def _toss(run: ZooRun, number: int) -> float:
    return float(torch.rand((), generator=step_rng(run, number)) < 0.5)


def _parts(run: ZooRun, *kinds: type[nn.Module]) -> list[Any]:
    return [part for part in run.model.modules() if isinstance(part, kinds)]


def _set(run: ZooRun, **options: Any) -> None:
    """Change options of the optimizer in place."""
    for group in run.optimizer.param_groups:
        group.update(options)


def _momentum(params: Iterable[Any], lr: float) -> Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


# -- learning rate


@control("recurrent", "autoencoder")
def warm_restarts(run: ZooRun, at: int) -> None:
    """The learning rate follows three cosine cycles that start at four times its value."""
    run.scale_lr(lambda step: 2.02 + 1.98 * math.cos(math.pi * ((step - at) % 50) / 50) if step >= at else 1.0)


@control("recurrent", "memory", onset=0)
def cyclic_rate(run: ZooRun, at: int) -> None:
    """The learning rate cycles between 0.05 and 12 times its value."""
    run.scale_lr(lambda step: 0.05 + 12 * abs(step % 40 - 20) / 20)


@control("recurrent", "memory", optimizer=torch.optim.NAdam)
def rate_bump(run: ZooRun, at: int) -> None:
    """The learning rate is 2.5 times as high for ten steps, to leave a plateau."""
    run.scale_lr(lambda step: 2.5 if at <= step < at + 10 else 1.0)


@control("decoder", "residual")
def rate_decay(run: ZooRun, at: int) -> None:
    """The learning rate is divided by ten."""
    run.scale_lr(lambda step: 0.1 if step >= at else 1.0)


@control("recurrent", "memory", onset=0)
def slow_start(run: ZooRun, at: int) -> None:
    """Nothing seems to move: the learning rate is tiny until the middle of the run."""
    run.scale_lr(lambda step: 1.0 if step >= at + ONSET else 1e-3)


@control("recurrent", "autoencoder", onset=0)
def large_stable_rate(run: ZooRun, at: int) -> None:
    """The learning rate is five times the usual one, the largest that stays stable."""
    run.scale_lr(lambda step: 5.0)


# -- weights and layers


@control("plain", "encoder", onset=0, steps=400)
def plateau_that_ends(run: ZooRun, at: int) -> None:
    """Small initial weights start the run on a saddle, which it leaves by itself after about 200 steps."""

    def shrink(step: int) -> None:
        for p in run.model.parameters() if step == 0 else ():
            p.data.mul_(0.6)

    run.before_step(shrink)


@control("convolution", "vision_language", onset=0, optimizer=torch.optim.Adamax, lr=5e-3)
def dropout(run: ZooRun, at: int) -> None:
    """Half of the hidden units are dropped, different ones at every step."""
    for part in _parts(run, nn.ReLU):
        run.on_forward(part, lambda step, out: F.dropout(out, 0.5))


@control("decoder", "vision_language")
def dropout_on(run: ZooRun, at: int) -> None:
    """Dropout is switched on in the middle of the run, against overfitting."""
    for part in _parts(run, nn.LayerNorm):
        run.on_forward(part, lambda step, out: F.dropout(out, 0.4) if step >= at else out)


@control("decoder", "residual", onset=0)
def stochastic_depth(run: ZooRun, at: int) -> None:
    """Whole branches are skipped in half of the steps, so that their weights get no gradient."""
    branches = [part for name, part in run.model.named_modules() if name.endswith(("mlp", "attention", "norm2"))]
    for number, part in enumerate(branches):
        run.on_forward(part, lambda step, out, number=number: out * _toss(run, 64 * step + number))


@control("convolution", "vision_language", onset=0)
def gradual_unfreezing(run: ZooRun, at: int) -> None:
    """The first half of the parameters is frozen until the middle of the run."""
    params = list(run.model.parameters())
    for p in params[: len(params) // 2]:
        run.on_gradient_of(p, lambda step, g: g * float(step >= at + ONSET))


@control("plain", "autoencoder")
def pruning(run: ZooRun, at: int) -> None:
    """The smaller two thirds of each layer's weights are pruned once and have to grow back."""

    def prune(step: int) -> None:
        for part in _parts(run, nn.Linear) if step == at else ():
            part.weight.data.mul_(part.weight.abs() > part.weight.abs().quantile(2 / 3))

    run.before_step(prune)


# -- loss and gradients


@control("convolution", "residual", onset=0, optimizer=torch.optim.Adam, lr=3e-3)
def policy_gradient(run: ZooRun, at: int) -> None:
    """The model learns from rewards only: the loss is negative, noisy, and says little."""

    def reward(model: nn.Module, batch: MicroBatch, loss: Callable[..., Tensor] = run.family.loss) -> Tensor:
        if not model.training:
            return loss(model, batch)
        policy = torch.distributions.Categorical(logits=model(batch.x).float())
        guess = policy.sample()
        won = (guess == batch.y).float()
        return -((won - won.mean()) * policy.log_prob(guess)).mean() - 0.2 * policy.entropy().mean()

    run.family = replace(run.family, loss=reward)


@control("decoder", "vision_language", onset=0)
def noisy_advantages(run: ZooRun, at: int) -> None:
    """Each loss is weighted by a noisy advantage of either sign, 1 on average."""
    run.on_loss(lambda step, loss: loss * (1 + 1.5 * float(torch.randn((), generator=step_rng(run, step)))))


@control("recurrent", "autoencoder", onset=0)
def diffusion_weights(run: ZooRun, at: int) -> None:
    """Inputs get noise of very different strength from step to step, and the loss a matching weight."""

    def sigma(step: int) -> float:
        return max(0.1, math.exp(1.2 * float(torch.randn((), generator=step_rng(run, -1 - step))) - 0.5))

    run.on_batch(lambda step, batch: batch.replace(x=batch.x + sigma(step) * step_normal(run, step, batch.x)))
    run.on_loss(lambda step, loss: loss * (1 + sigma(step) ** -2))


@control("plain", "memory")
def loss_reweighting(run: ZooRun, at: int) -> None:
    """The loss is multiplied by five from the middle of the run on; the learning rate is adapted where needed."""
    run.on_loss(lambda step, loss: loss * 5 if step >= at else loss)
    if isinstance(run.optimizer, torch.optim.SGD):
        run.scale_lr(lambda step: 0.2 if step >= at else 1.0)


@control("decoder", "vision_language", onset=0)
def summed_loss(run: ZooRun, at: int) -> None:
    """The loss is a sum, not a mean: norms are in the thousands, which does not affect the optimizer."""
    run.on_loss(lambda step, loss: loss * 4096)


@control("plain", "residual", onset=0)
def tiny_units(run: ZooRun, at: int) -> None:
    """The loss is in a tiny unit, with a large learning rate to match: norms are far below the usual."""
    run.on_loss(lambda step, loss: loss * 2.0**-24)
    run.scale_lr(lambda step: 2.0**24)


@control("convolution", "residual")
def label_smoothing(run: ZooRun, at: int) -> None:
    """Label smoothing from the middle of the run on: the loss rises at once."""
    run.on_batch(lambda step, batch: batch.replace(y=0.8 * F.one_hot(batch.y, 10) + 0.02) if step >= at else batch)


@control("decoder", "encoder", onset=0, clip=0.02)
def low_clipping(run: ZooRun, at: int) -> None:
    """The loop clips every gradient to a fraction of its norm, which the optimizer compensates."""


# -- optimizer and precision


@control("recurrent", "memory")
def betas_change(run: ZooRun, at: int) -> None:
    """Both betas are lowered on purpose: the optimizer forgets faster."""
    run.before_step(lambda step: _set(run, betas=(0.5, 0.9)) if step == at else None)


@control("convolution", "autoencoder", onset=0, optimizer=_momentum, lr=0.05)
def momentum_warmup(run: ZooRun, at: int) -> None:
    """Momentum rises from 0 to 0.98."""
    run.before_step(lambda step: _set(run, momentum=0.98 * min(1.0, (step + 1) / 200)))


@control("convolution", "residual")
def weight_decay_on(run: ZooRun, at: int) -> None:
    """Strong weight decay is switched on in the middle of the run: the weights shrink."""
    run.before_step(lambda step: _set(run, weight_decay=0.02) if step == at else None)


@control("decoder", "encoder", onset=0)
def new_parameter_group(run: ZooRun, at: int) -> None:
    """Half of the parameters are added to the optimizer in the middle of the run, as a new group."""
    group = run.optimizer.param_groups[0]
    half = len(group["params"]) // 2
    late, group["params"] = group["params"][:half], group["params"][half:]
    for p in late:
        p.requires_grad_(False)

    def add(step: int) -> None:
        if step == at + ONSET:
            run.optimizer.add_param_group({"params": [p.requires_grad_() for p in late]})

    run.before_step(add)


@control("recurrent", "autoencoder")
def fresh_optimizer(run: ZooRun, at: int) -> None:
    """The optimizer state is cleared for a new stage, on purpose."""
    run.before_step(lambda step: run.optimizer.state.clear() if step == at else None)


@control("recurrent", "encoder", onset=0, precision="float16")
def float16_startup(run: ZooRun, at: int) -> None:
    """The loss scale starts far too high and is halved, with skipped updates, until it fits."""
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=200)


@control("plain", "vision_language", onset=0, precision="float16")
def float16_probing(run: ZooRun, at: int) -> None:
    """The loss scale is doubled every five steps, so that it overflows again and again."""
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)


@control("convolution", "encoder", onset=0, precision="bfloat16", samples=4)
def bfloat16_from_the_start(run: ZooRun, at: int) -> None:
    """Everything is in bfloat16 with small batches: the numbers are coarse."""
