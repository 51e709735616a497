"""Healthy runs that look suspicious: nothing here is wrong, and nothing should be done about it.

Those with onset 0 are unlike their twin from the first step on; where such a run also changes on its way, it does so
at `ONSET`, where faults begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from benchmarks.zoo.families import IMAGES, Batch
from benchmarks.zoo.scenario import ONSET, control
from benchmarks.zoo.training import Run

Sample = Callable[[Generator, int], Batch]


def _rng(run: Run, step: int) -> Generator:
    """Chance of one step, apart from the chance its batch was made with."""
    return torch.Generator().manual_seed(run.settings.seed * 7_368_787 + step)


def _normal(run: Run, step: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=_rng(run, step))


def _some(run: Run, step: int, like: Tensor, share: float) -> Tensor:
    """True in a share of the places, by chance."""
    return torch.rand(like.shape, generator=_rng(run, step)) < share


def _toss(run: Run, number: int) -> float:
    return float(torch.rand((), generator=_rng(run, number)) < 0.5)


def _cut(batch: Batch, length: int) -> Batch:
    """Only the first tokens or moments of each sequence."""
    more = None if batch.more is None else batch.more[:, :length]
    return Batch(batch.x[:, :length], batch.y[:, :length], more)


def _pick(batch: Batch, fit: Tensor) -> Batch:
    """As many samples as before, made of those that fit alone; once in many seeds a batch has none, and stays."""
    rows = fit.nonzero().flatten()
    if not len(rows):
        return batch
    rows = rows[torch.arange(len(fit)) % len(rows)]
    return Batch(batch.x[rows], batch.y[rows])


def _parts(run: Run, *kinds: type[nn.Module]) -> list[Any]:
    return [part for part in run.model.modules() if isinstance(part, kinds)]


def _set(run: Run, **options: Any) -> None:
    """Change options of the optimizer, which stays the same object."""
    for group in run.optimizer.param_groups:
        group.update(options)


def _momentum(params: Iterable[Any], rate: float) -> Optimizer:
    return torch.optim.SGD(params, lr=rate, momentum=0.9)


# -- batches


@control("decoder", "vision_language", onset=0, samples=1)
def tiny_batches(run: Run, at: int) -> None:
    """One sample a batch, because no more fits into memory."""


@control("convolution", "residual")
def batch_size_change(run: Run, at: int) -> None:
    """The batch becomes a quarter as large, on purpose."""
    few = run.samples // 4
    run.on_batch(lambda step, batch: batch.head(few) if step >= at else batch)


@control("plain", "autoencoder", accumulate=8)
def accumulation_change(run: Run, at: int) -> None:
    """Eight micro-batches an update become one, on purpose."""

    def change(step: int) -> None:
        run.accumulate = 1 if step >= at else run.settings.accumulate

    run.before_step(change)


@control("decoder", "encoder", onset=0)
def nearly_empty_batches(run: Run, at: int) -> None:
    """One batch in thirteen is padding but for two tokens."""

    def empty(step: int, batch: Batch) -> Batch:
        if step % 13:
            return batch
        y = torch.full_like(batch.y, -100)
        y[:2, 5] = batch.y[:2, 5]
        return batch.with_(y=y)

    run.on_batch(empty)


# -- data


@control("convolution", "residual", onset=0)
def curriculum(run: Run, at: int) -> None:
    """Clear pictures come first, noisy ones from the middle of the run on."""

    def clear(step: int, batch: Batch) -> Batch:
        clean = IMAGES[batch.y, : batch.x.shape[1]]
        return batch if step >= at + ONSET else batch.with_(x=0.3 * batch.x + 0.7 * clean)

    run.on_batch(clear)


@control("decoder", "encoder", onset=0)
def rare_hard_batches(run: Run, at: int) -> None:
    """One batch in 29 is gibberish, as in any large corpus."""

    def gibberish(step: int, batch: Batch) -> Batch:
        order = torch.randperm(batch.y.numel(), generator=_rng(run, step))
        return batch.with_(y=batch.y.flatten()[order].view_as(batch.y)) if step % 29 == 28 else batch

    run.on_batch(gibberish)


@control("plain", "memory", onset=0)
def rare_noisy_batches(run: Run, at: int) -> None:
    """One batch in 23 comes from a bad sensor: its labels are right only on average."""
    run.on_batch(
        lambda step, batch: batch.with_(y=batch.y + 2 * _normal(run, step, batch.y)) if step % 23 == 22 else batch
    )


@control("recurrent", "memory")
def spike_that_heals(run: Run, at: int) -> None:
    """One recording is five times as loud as all others, labels and all."""
    run.on_batch(lambda step, batch: batch.with_(x=batch.x * 5, y=batch.y * 5) if step == at else batch)


@control("decoder", "vision_language", onset=0)
def label_noise(run: Run, at: int) -> None:
    """Six labels in ten are chance."""

    def wrong(step: int, batch: Batch) -> Batch:
        rng = _rng(run, step)
        chance = torch.rand(batch.y.shape, generator=rng) < 0.6
        return batch.with_(y=torch.randint(0, 16, batch.y.shape, generator=rng).where(chance, batch.y))

    run.on_batch(wrong)


@control("plain", "memory", onset=0, clip=1.0, optimizer=torch.optim.Adamax, rate=5e-3)
def heavy_tailed_labels(run: Run, at: int) -> None:
    """Labels have a heavy tail, as prices do: now and then one is far out."""

    def tail(step: int, batch: Batch) -> Batch:
        a, b, c = torch.randn(3, *batch.y.shape, generator=_rng(run, step))
        return batch.with_(y=batch.y + 0.3 * a / (b.square() + c.square()).sqrt())

    run.on_batch(tail)


@control("convolution", "residual", onset=0)
def class_imbalance(run: Run, at: int) -> None:
    """Half of the classes come once in twelve batches only."""
    run.on_batch(lambda step, batch: _pick(batch, batch.y < 5) if step % 12 else _pick(batch, batch.y >= 5))


@control("convolution", "residual", onset=0)
def new_class(run: Run, at: int) -> None:
    """Three classes are met for the first time in the middle of the run."""
    run.on_batch(lambda step, batch: batch if step >= at + ONSET else _pick(batch, batch.y < 7))


@control("decoder", "vision_language")
def second_source(run: Run, at: int) -> None:
    """Every other batch is in a second language, which the model has yet to learn."""

    def translate(step: int, batch: Batch) -> Batch:
        if step < at or step % 2 == 0:
            return batch
        if batch.more is None:
            return Batch(23 - batch.x, 23 - batch.y)
        return Batch(batch.x, 15 - batch.y, 15 - batch.more)

    run.on_batch(translate)


@control("convolution", "residual")
def augmentation_on(run: Run, at: int) -> None:
    """Pictures lose a patch, and get another contrast each, from the middle of the run on."""

    def augment(step: int, batch: Batch) -> Batch:
        if step < at:
            return batch
        x = batch.x * _normal(run, step, batch.x[:, :1, :1, :1]).exp()
        x[:, :, step % 8 : step % 8 + 5, step % 7 : step % 7 + 5] = 0
        return batch.with_(x=x)

    run.on_batch(augment)


@control("recurrent", "autoencoder", onset=0)
def augmentation_off(run: Run, at: int) -> None:
    """Heavy noise on the inputs is switched off in the middle of the run."""
    run.on_batch(
        lambda step, batch: batch if step >= at + ONSET else batch.with_(x=batch.x + _normal(run, step, batch.x))
    )


@control("recurrent", "autoencoder", onset=0, optimizer=torch.optim.Adagrad, rate=0.03)
def masked_inputs(run: Run, at: int) -> None:
    """Three inputs in four are missing: what the model sees is mostly zeros."""

    def masked(rng: Generator, samples: int, sample: Sample = run.family.sample) -> Batch:
        batch = sample(rng, samples)
        return batch.with_(x=batch.x * (torch.rand(batch.x.shape, generator=rng) < 0.25))

    run.family = replace(run.family, sample=masked)


@control("plain", "autoencoder", onset=0, clip=1.0)
def outliers(run: Run, at: int) -> None:
    """One input in two thousand is a hundred; the loop clips, and lives with it."""
    run.on_batch(lambda step, batch: batch.with_(x=batch.x.masked_fill(_some(run, step, batch.x, 0.0005), 100.0)))


@control("plain", "encoder", onset=0)
def easy_task(run: Run, at: int) -> None:
    """The task can be solved without a rest: loss and norms go down by orders of magnitude."""

    def easy(rng: Generator, samples: int, sample: Sample = run.family.sample) -> Batch:
        batch = sample(rng, samples)
        return batch.with_(y=batch.x[:, :4] if batch.more is None else (batch.x % 8).where(batch.more, -100))

    run.family = replace(run.family, sample=easy)


# -- sequences


@control("decoder", "memory", onset=0)
def longer_sequences(run: Run, at: int) -> None:
    """Sequences of four first, whole ones from the middle of the run on."""
    run.on_batch(lambda step, batch: batch if step >= at + ONSET else _cut(batch, 4))


@control("recurrent", "encoder")
def shorter_sequences(run: Run, at: int) -> None:
    """Sequences become a third as long, on purpose."""
    run.on_batch(lambda step, batch: _cut(batch, batch.y.shape[1] // 3) if step >= at else batch)


# -- the rate


@control("recurrent", "autoencoder")
def warm_restarts(run: Run, at: int) -> None:
    """The rate falls along a cosine from its fourfold and starts again, three times."""
    run.scale_rate(lambda step: 2.02 + 1.98 * math.cos(math.pi * ((step - at) % 50) / 50) if step >= at else 1.0)


@control("recurrent", "memory", onset=0)
def cyclic_rate(run: Run, at: int) -> None:
    """The rate goes up and down between a twentieth and the twelvefold."""
    run.scale_rate(lambda step: 0.05 + 12 * abs(step % 40 - 20) / 20)


@control("recurrent", "memory", optimizer=torch.optim.NAdam)
def rate_bump(run: Run, at: int) -> None:
    """The rate is two and a half times as high for ten steps, to leave a flat place."""
    run.scale_rate(lambda step: 2.5 if at <= step < at + 10 else 1.0)


@control("decoder", "residual")
def rate_decay(run: Run, at: int) -> None:
    """The rate is divided by ten."""
    run.scale_rate(lambda step: 0.1 if step >= at else 1.0)


@control("recurrent", "memory", onset=0)
def slow_start(run: Run, at: int) -> None:
    """Nothing seems to move, for the rate is tiny until the middle of the run."""
    run.scale_rate(lambda step: 1.0 if step >= at + ONSET else 1e-3)


@control("recurrent", "autoencoder", onset=0)
def large_stable_rate(run: Run, at: int) -> None:
    """The rate is five times what is usual, and as large as the run can bear."""
    run.scale_rate(lambda step: 5.0)


# -- weights and layers


@control("plain", "encoder", onset=0, steps=400)
def plateau_that_ends(run: Run, at: int) -> None:
    """Small weights put the start on a saddle, which the run leaves by itself after some two hundred steps."""

    def shrink(step: int) -> None:
        for p in run.model.parameters() if step == 0 else ():
            p.data.mul_(0.6)

    run.before_step(shrink)


@control("convolution", "vision_language", onset=0, optimizer=torch.optim.Adamax, rate=5e-3)
def dropout(run: Run, at: int) -> None:
    """Half of the hidden units are dropped, at every step others."""
    for part in _parts(run, nn.ReLU):
        run.on_forward(part, lambda step, out: F.dropout(out, 0.5))


@control("decoder", "vision_language")
def dropout_on(run: Run, at: int) -> None:
    """Dropout is switched on in the middle of the run, against overfitting."""
    for part in _parts(run, nn.LayerNorm):
        run.on_forward(part, lambda step, out: F.dropout(out, 0.4) if step >= at else out)


@control("decoder", "residual", onset=0)
def stochastic_depth(run: Run, at: int) -> None:
    """Whole branches are left out of half of the steps, which leaves their weights without a gradient."""
    branches = [part for name, part in run.model.named_modules() if name.endswith(("mlp", "attention", "norm2"))]
    for number, part in enumerate(branches):
        run.on_forward(part, lambda step, out, number=number: out * _toss(run, 64 * step + number))


@control("convolution", "vision_language", onset=0)
def gradual_unfreezing(run: Run, at: int) -> None:
    """The first half of the parameters is frozen until the middle of the run."""
    params = list(run.model.parameters())
    for p in params[: len(params) // 2]:
        run.on_gradient_of(p, lambda step, g: g * float(step >= at + ONSET))


@control("plain", "autoencoder")
def pruning(run: Run, at: int) -> None:
    """Two thirds of the weights of each layer, the smaller ones, are pruned once and have to grow back."""

    def prune(step: int) -> None:
        for part in _parts(run, nn.Linear) if step == at else ():
            part.weight.data.mul_(part.weight.abs() > part.weight.abs().quantile(2 / 3))

    run.before_step(prune)


# -- loss and gradients


@control("convolution", "residual", onset=0, optimizer=torch.optim.Adam, rate=3e-3)
def policy_gradient(run: Run, at: int) -> None:
    """The model learns from rewards for its guesses alone: the loss is below zero, noisy, and says little."""

    def reward(model: nn.Module, batch: Batch, loss: Callable[..., Tensor] = run.family.loss) -> Tensor:
        if not model.training:
            return loss(model, batch)
        policy = torch.distributions.Categorical(logits=model(batch.x).float())
        guess = policy.sample()
        won = (guess == batch.y).float()
        return -((won - won.mean()) * policy.log_prob(guess)).mean() - 0.2 * policy.entropy().mean()

    run.family = replace(run.family, loss=reward)


@control("decoder", "vision_language", onset=0)
def noisy_advantages(run: Run, at: int) -> None:
    """Each loss is weighted by a noisy advantage that is one on average and of either sign."""
    run.on_loss(lambda step, loss: loss * (1 + 1.5 * float(torch.randn((), generator=_rng(run, step)))))


@control("recurrent", "autoencoder", onset=0)
def diffusion_weights(run: Run, at: int) -> None:
    """Inputs get noise of very different strength from step to step, and the loss a weight to match."""

    def sigma(step: int) -> float:
        return max(0.1, math.exp(1.2 * float(torch.randn((), generator=_rng(run, -1 - step))) - 0.5))

    run.on_batch(lambda step, batch: batch.with_(x=batch.x + sigma(step) * _normal(run, step, batch.x)))
    run.on_loss(lambda step, loss: loss * (1 + sigma(step) ** -2))


@control("plain", "memory")
def loss_reweighting(run: Run, at: int) -> None:
    """The loss counts five times from the middle of the run on; the rate is set to match where it has to."""
    run.on_loss(lambda step, loss: loss * 5 if step >= at else loss)
    if isinstance(run.optimizer, torch.optim.SGD):
        run.scale_rate(lambda step: 0.2 if step >= at else 1.0)


@control("decoder", "vision_language", onset=0)
def summed_loss(run: Run, at: int) -> None:
    """The loss is a sum, not a mean: norms are in the thousands, which the optimizer does not mind."""
    run.on_loss(lambda step, loss: loss * 4096)


@control("plain", "residual", onset=0)
def tiny_units(run: Run, at: int) -> None:
    """The loss is told in a tiny unit and the rate is large to match: norms are far below what one is used to."""
    run.on_loss(lambda step, loss: loss * 2.0**-24)
    run.scale_rate(lambda step: 2.0**24)


@control("convolution", "residual")
def label_smoothing(run: Run, at: int) -> None:
    """Labels are smoothed from the middle of the run on: the loss rises at once."""
    run.on_batch(lambda step, batch: batch.with_(y=0.8 * F.one_hot(batch.y, 10) + 0.02) if step >= at else batch)


@control("decoder", "encoder", onset=0, clip=0.02)
def low_clipping(run: Run, at: int) -> None:
    """The loop clips every gradient to a fraction of its norm, which the optimizer makes up for."""


# -- optimizer and precision


@control("recurrent", "memory")
def betas_change(run: Run, at: int) -> None:
    """Both betas are lowered on purpose: the optimizer forgets faster."""
    run.before_step(lambda step: _set(run, betas=(0.5, 0.9)) if step == at else None)


@control("convolution", "autoencoder", onset=0, optimizer=_momentum, rate=0.05)
def momentum_warmup(run: Run, at: int) -> None:
    """Momentum rises from nothing to 0.98."""
    run.before_step(lambda step: _set(run, momentum=0.98 * min(1.0, (step + 1) / 200)))


@control("convolution", "residual")
def weight_decay_on(run: Run, at: int) -> None:
    """Strong weight decay is switched on in the middle of the run: the weights shrink."""
    run.before_step(lambda step: _set(run, weight_decay=0.02) if step == at else None)


@control("decoder", "encoder", onset=0)
def new_parameter_group(run: Run, at: int) -> None:
    """Half of the parameters are handed to the optimizer only in the middle of the run, as a group of their own."""
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
def fresh_optimizer(run: Run, at: int) -> None:
    """The optimizer's memory is emptied for a new stage, on purpose."""
    run.before_step(lambda step: run.optimizer.state.clear() if step == at else None)


@control("recurrent", "encoder", onset=0, precision="float16")
def float16_startup(run: Run, at: int) -> None:
    """The loss scale starts far too high and is halved, update after update left out, until it fits."""
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=200)


@control("plain", "vision_language", onset=0, precision="float16")
def float16_probing(run: Run, at: int) -> None:
    """The loss scale is doubled every five steps, so that it overflows again and again."""
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)


@control("convolution", "encoder", onset=0, precision="bfloat16", samples=4)
def bfloat16_from_the_start(run: Run, at: int) -> None:
    """Everything in bfloat16, with small batches: the numbers are coarse."""
