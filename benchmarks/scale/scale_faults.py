"""Faults for the large decoder. Stretches are stated for runs of full length and are shorter in shorter runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.scale.loops import Batch
from benchmarks.scale.scale_run import ScaleRun
from benchmarks.scale.scale_scenario import fault
from benchmarks.scale.sizes import BYTES
from surefoot.records import Cause


def _stretch(run: ScaleRun, at: int, updates: int) -> Callable[[int], bool]:
    """Whether a step lies in a stretch of so many updates."""
    end = at + run.size.scaled(updates)
    return lambda step: at <= step < end


def _once(run: ScaleRun, at: int, damage: Callable[[], None]) -> None:
    """Damage something before the forward pass of one step."""

    def hook(step: int) -> None:
        if step == at:
            with torch.no_grad():
                damage()

    run.before_hooks.append(hook)


# -- data


def _garbage(run: ScaleRun, batch: Batch) -> Batch:
    shape = (len(batch["inputs"]), run.size.context + 1)
    tokens = torch.randint(BYTES, shape, generator=run.generator()).to(run.device)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@fault(Cause.BAD_BATCH)
def garbage_batch(run: ScaleRun, at: int) -> None:
    """One batch is random bytes."""
    run.batch_hooks.append(lambda step, batch: _garbage(run, batch) if step == at else batch)


@fault(Cause.BAD_BATCH, Cause.DRIFT)
def garbage_for_60(run: ScaleRun, at: int) -> None:
    """60 batches in a row are random bytes."""
    bad = _stretch(run, at, 60)
    run.batch_hooks.append(lambda step, batch: _garbage(run, batch) if bad(step) else batch)


@fault(Cause.LABELS, Cause.BAD_BATCH)
def wrong_targets_for_80(run: ScaleRun, at: int) -> None:
    """In 80 batches in a row the targets are shuffled."""
    bad = _stretch(run, at, 80)

    def shuffled(targets: Tensor) -> Tensor:
        order = torch.randperm(targets.numel(), generator=run.generator()).to(run.device)
        return targets.flatten()[order].view_as(targets)

    run.batch_hooks.append(lambda step, batch: {**batch, "targets": shuffled(batch["targets"])} if bad(step) else batch)


@fault(Cause.OVERFITTING, Cause.BAD_BATCH)
def same_batch_for_80(run: ScaleRun, at: int) -> None:
    """The loader repeats one batch for 80 updates."""
    stuck = _stretch(run, at, 80)
    places = torch.linspace(0.1, 0.9, run.rows, dtype=torch.float64, device=run.device)
    repeated = run.windows(run.texts.source.train, places)
    run.batch_hooks.append(lambda step, batch: repeated if stuck(step) else batch)


@fault(Cause.INPUT_SCALE)
def embedding_scaled_for_40(run: ScaleRun, at: int) -> None:
    """For 40 updates the embedded inputs are multiplied by 30."""
    scaled = _stretch(run, at, 40)
    run.on_forward(run.model.embed, lambda step, out: out * 30 if scaled(step) else out)


# -- learning rate, momentum, clipping


@fault(Cause.LEARNING_RATE, Cause.SCHEDULE)
def lr_x30(run: ScaleRun, at: int) -> None:
    """The learning rate is 30 times as high from one update to the end."""
    run.lr_hooks.append(lambda step: 30.0 if step >= at else 1.0)


@fault(Cause.SCHEDULE, Cause.LEARNING_RATE)
def lr_spike_for_20(run: ScaleRun, at: int) -> None:
    """The scheduler returns 100 times the learning rate for 20 updates."""
    spike = _stretch(run, at, 20)
    run.lr_hooks.append(lambda step: 100.0 if spike(step) else 1.0)


@fault(Cause.LEARNING_RATE, Cause.EXPLODING_GRADIENT)
def clip_lost_lr_x3(run: ScaleRun, at: int) -> None:
    """Gradients are no longer clipped, and the learning rate is three times as high."""

    def unclip(step: int) -> None:
        run.clip = math.inf if step >= at else run.clip

    run.before_hooks.append(unclip)
    run.lr_hooks.append(lambda step: 3.0 if step >= at else 1.0)


@fault(Cause.MOMENTUM, curable=False)
def beta1_raised(run: ScaleRun, at: int) -> None:
    """AdamW's first beta becomes 0.999 for good."""

    def heighten(step: int) -> None:
        for group in run.optimizer.param_groups if step >= at else ():
            group["betas"] = (0.999, group["betas"][1])

    run.before_hooks.append(heighten)


