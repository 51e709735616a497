"""Faults in the arithmetic: masks, logarithms, variances, precision, and gradients in backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.models import PlainAttention, Transformer
from benchmarks.zoo.scenario import fault
from benchmarks.zoo.training import ZooRun
from surefoot.records import Cause


def _parts(run: ZooRun, kind: type[nn.Module]) -> list[Any]:
    return [module for module in run.model.modules() if isinstance(module, kind)]


def _first(out: Tensor, share: float) -> Tensor:
    """True for the first samples, in a shape that goes with attention's logits."""
    return (torch.arange(len(out)) < share * len(out)).view(-1, 1, 1, 1)


@fault(Cause.ATTENTION_MASK, on={"decoder": "!!!", "encoder": "!!!"}, strengths=(0.05, 0.5, 1.0), steps=420)
def attention_mask(run: ZooRun, at: int, strength: float) -> None:
    """In every tenth batch the last token of a share of the samples may attend to nothing: its softmax is NaN."""

    def mask_last(step: int, out: Tensor) -> Tensor:
        if step < at or (step - at) % 10:
            return out
        last = torch.arange(out.shape[2]).view(-1, 1) == out.shape[2] - 1
        return out.masked_fill(_first(out, strength) & last, -math.inf)

    run.on_forward(_parts(run, PlainAttention)[0].masked, mask_last)


@fault(Cause.ATTENTION_MASK, on={"decoder": ".!!", "vision_language": ".!!"}, strengths=(0.4, 0.9, 1.0), curable=False)
def mask_multiplied(run: ZooRun, at: int, strength: float) -> None:
    """In a share of the samples masked positions get the logit 0 instead of -inf: the model sees the future."""

    def unmask(step: int, out: Tensor) -> Tensor:
        return out.masked_fill(_first(out, strength) & (out == -math.inf), 0.0) if step >= at else out

    for attention in _parts(run, PlainAttention):
        run.on_forward(attention.masked, unmask)


@fault(
    Cause.ATTENTION_MASK,
    on={"decoder": "..!", "encoder": "!!!"},
    strengths={"decoder": (0.1, 0.4, 1.0), "encoder": (0.5, 0.8, 1.0)},
    curable=False,
    steps=420,
)
def mask_too_narrow(run: ZooRun, at: int, strength: float) -> None:
    """In a share of the samples a token may attend to itself alone."""

    def narrow(step: int, out: Tensor) -> Tensor:
        others = ~torch.eye(out.shape[-1], dtype=torch.bool)
        return out.masked_fill(_first(out, strength) & others, -1e4) if step >= at else out

    for attention in _parts(run, PlainAttention):
        run.on_forward(attention.logits, narrow)


@fault(Cause.LOG_OF_ZERO, on={"convolution": "!!!", "residual": "!!!"}, strengths=(12.5, 20.0, 100.0))
def log_of_zero(run: ZooRun, at: int, strength: float) -> None:
    """In every tenth batch an extra loss term takes the log of sharpened probabilities, some of which are 0."""
    outputs: list[Tensor] = []

    def record(step: int, out: Tensor) -> Tensor:
        outputs[:] = [out] if step >= at else []
        return out

    def term(step: int, loss: Tensor) -> Tensor:
        if step < at or (step - at) % 10:
            return loss
        return loss - 1e-3 * (strength * outputs[0].float()).softmax(-1).log().mean()

    run.on_forward(run.model, record)
    run.on_loss(term)


@fault(
    Cause.LOG_OF_ZERO,
    on={"plain": "!!!", "memory": ".!!"},
    strengths={"plain": (0.05, 1e-3, 0.0), "memory": (0.1, 1e-3, 0.0)},
)
def division_by_zero(run: ZooRun, at: int, strength: float) -> None:
    """Every 20 steps the loss is divided by a count close to zero."""
    run.on_loss(lambda step, loss: loss / strength if step >= at and (step - at) % 20 == 0 else loss)


@fault(Cause.ZERO_VARIANCE, on={"decoder": ".!!", "vision_language": ".!!"}, strengths=(1e7, 1e8, 1e10))
def zero_variance(run: ZooRun, at: int, strength: float) -> None:
    """Every tenth batch gets an offset that swallows the variance of the values, in a layer norm without epsilon."""
    transformer = _parts(run, Transformer)[0]

    def offset(step: int, out: Tensor) -> Tensor:
        if step < at or (step - at) % 10:
            return out
        transformer.norm.eps = 0.0
        return out + strength

    run.on_forward(transformer.blocks[-1], offset)


@fault(
    Cause.ZERO_VARIANCE,
    on={"convolution": "!!!", "residual": "!!!"},
    strengths=(3.0, 2.0, 1.0),
    curable=False,
    steps=420,
)
def batch_norm_tiny_batches(run: ZooRun, at: int, strength: float) -> None:
    """The batch shrinks to a few samples or one, and batch norm still normalises over it."""
    run.on_batch(lambda step, batch: batch.head(int(strength)) if step >= at else batch)


@fault(
    Cause.PRECISION_OVERFLOW,
    on={"plain": ".!!", "autoencoder": ".!!"},
    strengths={"plain": (45e3, 60e3, 200e3), "autoencoder": (35e3, 42e3, 100e3)},
    precision="float16",
    steps=420,
)
def overflow_float16(run: ZooRun, at: int, strength: float) -> None:
    """Values on their way out of the model are scaled up and down again, beyond the range of float16."""
    last = _parts(run, nn.Linear)[-1]
    run.on_forward(last, lambda step, out: out * strength / strength if step >= at else out)


@fault(
    Cause.PRECISION_OVERFLOW,
    on={"plain": ".!!", "autoencoder": ".!!"},
    strengths=(10.0, 35.0, 45.0),
    precision="float16",
    steps=420,
)
def loss_scale_collapse(run: ZooRun, at: int, strength: float) -> None:
    """One gradient overflows for many steps in a row, and the loss scale is halved each time."""
    weight = next(run.model.parameters())
    run.on_gradient_of(weight, lambda step, g: g * math.inf if at <= step < at + strength else g)


@fault(
    Cause.PRECISION_UNDERFLOW,
    on={"recurrent": ".!!", "residual": ".!!"},
    strengths=(2.0**-12, 2.0**-17, 2.0**-24),
    precision="float16",
    steps=420,
)
def underflow_float16(run: ZooRun, at: int, strength: float) -> None:
    """The loss scale is set far too low, and small gradients become 0."""

    def lower(step: int) -> None:
        if step == at and run.scaler is not None:
            run.scaler.update(strength)

    run.before_step(lower)


@fault(
    Cause.PRECISION_UNDERFLOW,
    on={"recurrent": ".!!", "autoencoder": ".!!"},
    strengths=(8.0, 4.0, 2.0),
    curable=False,
    steps=420,
)
def rounded_weights(run: ZooRun, at: int, strength: float) -> None:
    """The weights are stored in few bits, bfloat16's eight or fewer, and small updates are lost."""

    def rounded(step: int) -> None:
        for p in run.model.parameters() if step >= at else ():
            part, power = torch.frexp(p.detach())
            p.data.copy_(torch.ldexp(torch.round(part * 2**strength) / 2**strength, power))

    run.after_step(rounded)


@fault(
    Cause.LOGIT_GROWTH,
    on={"decoder": "..!", "vision_language": ".!!"},
    strengths={"decoder": (1.02, 1.1, 10.0), "vision_language": (1.02, 1.3, 10.0)},
)
def attention_logits(run: ZooRun, at: int, strength: float) -> None:
    """Over 20 steps the weights of queries and keys grow, and attention's logits with them."""

    def grow(step: int) -> None:
        for attention in _parts(run, PlainAttention) if at <= step < at + 20 else ():
            attention.qkv.weight.detach()[: 2 * attention.out.in_features].mul_(strength)

    run.before_step(grow)


@fault(
    Cause.TRANSIENT,
    on={"convolution": ".!!", "memory": "!!!"},
    strengths={"convolution": (10.0, 1e3, 1e6), "memory": (20.0, 1e3, 1e6)},
)
def gradient_burst(run: ZooRun, at: int, strength: float) -> None:
    """A broken link multiplies all gradients for three steps."""
    for p in run.model.parameters():
        run.on_gradient_of(p, lambda step, g: g * strength if at <= step < at + 3 else g)


@fault(
    Cause.TRANSIENT,
    on={"recurrent": "!!!", "residual": "!!!"},
    strengths=(1.0, 3.0, 10.0),
    precision="bfloat16",
    optimizer=torch.optim.RAdam,
    lr=8e-3,
)
def gradient_nan(run: ZooRun, at: int, strength: float) -> None:
    """One tensor's gradient is NaN for a few steps."""
    largest = max(run.model.parameters(), key=Tensor.numel)
    run.on_gradient_of(largest, lambda step, g: g * math.nan if at <= step < at + strength else g)