@fault(Cause.LEARNING_RATE, Cause.SCHEDULE, from_birth=True)
def too_hot_from_birth(run: ScaleRun, at: int) -> None:
    """The learning rate is 20 times too high from the first update on."""
    run.lr_hooks.append(lambda step: 20.0)


@fault(Cause.INITIALISATION, Cause.SCHEDULE, Cause.LEARNING_RATE, curable=False, from_birth=True)
def large_init_no_warmup(run: ScaleRun, at: int) -> None:
    """All matrices start eight times too large, and there is no warmup."""
    with torch.no_grad():
        for param in run.model.parameters():
            if param.dim() > 1:
                param.mul_(8.0)
    run.lr_hooks.append(lambda step: max(1.0, run.size.warmup / (step + 1)))


# -- optimizer state and weights


@fault(Cause.OPTIMIZER_STATE)
def second_moments_damaged(run: ScaleRun, at: int) -> None:
    """AdamW's second moments shrink to a ten-thousandth, once."""

    def shrink() -> None:
        for state in run.optimizer.state.values():
            state["exp_avg_sq"].mul_(1e-4)

    _once(run, at, shrink)


@fault(Cause.WEIGHTS_DAMAGED)
def block_scaled(run: ScaleRun, at: int) -> None:
    """The weights of one transformer block are multiplied by 8, once."""

    def enlarge() -> None:
        for param in run.model.blocks[len(run.model.blocks) // 2].parameters():
            param.mul_(8.0)

    _once(run, at, enlarge)


@fault(Cause.WEIGHTS_DAMAGED)
def bit_flip(run: ScaleRun, at: int) -> None:
    """The highest exponent bit of one weight flips, once."""

    def flip() -> None:
        weight = max(run.model.parameters(), key=Tensor.numel).view(-1)
        place = int(torch.randint(weight.numel(), (), generator=run.generator()))
        weight.view(torch.int32)[place] ^= 1 << 30

    _once(run, at, flip)


# -- losses and gradients


@fault(Cause.TRANSIENT)
def nan_gradient(run: ScaleRun, at: int) -> None:
    """The gradient of one matrix is NaN at one update."""
    largest = max(run.model.parameters(), key=Tensor.numel)
    run.on_gradient_of(largest, lambda step, grad: grad * math.nan if step == at else grad)


@fault(Cause.TRANSIENT, Cause.BAD_BATCH, Cause.LOG_OF_ZERO)
def nan_loss_for_12(run: ScaleRun, at: int) -> None:
    """The loss is NaN for 12 updates in a row."""
    bad = _stretch(run, at, 12)
    run.loss_hooks.append(lambda step, loss: loss * math.nan if bad(step) else loss)


@fault(Cause.ACCUMULATION)
def loss_not_divided(run: ScaleRun, at: int) -> None:
    """The loss is 8 times as large for good, as if accumulated without dividing."""
    run.loss_hooks.append(lambda step, loss: loss * 8 if step >= at else loss)


@fault(Cause.ACCUMULATION, curable=False)
def zero_grad_forgotten(run: ScaleRun, at: int) -> None:
    """Gradients are never zeroed again."""

    def forget(step: int) -> None:
        run.zeroes_gradients = step < at

    run.before_hooks.append(forget)
